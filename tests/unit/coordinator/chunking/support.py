"""Costs and contexts that the tests of chunking share."""

from __future__ import annotations

from collections.abc import Sequence

from actorpp.coordinator.chunking.cost import CostModel, StageCost
from actorpp.coordinator.chunking.fit import StageSample
from actorpp.coordinator.chunking.learner import CostLearner
from actorpp.coordinator.chunking.policy import PolicyContext
from actorpp.coordinator.chunking.profile import Profile

# Seconds as on one core with a small model: a step's fixed cost is worth 60 tokens, attention catches up at 6000.
TOKEN = 2e-4
STAGE = StageCost(c=60 * TOKEN, gamma=0.0, b=TOKEN, a=TOKEN / 6000)


def model(stages: int = 2, *, speeds: Sequence[float] | None = None) -> CostModel:
    """Equal stages, or with a factor for each stage's time."""
    return CostModel(tuple(STAGE.scaled(speed) for speed in speeds or [1.0] * stages))


def context(
    costs: CostModel,
    *,
    window: int | None = None,
    page_size: int = 16,
    context_length: int = 1 << 30,
    max_chunk: int = 1 << 30,
    chunk_size: int = 1 << 30,
    smooth_factor: float = 0.75,
    profile: Profile | None = None,
) -> PolicyContext:
    return PolicyContext(
        stages=len(costs.stages),
        window=window or len(costs.stages) + 2,
        page_size=page_size,
        context_length=context_length,
        max_chunk=max_chunk,
        chunk_size=chunk_size,
        smooth_factor=smooth_factor,
        costs=CostLearner(costs),
        profile=profile,
    )


def sample(costs: CostModel, history: int, tokens: int, samples: bool = False, *, factor: float = 1.0) -> StageSample:
    """What a step takes by a model, or ``factor`` times as long."""
    times = costs.times(history, tokens, samples)
    return StageSample(history, tokens, samples, tuple(factor * seconds for seconds in times))


def pieces(total: int, size: int) -> list[int]:
    """Fixed chunks."""
    return [size] * (total // size) + ([total % size] if total % size else [])
