"""How well a pipeline was kept busy: makespan, its flow-shop bound, bubbles. Golden-checked on hand-made traces."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from actorpp.analysis.steps import TracedStep, needed_steps
from actorpp.coordinator.chunking.flowshop import makespan


class PipelineFigures(msgspec.Struct, frozen=True):
    """Figures of the steps of one stretch of time, in seconds and shares.

    Attributes:
        num_steps: M.
        busy_s: Compute seconds of each stage.
        makespan_s: From the first step's start on the first stage to the last one's end on the last.
        bound_s: The makespan that the same compute times would have in a pipeline whose only waits are those for the
            stage before, for the step before, and of a decode token for its id.
        efficiency: Sum of busy_s over stages times makespan.
        bubble_share: 1 - efficiency.
        bubble_share_after_fill: The same from the moment on when the last stage begins its first step.
        ideal_bubble_share: (P-1)/(P-1+M): that of M equal steps on P equal stages which never wait.
    """

    num_steps: int
    busy_s: tuple[float, ...]
    makespan_s: float
    bound_s: float
    efficiency: float
    bubble_share: float
    bubble_share_after_fill: float
    ideal_bubble_share: float

    @property
    def over_bound(self) -> float:
        """Makespan over its bound: 1 where nothing but compute cost time."""
        return self.makespan_s / self.bound_s


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
    return PipelineFigures(
        num_steps=num_steps,
        busy_s=busy,
        makespan_s=end - begin,
        bound_s=makespan([step.times for step in steps], needed_steps(steps)),
        efficiency=efficiency,
        bubble_share=1 - efficiency,
        bubble_share_after_fill=1 - busy_after_fill / (num_stages * (end - filled)),
        ideal_bubble_share=(num_stages - 1) / (num_stages - 1 + num_steps),
    )
