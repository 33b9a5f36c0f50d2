"""Named points in a stage at which a fault strikes, in the product's own code. Armed by files, so across processes.

The file ``FOLDER/STAGE`` has one strike a line: point, kind, and at which visit of the point. The first line counts;
when it has struck it is gone, and the next line waits, if need be for the stage's next incarnation.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

POINTS = ("loading", "joining", "prefill", "decode", "sending", "receiving")


@dataclass(frozen=True)
class Strike:
    """``kind``: kill, stop, or (while computing) hang. ``visit``: at so many arrivals at the point, from 1."""

    stage: int
    point: str
    kind: str = "kill"
    visit: int = 1


def arm(folder: Path, strikes: Sequence[Strike]) -> None:
    """Those of one stage strike one after the other."""
    lines: dict[int, list[str]] = {}
    for strike in strikes:
        lines.setdefault(strike.stage, []).append(f"{strike.point} {strike.kind} {strike.visit}\n")
    for stage, own in lines.items():
        write(folder / str(stage), own)


def write(path: Path, lines: Sequence[str]) -> None:
    """Replace the file as a whole, or remove it when there is nothing left."""
    if not lines:
        path.unlink()
        return
    new = path.with_suffix(".new")
    new.write_text("".join(lines))
    new.rename(path)


def armed(folder: Path) -> bool:
    """Whether a strike is still to come."""
    return any(folder.iterdir())


class Trap:
    """Args:
    folder: Where strikes are armed.
    strike: Called with stage and kind when one strikes.
    """

    def __init__(self, folder: Path, strike: Callable[[int, str], None]) -> None:
        self._folder = folder
        self._strike = strike
        self._lock = threading.Lock()

    def reach(self, stage: int, point: str) -> None:
        """A stage is at a point."""
        path = self._folder / str(stage)
        with self._lock:
            try:
                first, *rest = path.read_text().splitlines(keepends=True)
            except FileNotFoundError:
                return
            wanted, kind, visit = first.split()
            if wanted != point:
                return
            left = int(visit) - 1
            write(path, [f"{wanted} {kind} {left}\n", *rest] if left else rest)
        if not left:
            self._strike(stage, kind)

    def around(self, point: str, stage_of: Callable[..., int], function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with the point at its beginning."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.reach(stage_of(*args), point)
            return function(*args, **kwargs)

        return watched

    def set(self, stack: ExitStack) -> None:
        """At the points that stages in processes and on a loop have in common."""
        from actorpp.stages.host import StageHost  # not before a stage process has chosen what it imports

        compute = StageHost._compute

        def computed(host: StageHost, step: Any, *rest: Any) -> Any:
            decode = all(segment.token is not None for segment in step.segments)
            self.reach(host.spec.stage, "decode" if decode else "prefill")
            return compute(host, step, *rest)

        stack.enter_context(patch.object(StageHost, "_compute", computed))
        load = self.around("loading", lambda host, *rest: host.spec.stage, StageHost.load)
        stack.enter_context(patch.object(StageHost, "load", load))


def folder_of_environment() -> Path:
    """Where the harness arms the stages that it starts."""
    return Path(os.environ["ACTORPP_FAULTS"])
