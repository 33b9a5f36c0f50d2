"""Steps as a trace shows them: what each computed, and when on every stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from actorpp.stages.messages import Segment, Span


@dataclass(frozen=True)
class TracedStep:
    """One pass of packed segments through all stages.

    Attributes:
        starts, ends: Of its compute on each stage, in seconds.
    """

    epoch: int
    seq: int
    segments: tuple[Segment, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def times(self) -> tuple[float, ...]:
        """Compute seconds on each stage."""
        return tuple(end - start for start, end in zip(self.starts, self.ends, strict=True))

    @property
    def num_tokens(self) -> int:
        return sum(segment.length for segment in self.segments)

    @property
    def chunks(self) -> tuple[Segment, ...]:
        """The segments that are prompt chunks; the others are decode tokens."""
        return tuple(segment for segment in self.segments if segment.token is None)


def traced_steps(stages: Sequence[Sequence[Span]]) -> list[TracedStep]:
    """The steps that every stage has computed, in the order of the log."""
    computed: list[dict[tuple[int, int], Span]] = [
        {(span.epoch, span.seq): span for span in spans if span.kind == "compute"} for spans in stages
    ]
    if not computed:
        return []
    whole = sorted(set(computed[0]).intersection(*computed[1:]))
    return [
        TracedStep(
            epoch=key[0],
            seq=key[1],
            segments=computed[0][key].segments,
            starts=tuple(spans[key].start for spans in computed),
            ends=tuple(spans[key].end for spans in computed),
        )
        for key in whole
    ]


def chunk_numbers(steps: Iterable[tuple[tuple[int, int], Sequence[Segment]]]) -> dict[tuple[int, int, int], int]:
    """The index of each chunk within its prompt, by epoch, seq and request. A prompt that is replayed counts anew.

    Args:
        steps: (epoch, seq) and segments of each step, in the order of the log.
    """
    counts: dict[int, int] = {}
    numbers = {}
    for (epoch, seq), segments in steps:
        for segment in segments:
            if segment.token is None:
                counts[segment.rid] = counts.get(segment.rid, -1) + 1 if segment.start else 0
                numbers[epoch, seq, segment.rid] = counts[segment.rid]
    return numbers


def needed_steps(steps: Sequence[TracedStep]) -> list[int | None]:
    """For each step the index of the latest earlier one whose sampled ids its decode segments take in, if any does.

    A decode token is the id that its request's segment before it sampled.
    """
    last: dict[int, int] = {}
    needed: list[int | None] = []
    for index, step in enumerate(steps):
        sources = [last[s.rid] for s in step.segments if s.token is not None and s.rid in last]
        needed.append(max(sources, default=None))
        last.update((segment.rid, index) for segment in step.segments)
    return needed
