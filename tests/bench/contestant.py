"""A contestant of a benchmark: a child process that answers jobs, and stands still while another one has its turn."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
MARK = "ANSWER "  # libraries write to stdout too
START_S = 600.0


class ContestantFailed(Exception):
    """A contestant ended instead of answering; the message has the end of what it wrote to stderr."""


class Contestant:
    """Started at once; ``ready`` waits until it can answer. As a context manager it ends with all its children."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the contestant
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, *exc_info: object) -> None:
        family = self._family()
        for process in reversed(family):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=10)
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # a job that it did not live to read
                    stream.close()

    def ready(self) -> None:
        """Wait for its first line, then let it stand still. Raises ContestantFailed."""
        self._read()
        self.stand_still()

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Its figures of one job; the process stands still before and after. Raises ContestantFailed."""
        self.go_on()
        try:
            return self.ask(job)
        finally:
            self.stand_still()

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Its figures of one job, while it does not stand still. Raises ContestantFailed."""
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: there is no answer to read
            self._child.stdin.write(json.dumps(job) + "\n")
            self._child.stdin.flush()
        return self._read()

    def go_on(self) -> None:
        """It runs from now on."""
        self._signal(psutil.Process.resume)

    def stand_still(self) -> None:
        """It uses no CPU from now on, whatever it does while it waits."""
        self._signal(psutil.Process.suspend)

    def _signal(self, send: Any) -> None:
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                send(process)

    def _family(self) -> list[psutil.Process]:
        try:
            parent = psutil.Process(self._child.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith(MARK):
                answer: dict[str, Any] = json.loads(line[len(MARK) :])
                return answer
        self._errors.seek(0)
        raise ContestantFailed(f"{self.name} ended with {self._child.wait()}:\n{self._errors.read()[-3000:]}")


def first_output(command: Sequence[str]) -> float:
    """Seconds from the start of a command until its first line on stdout that is an answer, or any if none is marked.

    Raises ContestantFailed when it fails.
    """
    begin = time.perf_counter()
    marked = plain = 0.0
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, stdin=subprocess.DEVNULL, cwd=ROOT
        ) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            plain = plain or time.perf_counter() - begin
            if line.startswith(MARK):
                marked = marked or time.perf_counter() - begin
        if child.wait() or not (marked or plain):
            errors.seek(0)
            raise ContestantFailed(f"{' '.join(command)} ended with {child.returncode}:\n{errors.read()[-3000:]}")
    return marked or plain
