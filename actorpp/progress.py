"""What a person sees of long work: progress on stderr.

On a terminal it is a bar; elsewhere it is a line at the start, the end and about each tenth of a phase.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from actorpp.serving.api import StartupProgress

PHASES = {
    "download": "downloading",
    "extract": "extracting",
    "convert": "converting",
    "load": "loading",
    "profile": "profiling",
    "prefill": "prefill",
    "generate": "generating",
    "warm-up": "warming up",
    "measure": "measuring",
    "fixed sizes": "fixed sizes",
    "initial sizes": "initial sizes",
    "smoothing": "smoothing",
    "finalists": "finalists",
}


def amount(done: float, total: float | None, unit: str) -> str:
    """``45.0 MB of 98.4 MB``, ``512 of 8000 tokens``."""
    if unit == "bytes":
        return decimal(int(done)) if total is None else f"{decimal(int(done))} of {decimal(int(total))}"
    return f"{int(done)} {unit}" if total is None else f"{int(done)} of {int(total)} {unit}"


class _AmountColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(amount(task.completed, task.total, task.fields["unit"]), no_wrap=True)


class ProgressDisplay:
    """Progress of the engine's start and of what follows, on stderr. One phase is shown at a time."""

    def __init__(self) -> None:
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._tenths: dict[str, int] = {}  # last tenth printed, without a terminal
        self._part: str | None = None
        self._parts: TaskID | None = None  # the bar of all parts

    def startup(self, progress: StartupProgress) -> None:
        """Show how far the engine's start has come. May be called from any thread."""
        self.show(progress.phase, progress.done, progress.total or None, progress.unit)

    def show(self, phase: str, done: int, total: int | None, unit: str) -> None:
        if not sys.stderr.isatty():
            self._print(phase, done, total, unit)
            return
        bars = self._drawn()
        if phase not in self._tasks:
            self._tasks[phase] = bars.add_task(PHASES[phase], total=total, unit=unit)
        bars.update(self._tasks[phase], completed=done, total=total)

    def part(self, name: str, done: int, total: int, unit: str) -> None:
        """One of several parts of the work begins, ``done`` of ``total`` are over: its phases are shown anew."""
        self._part = name
        self._tenths = {}
        if not sys.stderr.isatty():
            return
        bars = self._drawn()
        for task in self._tasks.values():
            bars.remove_task(task)
        self._tasks = {}
        if self._parts is None:
            self._parts = bars.add_task(name, total=total, unit=unit)
        bars.update(self._parts, description=name, completed=done, total=total)

    def close(self) -> None:
        """Leave the bars as they are; nothing more is drawn. Safe to call again."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
            self._tasks = {}
            self._parts = None

    def _drawn(self) -> Progress:
        if self._bars is None:
            self._bars = Progress(
                TextColumn("{task.description:>11}"),
                BarColumn(),
                _AmountColumn(),
                TimeRemainingColumn(),
                console=Console(file=sys.stderr),
            )
            self._bars.start()
        return self._bars

    def _print(self, phase: str, done: int, total: int | None, unit: str) -> None:
        tenth = 10 * done // total if total else 0
        if tenth > self._tenths.get(phase, -1):
            self._tenths[phase] = tenth
            part = "" if self._part is None else f"{self._part}: "
            print(f"{part}{PHASES[phase]}: {amount(done, total, unit)}", file=sys.stderr, flush=True)
