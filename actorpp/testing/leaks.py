"""Fails a test that leaves something behind: a task, a thread, a socket or pipe, or a child process.

Use ``no_leaks()`` around a test, for instance in an autouse fixture. Open files are not its business (Python warns of
them), nor are C threads. Descriptors and processes are seen through /proc; elsewhere only tasks and threads are.
"""

from __future__ import annotations

import asyncio
import asyncio.runners
import contextlib
import functools
import gc
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from unittest import mock

PATIENCE = 2.0
"""Seconds that threads and processes which are just ending get."""

_cancel_all_tasks: Callable[[asyncio.AbstractEventLoop], None] = asyncio.runners._cancel_all_tasks  # type: ignore[attr-defined]
_KINDS = ("socket:", "pipe:", "anon_inode:[eventfd]", "anon_inode:[eventpoll]")


class LeakError(AssertionError):
    """Something was left behind; the message lists it."""


def leftover_tasks(loop: asyncio.AbstractEventLoop) -> list[str]:
    """Names of the loop's unfinished tasks, but for the current one."""
    current = asyncio.current_task(loop) if loop.is_running() else None
    return sorted(f"task {task.get_name()}" for task in asyncio.all_tasks(loop) if task is not current)


@contextlib.contextmanager
def no_leaks(*, ignore_threads: Sequence[str] = ()) -> Iterator[None]:
    """Raise LeakError at the end of the block for whatever was started in it and is still there.

    Tasks count when an ``asyncio.Runner`` (also behind asyncio.run) that closes in the block has to cancel them.

    Args:
        ignore_threads: Prefixes of the names of threads that may stay.
    """
    tasks: list[str] = []

    def cancel_and_note(loop: asyncio.AbstractEventLoop) -> None:
        tasks.extend(leftover_tasks(loop))
        _cancel_all_tasks(loop)

    _open_what_stays_open()
    threads, descriptors, children = set(threading.enumerate()), _descriptors(), _children()
    with mock.patch.object(asyncio.runners, "_cancel_all_tasks", cancel_and_note):
        yield

    def found() -> list[str]:
        new_threads = set(threading.enumerate()) - threads
        names = [thread.name for thread in new_threads if not thread.name.startswith(tuple(ignore_threads))]
        return [
            *tasks,
            *(f"thread {name}" for name in names),
            *(f"descriptor {fd} ({target})" for fd, target in sorted(_descriptors().items() - descriptors.items())),
            *(f"process {pid} ({_command(pid)})" for pid in sorted(_children() - children)),
        ]

    left = found()
    if left and not tasks:
        gc.collect()  # a socket in a reference cycle is closed, with Python's own warning
        end = time.monotonic() + PATIENCE
        while (left := found()) and time.monotonic() < end:
            time.sleep(0.01)
    if left:
        raise LeakError("left behind: " + ", ".join(left))


@functools.cache
def _open_what_stays_open() -> None:
    """Make libuv's pipe for signals, which it opens once per process, a part of what was there before."""
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("uvloop").new_event_loop().close()


def _descriptors() -> dict[int, str]:
    """Sockets, pipes and event descriptors of this process, with what they lead to."""
    found: dict[int, str] = {}
    tracker = getattr(getattr(resource_tracker, "_resource_tracker", None), "_fd", None)
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith(_KINDS) and int(name) != tracker:
                    found[int(name)] = target
    return found


def _children() -> set[int]:
    """Process ids of this process's children, zombies included, but for multiprocessing's resource tracker."""
    found: set[int] = set()
    with contextlib.suppress(FileNotFoundError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{thread}/children") as file:
                found.update(int(pid) for pid in file.read().split())
    tracker = getattr(getattr(resource_tracker, "_resource_tracker", None), "_pid", None)
    return found - {tracker}


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip() or "zombie"
    except FileNotFoundError:
        return "gone"
