"""``actorpp`` as a user starts it: a process in a process group of its own, its lines awaited, its signals sent."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
CEILING_S = 120.0  # nothing here takes a tenth of it on a quiet machine


class Command:
    """A running command. ``stderr`` and ``stdout`` hold the lines so far; ``wait_for`` waits for the next match."""

    def __init__(self, *arguments: str, environment: dict[str, str], program: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *program, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # what the terminal's Ctrl-C reaches: this group, and none of the stages'
        )
        self.stdout = ""
        self.stderr = ""
        self._news: queue.Queue[None] = queue.Queue()
        self._readers = [
            threading.Thread(target=self._read, args=(name,), daemon=True) for name in ("stdout", "stderr")
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str) -> None:
        stream = getattr(self.process, name)
        while data := os.read(stream.fileno(), 65536):
            setattr(self, name, getattr(self, name) + data.decode(errors="replace"))
            self._news.put(None)
        self._news.put(None)

    def wait_for(self, text: str) -> None:
        """Until ``text`` has been written to stdout or stderr."""
        end = time.monotonic() + CEILING_S
        while text not in self.stdout and text not in self.stderr:
            if self.process.poll() is not None and not any(reader.is_alive() for reader in self._readers):
                raise AssertionError(f"ended with {self.process.returncode} without {text!r}:\n{self.stderr}")
            if time.monotonic() > end:
                raise AssertionError(f"no {text!r} in {CEILING_S} s:\n{self.stderr}")
            try:
                self._news.get(timeout=1.0)
            except queue.Empty:
                continue

    def family(self) -> list[psutil.Process]:
        """The process and all its descendants."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def interrupt(self) -> None:
        """What the terminal does at Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    def finish(self, timeout: float = CEILING_S) -> int:
        code = self.process.wait(timeout)
        for reader in self._readers:
            reader.join()
        return code


@contextmanager
def running(
    *arguments: str, environment: dict[str, str], program: Sequence[str] = ("-m", "actorpp.cli")
) -> Iterator[Command]:
    """A command that is killed, with all its descendants, if the test leaves it running."""
    command = Command(*arguments, environment=environment, program=program)
    try:
        yield command
    finally:
        if command.process.poll() is None:
            for process in reversed(command.family()):
                process.kill()
        command.finish()
        for stream in (command.process.stdout, command.process.stderr):
            if stream is not None:
                stream.close()


def gone(processes: list[psutil.Process], within: float = 5.0) -> list[psutil.Process]:
    """Processes that are still there ``within`` seconds from now."""
    _, alive = psutil.wait_procs(processes, timeout=within)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
