"""The ``sglang`` policy: chunks that shrink as the history grows, as with SGLang's ``--enable-dynamic-chunking``.

Source: the behaviour that SGLang documents for its pipeline parallelism (smoothing factor, alignment, limits and
fallback), and the chunk sizes that were published with it (LMSYS, chunked pipeline parallelism, January 2026).

With the latency of a first chunk of l tokens f(l) = a l^2 + b l + c, a chunk of x tokens behind L others takes
f(L + x) - f(L). The size x at which this equals f(C) - c, for the initial size C, is smoothed: C + factor (x - C).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

import structlog

from actorpp.coordinator.chunking.fit import StageSample
from actorpp.coordinator.chunking.leastsquares import solve
from actorpp.coordinator.chunking.policy import ChunkRequest, PolicyContext, within

log = structlog.get_logger(__name__)

MIN_SAMPLES = 8
MIN_ALIGN = 64
CONTEXT_MARGIN = 100  # tokens of the context that are never planned for


@dataclass(frozen=True)
class Quadratic:
    """f(l) = a l^2 + b l + c: seconds of a first chunk of l tokens. Only b/a matters to the chunk sizes."""

    a: float
    b: float
    c: float = 0.0


def fit_quadratic(lengths: Sequence[int], seconds: Sequence[float]) -> Quadratic:
    """Least squares over the latencies of first chunks, the cold one left out already. A b below 0 becomes 0.

    Raises:
        ValueError: Fewer than 8 samples, or latencies that do not grow quadratically (a <= 0).
    """
    if len(lengths) < MIN_SAMPLES:
        raise ValueError(f"{len(lengths)} samples; at least {MIN_SAMPLES} are needed")
    unit = max(lengths)  # lengths near 1 keep the system well conditioned
    rows = [[(length / unit) ** 2, length / unit, 1.0] for length in lengths]
    gram = [[sum(row[i] * row[j] for row in rows) for j in range(3)] for i in range(3)]
    moment = [sum(row[i] * value for row, value in zip(rows, seconds, strict=True)) for i in range(3)]
    a, b, c = solve(gram, moment, range(3))
    if a <= 1e-9 * max(seconds):  # of a straight line rounding leaves a little
        raise ValueError(f"the latencies do not grow quadratically: a is {a / unit**2:.3g}")
    return Quadratic(a / unit**2, max(0.0, b / unit), c)


@dataclass(frozen=True)
class SglangChunks:
    """Dynamic chunks around an initial size.

    Attributes:
        size: The initial size C.
        latency: The fitted latency; None: every chunk has the initial size.
        smooth_factor: 0 keeps the initial size, 1 follows the equation alone.
        page_size: Sizes are multiples of it, or of 64 if that is more.
        context_length: Tokens of a request at most.
        max_prefill_tokens: Tokens of a chunk at most.
    """

    size: int
    latency: Quadratic | None
    smooth_factor: float
    page_size: int
    context_length: int
    max_prefill_tokens: int

    @classmethod
    def of(cls, context: PolicyContext) -> SglangChunks:
        """The policy for a pipeline, from its profile; without a usable one it keeps to the initial size, and warns."""
        latency = None
        try:
            latency = fit_first_chunks(context.profile.samples if context.profile is not None else ())
        except ValueError as error:
            log.warning("dynamic chunking is off: chunks have one size", size=context.chunk_size, reason=str(error))
        return cls(
            size=context.chunk_size,
            latency=latency,
            smooth_factor=context.smooth_factor,
            page_size=context.page_size,
            context_length=context.context_length,
            max_prefill_tokens=context.max_chunk,
        )

    def next_chunk(self, request: ChunkRequest, history_len: int, remaining: int, budget: int) -> int:
        dynamic = self._dynamic(self.latency, history_len) if self.latency is not None and history_len else None
        return within(min(dynamic or self.size, remaining), budget, self.page_size)

    def _dynamic(self, latency: Quadratic, history: int) -> int | None:
        """The size that the equation gives behind a history; None if it gives none that can be used."""
        a, b = latency.a, latency.b
        wanted = a * self.size**2 + b * self.size
        slope = 2 * a * history + b
        exact = (-slope + sqrt(slope * slope + 4 * a * wanted)) / (2 * a)
        smoothed = self.size + self.smooth_factor * (exact - self.size)
        if not isfinite(smoothed) or exact <= 0:
            return None
        align = max(self.page_size, MIN_ALIGN)
        chunk = max(int(smoothed), self.size // 4)
        chunk = max(chunk - chunk % align, align)
        chunk = min(chunk, self.context_length - history - CONTEXT_MARGIN, self.max_prefill_tokens)
        chunk -= chunk % align
        return chunk if chunk >= align else None


def fit_first_chunks(samples: Sequence[StageSample]) -> Quadratic:
    """Fit the slowest stage's time over the samples without history. Raises ValueError, as ``fit_quadratic``."""
    first = [sample for sample in samples if not sample.history]
    return fit_quadratic([sample.tokens for sample in first], [max(sample.seconds) for sample in first])
