"""What a step of one prompt chunk costs a stage, as a formula in its history L and its tokens x.

    t(L, x) = c + gamma L + b x + a (2 L x + x^2) + head (if the step samples)

``c`` is paid by every step (launches, reading the weights), ``gamma`` for each token of history (reading its KV), ``b``
for each token (the linear layers), and ``a`` for attention: a token at position p attends to p others, so a chunk's
attention is proportional to (L + x)^2 - L^2. ``head`` is the last stage's row of logits and its sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec

NUM_FEATURES = 5


def features(history: int, tokens: int, samples: bool) -> tuple[float, float, float, float, float]:
    """What c, gamma, b, a and head are multiplied by."""
    return 1.0, float(history), float(tokens), float((2 * history + tokens) * tokens), float(samples)


class StageCost(msgspec.Struct, frozen=True):
    """The coefficients of one stage, in seconds (or in any other unit, before anything was measured)."""

    c: float
    gamma: float
    b: float
    a: float
    head: float = 0.0

    def time(self, history: int, tokens: int, samples: bool = False) -> float:
        """Of a chunk of ``tokens`` behind ``history`` tokens."""
        linear = self.c + self.gamma * history + self.b * tokens
        return linear + self.a * (2 * history + tokens) * tokens + (self.head if samples else 0.0)

    def scaled(self, factor: float) -> StageCost:
        """The same shape, ``factor`` times as slow."""
        return StageCost(*(factor * value for value in msgspec.structs.astuple(self)))


class CostModel(msgspec.Struct, frozen=True):
    """A whole pipeline's costs.

    Attributes:
        stages: One for each stage, in order.
        in_seconds: False as long as only the ratios between coefficients and stages mean something: nothing was
            measured yet.
    """

    stages: tuple[StageCost, ...]
    in_seconds: bool = True

    def times(self, history: int, tokens: int, samples: bool = False) -> tuple[float, ...]:
        """Of one chunk, for each stage."""
        return tuple(stage.time(history, tokens, samples) for stage in self.stages)

    def chunk_times(self, chunks: Sequence[int], history: int = 0) -> list[tuple[float, ...]]:
        """Of consecutive chunks, at least one, that end a prompt, for each chunk and stage: the last one samples."""
        starts = list(accumulate(chunks, initial=history))
        columns = []
        for stage in self.stages:  # written out: planning a long prompt comes here for each of its candidates
            c, gamma, b, a = stage.c, stage.gamma, stage.b, stage.a
            column = [c + gamma * L + b * x + a * (2 * L + x) * x for L, x in zip(starts, chunks, strict=False)]
            column[-1] += stage.head
            columns.append(column)
        return list(zip(*columns, strict=True))
