"""What the pipeline has done, as the driver learns it: totals for metrics, and the last seconds step by step.

The engine tells it; metrics and the live page read it. It decides nothing, and costs microseconds a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Protocol

import msgspec

from actorpp.analysis.bubbles import between
from actorpp.coordinator.chunking.cost import CostModel
from actorpp.serving.api import RequestMetrics
from actorpp.stages.messages import StageTiming, Step

KEEP_S = 30.0  # of steps
MAX_STEPS = 4096  # kept at most, whatever their length


class StepRecord(msgspec.Struct, frozen=True):
    """One finished step.

    Attributes:
        number: Counts all finished steps from 0 on. A step's own ``seq`` begins again when a lost stage is back.
        spans: For each stage, when it began and ended to compute, on the host's monotonic clock, in seconds.
        prefill, decode: Tokens of the step.
        requests: Requests of which it computed prompt tokens.
        predicted: For each stage, the seconds that the cost model expected of a step with one prompt chunk alone; empty
            for other steps, and before anything was measured.
        rested: The pipeline had no request between the step before and this one.
    """

    number: int
    spans: tuple[tuple[float, float], ...]
    prefill: int
    decode: int
    requests: tuple[int, ...] = ()
    predicted: tuple[float, ...] = ()
    rested: bool = False


class RequestRecord(msgspec.Struct, frozen=True):
    """One ended output. ``outcome`` is its finish reason, or its error's code, and then there are no ``metrics``."""

    outcome: str
    failed: bool
    prompt_tokens: int
    generated: int
    metrics: RequestMetrics | None


class Observer(Protocol):
    """Told of everything as it happens, on the loop; must return at once and must not raise."""

    def on_step(self, step: StepRecord) -> None: ...
    def on_first_token(self, seconds: float) -> None:
        """``seconds`` since the request was submitted."""
        ...

    def on_token_gap(self, seconds: float) -> None:
        """Between two deliveries of one request."""
        ...

    def on_ended(self, request: RequestRecord) -> None: ...


class Activity:
    """Totals since the start, and the newest steps.

    Attributes:
        busy_s: For each stage, seconds of computing.
        bubble_s: For each stage, seconds without computing while the pipeline had work, up to the newest step.
    """

    def __init__(self, num_stages: int) -> None:
        self.observers: list[Observer] = []
        self.steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self.busy_s = [0.0] * num_stages
        self.bubble_s = [0.0] * num_stages
        self._numbers = count()
        self._rested = True

    def rest_ends(self) -> None:
        """A request has come, and the pipeline had none."""
        self._rested = True

    def step_done(self, step: Step, timings: Sequence[StageTiming], model: CostModel | None = None) -> None:
        """A step's Output is in. Steps come in their order. ``model`` is what was known of costs before it."""
        spans = tuple((timing.start, timing.end) for timing in timings)
        if len(spans) != len(self.busy_s):
            return
        prefill = [segment for segment in step.segments if segment.token is None]
        record = StepRecord(
            next(self._numbers),
            spans,
            sum(segment.length for segment in prefill),
            step.num_tokens - sum(segment.length for segment in prefill),
            tuple(segment.rid for segment in prefill),
            _predicted(step, model),
            self._rested,
        )
        if self.steps:
            for bubble in between(self.steps[-1].spans, spans, rested=self._rested):
                self.bubble_s[bubble.stage] += bubble.end - bubble.start
        self._rested = False
        for stage, (start, end) in enumerate(spans):
            self.busy_s[stage] += end - start
        self.steps.append(record)
        while self.steps[0].spans[-1][1] < spans[-1][1] - KEEP_S:
            self.steps.popleft()
        for observer in self.observers:
            observer.on_step(record)

    def first_token(self, seconds: float) -> None:
        for observer in self.observers:
            observer.on_first_token(seconds)

    def token_gap(self, seconds: float) -> None:
        for observer in self.observers:
            observer.on_token_gap(seconds)

    def ended(self, request: RequestRecord) -> None:
        for observer in self.observers:
            observer.on_ended(request)


def _predicted(step: Step, model: CostModel | None) -> tuple[float, ...]:
    if model is None or not model.in_seconds or len(step.segments) != 1 or step.segments[0].token is not None:
        return ()
    (segment,) = step.segments
    return model.times(segment.start, segment.length, segment.sample)
