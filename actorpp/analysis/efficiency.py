"""How well a pipeline was kept busy: makespan, its flow-shop bound, bubbles. Golden-checked on hand-made traces."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

import msgspec

from actorpp.analysis.steps import TracedStep, needed_steps
from actorpp.coordinator.chunking.flowshop import makespan


class PipelineFigures(msgspec.Struct, frozen=True):
    """Figures of the steps of one stretch of time, in seconds and shares.

    Attributes:
        num_steps: All of them.
        num_prefill_steps: M: those with a prompt chunk.
        num_fills: How often a prompt's first chunk found the pipeline empty.
        busy_s: Compute seconds of each stage.
        makespan_s: From the first step's start on the first stage to the last one's end on the last.
        bound_s: The makespan that the same compute times would have in a pipeline whose only waits are those for the
            stage before, for the step before, and of a decode token for its id.
        efficiency: Sum of busy_s over stages times makespan.
        bubble_share: 1 - efficiency.
        bubble_share_after_fill: The same from the moment on when the last stage begins its first step.
        prefill_bubble_share: The same of the time of prefill: of each run of steps with prompt chunks, from its start
            on the first stage to its end on the last. None: there was none.
        decode_bubble_share: The same of the rest of the makespan. None: there was none.
        ideal_bubble_share: What prefill_bubble_share is to be compared with: (P-1)/(P-1+M), that of M equal steps on P
            equal stages which never wait; with P-1 for each fill.
    """

    num_steps: int
    num_prefill_steps: int
    num_fills: int
    busy_s: tuple[float, ...]
    makespan_s: float
    bound_s: float
    efficiency: float
    bubble_share: float
    bubble_share_after_fill: float
    prefill_bubble_share: float | None
    decode_bubble_share: float | None
    ideal_bubble_share: float | None

    @property
    def over_bound(self) -> float:
        """Makespan over its bound: 1 where nothing but compute cost time."""
        return self.makespan_s / self.bound_s

    @property
    def ideal(self) -> str:
        """How ideal_bubble_share is worked out."""
        fill = "P-1" if self.num_fills <= 1 else f"{self.num_fills}(P-1)"
        return f"({fill})/({fill}+M)"


def pipeline_figures(steps: Sequence[TracedStep]) -> PipelineFigures:
    """The figures of these steps.

    Raises:
        ValueError: There are none.
    """
    if not steps:
        raise ValueError("there are no steps")
    num_stages, num_steps = len(steps[0].starts), len(steps)
    begin, end = min(step.starts[0] for step in steps), max(step.ends[-1] for step in steps)
    filled = min(step.starts[-1] for step in steps)
    busy = tuple(sum(step.times[stage] for step in steps) for stage in range(num_stages))
    busy_after_fill = sum(
        max(0.0, stop - max(start, filled))
        for step in steps
        for start, stop in zip(step.starts, step.ends, strict=True)
    )
    efficiency = sum(busy) / (num_stages * (end - begin))
    chunked = [step for step in steps if step.chunks]
    windows, fills = _prefill(steps)
    covered = _covered(windows)
    prefill_s = covered(end)
    busy_in_prefill = sum(
        covered(stop) - covered(start) for step in steps for start, stop in zip(step.starts, step.ends, strict=True)
    )
    decode_s = end - begin - prefill_s if num_steps > len(chunked) else 0.0
    unavoidable = fills * (num_stages - 1)
    return PipelineFigures(
        num_steps=num_steps,
        num_prefill_steps=len(chunked),
        num_fills=fills,
        busy_s=busy,
        makespan_s=end - begin,
        bound_s=makespan([step.times for step in steps], needed_steps(steps)),
        efficiency=efficiency,
        bubble_share=1 - efficiency,
        bubble_share_after_fill=1 - busy_after_fill / (num_stages * (end - filled)),
        prefill_bubble_share=1 - busy_in_prefill / (num_stages * prefill_s) if chunked else None,
        decode_bubble_share=1 - (sum(busy) - busy_in_prefill) / (num_stages * decode_s) if decode_s > 0 else None,
        ideal_bubble_share=unavoidable / (unavoidable + len(chunked)) if chunked else None,
    )


def _prefill(steps: Sequence[TracedStep]) -> tuple[list[tuple[float, float]], int]:
    """The time of prefill, and how often a prompt's first chunk found the pipeline empty."""
    windows: list[tuple[float, float]] = []
    fills, latest, before = 0, float("-inf"), False
    for step in steps:
        start, end = step.starts[0], step.ends[-1]
        if step.chunks and windows and (before or start < windows[-1][1]):
            windows[-1] = (windows[-1][0], end)
        elif step.chunks:
            windows.append((start, end))
        fills += start >= latest and any(chunk.start == 0 for chunk in step.chunks)
        latest, before = end, bool(step.chunks)
    return windows, fills


def _covered(windows: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """How many of the seconds before a moment lie in these windows, which are in order and apart."""
    starts = [start for start, _ in windows]
    before = list(accumulate((end - start for start, end in windows), initial=0.0))

    def covered(moment: float) -> float:
        index = bisect_right(starts, moment) - 1
        return 0.0 if index < 0 else before[index] + min(moment, windows[index][1]) - starts[index]

    return covered
