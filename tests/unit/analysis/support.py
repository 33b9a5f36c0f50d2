"""Traces made by hand."""

from __future__ import annotations

from collections.abc import Sequence

from actorpp.analysis.trace import Trace, TracedRequest
from actorpp.stages.messages import FromOutput, Segment, Span

Times = Sequence[tuple[float, float]]


def spans_of(steps: Sequence[tuple[tuple[Segment, ...], Times]], stages: int) -> tuple[tuple[Span, ...], ...]:
    """One compute span for each step and stage; a step is its segments and (start, end) on each stage."""
    return tuple(
        tuple(
            Span("compute", 1, 10 + seq, *times[stage], segments=segments)
            for seq, (segments, times) in enumerate(steps)
        )
        for stage in range(stages)
    )


def prefill(rid: int, sizes: Sequence[int]) -> list[tuple[Segment, ...]]:
    """A step for each chunk of one prompt."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    last = len(sizes) - 1
    return [
        (Segment(rid, start, size, sample=index == last),)
        for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]


def decode(rid: int, start: int, source: int) -> tuple[Segment, ...]:
    return (Segment(rid, start, 1, FromOutput(source, 0), sample=True),)


# Two stages, three chunks of 4, 4 and 2 tokens, and one decode token. Stage 0 computes at 0-2, 2-4, 5-6 and 8-9, stage
# 1 at 2-4, 4-6, 6-7 and 9-10; stage 0 waits from 4 to 5, and 7 to 8, for nothing that the bound knows.
STEPS = [
    *zip(
        prefill(1, [4, 4, 2]),
        [((0.0, 2.0), (2.0, 4.0)), ((2.0, 4.0), (4.0, 6.0)), ((5.0, 6.0), (6.0, 7.0))],
        strict=True,
    ),
    (decode(1, 10, 12), ((8.0, 9.0), (9.0, 10.0))),
]


def hand_made(*, offset: float = 100.0) -> Trace:
    """STEPS as a trace with waits and sends, beginning at ``offset`` seconds."""
    steps = [(segments, [(a + offset, b + offset) for a, b in times]) for segments, times in STEPS]
    first, second = spans_of(steps, 2)
    waits = tuple(
        Span("wait", 1, 10 + seq, start + offset, end + offset)
        for seq, (start, end) in enumerate([(0.0, 2.0), (4.0, 4.0), (6.0, 6.0), (7.0, 9.0)])
    )
    sends = tuple(
        Span("send", 1, 10 + seq, end + offset, end + offset + 1.5, lane=seq % 2)
        for seq, end in enumerate((2.0, 4.0, 6.0, 9.0))
    )
    request = TracedRequest(1, 10, 2, submitted=offset - 0.5, first_token=offset + 7.0, ended=offset + 10.0)
    return Trace({"model": "tiny", "window": 4}, (first + sends, second + waits), (request,), dropped=0)
