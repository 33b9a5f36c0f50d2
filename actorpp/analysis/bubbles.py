"""Where a stage did not compute: before its first step, after its last one, and in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from actorpp.analysis.steps import TracedStep


@dataclass(frozen=True)
class Bubble:
    """A stretch of time in which one stage computed nothing, though the pipeline was at work.

    ``fill``: its first step had not come yet; ``drain``: its last one was done; ``wait``: in between.
    """

    stage: int
    kind: Literal["fill", "wait", "drain"]
    start: float
    end: float


def bubbles(steps: Sequence[TracedStep]) -> list[Bubble]:
    """All bubbles between the first step's start on the first stage and the last one's end on the last."""
    if not steps:
        return []
    begin, end = min(step.starts[0] for step in steps), max(step.ends[-1] for step in steps)
    found: list[Bubble] = []
    for stage in range(len(steps[0].starts)):
        at = begin
        for start, stop in sorted((step.starts[stage], step.ends[stage]) for step in steps):
            if start > at:
                found.append(Bubble(stage, "fill" if at == begin else "wait", at, start))
            at = max(at, stop)
        if end > at:
            found.append(Bubble(stage, "drain", at, end))
    return found
