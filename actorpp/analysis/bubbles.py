"""Where a stage did not compute although the pipeline had work: the one definition, for traces and for live figures.

From the first step's start on the first stage to the last one's end on the last, each stage computes or is in a bubble.
Where the pipeline had no request at all in between, it rested: that is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from actorpp.analysis.steps import TracedStep

Spans = Sequence[tuple[float, float]]  # of one step: when each stage began and ended to compute it


@dataclass(frozen=True)
class Bubble:
    """A stretch of time in which one stage computed nothing, though the pipeline had work.

    ``fill``: its first step had not come yet; ``drain``: its last one was done; ``wait``: in between.
    """

    stage: int
    kind: Literal["fill", "wait", "drain"]
    start: float
    end: float


def bubbles(steps: Sequence[TracedStep]) -> list[Bubble]:
    """All bubbles of these steps, of a stretch of time in which the pipeline never rested, stage by stage."""
    if not steps:
        return []
    spans = [
        tuple(zip(step.starts, step.ends, strict=True))
        for step in sorted(steps, key=lambda step: (step.epoch, step.seq))
    ]
    found = [*_fill(spans[0]), *_drain(spans[-1])]
    for before, after in pairwise(spans):
        found += between(before, after)
    return sorted(found, key=lambda bubble: (bubble.stage, bubble.start))


def between(before: Spans, after: Spans, *, rested: bool = False) -> Iterator[Bubble]:
    """The bubbles between two steps that follow each other.

    Args:
        rested: The pipeline had no request after the first and before the second.
    """
    if rested:
        yield from _drain(before)
        yield from _fill(after)
        return
    for stage, ((_, ended), (started, _)) in enumerate(zip(before, after, strict=True)):
        if started > ended:
            yield Bubble(stage, "wait", ended, started)


def _fill(spans: Spans) -> Iterator[Bubble]:
    begin = spans[0][0]
    return (Bubble(stage, "fill", begin, start) for stage, (start, _) in enumerate(spans) if start > begin)


def _drain(spans: Spans) -> Iterator[Bubble]:
    last = spans[-1][1]
    return (Bubble(stage, "drain", end, last) for stage, (_, end) in enumerate(spans) if last > end)
