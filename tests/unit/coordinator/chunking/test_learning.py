"""What learning costs: plans of a policy that learns on a machine whose speed changes, on the true costs."""

from __future__ import annotations

import random

import pytest

from actorpp.coordinator.chunking.cost import CostModel, StageCost
from actorpp.coordinator.chunking.fit import StageSample
from actorpp.coordinator.chunking.flowshop import in_window, makespan
from actorpp.coordinator.chunking.planned import PlannedChunks
from actorpp.coordinator.chunking.policy import ChunkRequest
from actorpp.coordinator.chunking.search import best_chunks
from tests.unit.coordinator.chunking.support import context

TOKENS, LARGEST, WINDOW = 8000, 8192, 4
SECONDS = 2e-4  # of a token
TRUE = CostModel((StageCost(c=30 * SECONDS, gamma=0.0, b=SECONDS, a=SECONDS / 2500),) * 2)
PRIOR = CostModel((StageCost(c=64.0, gamma=0.0, b=1.0, a=1 / 3000),) * 2, in_seconds=False)
PROMPTS, LEARNING = 12, 4


def ratios(seed: int, scatter: float, slow_share: float) -> list[float]:
    """Makespans over the best plan's, prompt after prompt, without the first few.

    Args:
        scatter: Of the measured times, as the sigma of a lognormal factor.
        slow_share: Of the steps that are measured 1.6 times as long.
    """
    generator = random.Random(seed)
    given = context(PRIOR, window=WINDOW, max_chunk=LARGEST, chunk_size=LARGEST)
    best = makespan(TRUE.chunk_times(best_chunks(TRUE, 0, TOKENS, window=WINDOW, align=64, largest=LARGEST)))
    found = []
    for rid in range(1, PROMPTS + 1):
        policy, chunks = PlannedChunks(given), list[int]()
        while (done := sum(chunks)) < TOKENS:
            request = ChunkRequest(rid, TOKENS, 0, 0, steps_ahead=min(WINDOW - 1, len(chunks)))
            chunk = policy.next_chunk(request, done, TOKENS - done, LARGEST)
            chunks.append(chunk)
            last = done + chunk == TOKENS
            slow = 1.6 if generator.random() < slow_share else 1.0
            seconds = [t * slow * generator.lognormvariate(0, scatter) for t in TRUE.times(done, chunk, last)]
            given.costs.add(StageSample(done, chunk, last, tuple(seconds)))
        found.append(makespan(TRUE.chunk_times(chunks), in_window(len(chunks), WINDOW)) / best)
    return found[LEARNING:]


@pytest.mark.parametrize(
    ("seeds", "scatter", "slow_share", "most"), [(1, 0.0, 0.0, 1.005), (2, 0.03, 0.0, 1.01), (8, 0.2, 0.3, 1.05)]
)
def test_scatter_is_not_taken_for_a_fixed_cost(seeds: int, scatter: float, slow_share: float, most: float) -> None:
    """Few long chunks say little of a fixed cost; taken from their scatter, it would keep them few and long."""
    values = sorted(ratio for seed in range(seeds) for ratio in ratios(seed, scatter, slow_share))
    assert values[int(0.9 * len(values))] <= most
