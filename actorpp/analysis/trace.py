"""A trace: what every stage did and when, and for which requests. How it lies in a file is ``chrome``'s business."""

from __future__ import annotations

from typing import Any

import msgspec

from actorpp.coordinator.request import ChunkTimes
from actorpp.stages.messages import Span


class TracedRequest(msgspec.Struct, frozen=True):
    """One request on the driver's clock, as the stages' spans are.

    Attributes:
        submitted, first_token, ended: When it was; None while it has not been.
        chunks: What each prefill chunk was predicted to take, and took.
    """

    rid: int
    prompt_tokens: int
    output_tokens: int
    submitted: float
    first_token: float | None
    ended: float | None
    chunks: tuple[ChunkTimes, ...] = ()

    @property
    def ttft_s(self) -> float | None:
        """Seconds from submission to the first token."""
        return None if self.first_token is None else self.first_token - self.submitted


class Trace(msgspec.Struct, frozen=True):
    """What happened between two moments of an engine's life.

    Attributes:
        about: Facts of the engine, by name: model, stages, layers, window, …
        stages: Each stage's spans.
        requests: Those that were submitted or ended in that time.
        dropped: Spans that did not fit the stages' buffers: with any, figures made of the trace are too low.
    """

    about: dict[str, Any]
    stages: tuple[tuple[Span, ...], ...]
    requests: tuple[TracedRequest, ...] = ()
    dropped: int = 0
