"""What a person sees: progress on stderr, the answer on stdout as it comes, and a closing line of figures.

On a terminal, progress is a bar; elsewhere it is a line at the start, the end and about each tenth of a phase.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from actorpp.errors import OutputError
from actorpp.serving.api import RequestMetrics, StartupProgress

PHASES = {
    "download": "downloading",
    "extract": "extracting",
    "convert": "converting",
    "load": "loading",
    "prefill": "prefill",
}


def amount(done: float, total: float | None, unit: str) -> str:
    """``45.0 MB of 98.4 MB``, ``512 of 8000 tokens``."""
    if unit == "bytes":
        return decimal(int(done)) if total is None else f"{decimal(int(done))} of {decimal(int(total))}"
    return f"{int(done)} {unit}" if total is None else f"{int(done)} of {int(total)} {unit}"


class _AmountColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(amount(task.completed, task.total, task.fields["unit"]))


class ProgressDisplay:
    """Progress of the engine's start and of the prefill, on stderr. One phase is shown at a time."""

    def __init__(self) -> None:
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._tenths: dict[str, int] = {}  # last tenth printed, without a terminal

    def startup(self, progress: StartupProgress) -> None:
        """Show how far the engine's start has come. May be called from any thread."""
        self.show(progress.phase, progress.done, progress.total or None, progress.unit)

    def show(self, phase: str, done: int, total: int | None, unit: str) -> None:
        if not sys.stderr.isatty():
            self._print(phase, done, total, unit)
            return
        if self._bars is None:
            self._bars = Progress(
                TextColumn("{task.description:>11}"),
                BarColumn(),
                _AmountColumn(),
                TimeRemainingColumn(),
                console=Console(file=sys.stderr),
            )
            self._bars.start()
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(PHASES[phase], total=total, unit=unit)
        self._bars.update(self._tasks[phase], completed=done, total=total)

    def close(self) -> None:
        """Leave the bars as they are; nothing more is drawn. Safe to call again."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
            self._tasks = {}

    def _print(self, phase: str, done: int, total: int | None, unit: str) -> None:
        tenth = 10 * done // total if total else 0
        if tenth > self._tenths.get(phase, -1):
            self._tenths[phase] = tenth
            print(f"{PHASES[phase]}: {amount(done, total, unit)}", file=sys.stderr, flush=True)


class Output:
    """Our results, to a file descriptor or a stream; always UTF-8, unbuffered."""

    def __init__(self, to: int | TextIO) -> None:
        self._to = to

    def write(self, text: str) -> None:
        """Write at once. Raises OutputError when it cannot be written."""
        try:
            if isinstance(self._to, int):
                data = text.encode("utf-8", "replace")
                while data:
                    data = data[os.write(self._to, data) :]
            else:
                self._to.write(text)
                self._to.flush()
        except OSError as error:
            raise OutputError(f"cannot write to stdout: {error.strerror}") from None


@contextmanager
def reserved_stdout() -> Iterator[Output]:
    """Keep stdout for results: what anything else writes to it meanwhile, child processes too, lands on stderr."""
    if sys.stdout is not sys.__stdout__ or sys.stdout is None:  # someone else holds it already, as a test does
        yield Output(sys.stdout)
        return
    sys.stdout.flush()
    stdout = sys.stdout.fileno()
    saved = os.dup(stdout)
    os.dup2(sys.stderr.fileno(), stdout)
    try:
        yield Output(saved)
    finally:
        os.dup2(saved, stdout)
        os.close(saved)


def figures(metrics: RequestMetrics) -> str:
    """The closing line: TTFT, prefill tokens/s, TPOT, busy share per stage."""
    parts = []
    if metrics.ttft_s is not None:
        parts.append(f"TTFT {_seconds(metrics.ttft_s)}")
    if metrics.prefill_tok_s is not None:
        parts.append(f"prefill {metrics.prefill_tok_s:.0f} tokens/s")
    if metrics.tpot_s is not None:
        parts.append(f"TPOT {_seconds(metrics.tpot_s)}")
    busy = ", ".join(f"{share:.0%}" for share in metrics.stage_busy)
    parts.append(f"busy per stage {busy}")
    return " | ".join(parts)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
