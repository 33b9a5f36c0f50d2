"""``planned`` in virtual time: near or below every fixed size, below SGLang's chunks; also in the shipped coordinator.

The recurrence is held against the coordinator and sessions themselves; the grid (``python -m tests.support.plans``) and
this sample of it are computed with the recurrence.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from actorpp.coordinator.chunking.cost import CostModel
from actorpp.coordinator.chunking.flowshop import in_window, makespan
from actorpp.coordinator.chunking.learner import CostLearner
from actorpp.coordinator.chunking.planned import PlannedChunks
from actorpp.coordinator.chunking.policy import ChunkPolicy, PolicyContext
from actorpp.runtime import ActorSystem
from actorpp.stages.messages import Step
from actorpp.testing import FakeNetwork, run
from tests.support.pipeline import SimulatedPipeline
from tests.support.plans import PUBLISHED, Case, grid

TIGHT = [Case("small", stages, "equal", stages, 32768) for stages in (2, 4)]  # the window has no room for jitter
SAMPLE = TIGHT + random.Random(7).sample([case for case in grid() if case.tokens <= 131072], 14)


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_never_one_percent_worse_than_the_best_fixed_size(case: Case) -> None:
    best, _ = case.fixed()
    assert case.planned() <= 1.01 * best


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_better_than_sglang_at_its_published_settings(stages: int) -> None:
    case = Case("large", stages, "equal", stages + 2, 131072)
    assert case.planned() < 0.99 * min(case.sglang(size, factor) for size, factor in PUBLISHED)


def measured(case: Case, policy: ChunkPolicy, costs: CostLearner, *, prompts: int) -> list[tuple[float, list[int]]]:
    """Prompts one after the other through the shipped coordinator: for each the seconds it took, and its chunks."""
    found: list[tuple[float, list[int]]] = []
    model = case.costs

    def seconds(stage: int, step: Step) -> float:
        (segment,) = step.segments
        return model.stages[stage].time(segment.start, segment.length, segment.sample)

    async def main() -> None:
        async with ActorSystem() as system:
            pipeline = SimulatedPipeline(
                system,
                FakeNetwork(max_delay=0.0),
                stages=case.stages,
                depth=1,
                lookahead=case.window - case.stages - 1,
                chunk=case.tokens,
                pages=2 * case.tokens // 16,
                seconds=seconds,
            )
            pipeline.scheduler.policy, pipeline.scheduler.costs = policy, costs
            await pipeline.open()
            for number in range(prompts):
                began = asyncio.get_running_loop().time()
                answer = pipeline.submit(tuple((n + number) % 1000 for n in range(case.tokens)), 1)
                await answer.done.wait()
                request = next(r for r, a in pipeline.requests.items() if a is answer)
                found.append((answer.ended_at - began, request.chunks))
            for session in pipeline.sessions:
                await system.kill(session)

    run(main)
    return found


SHAPES = [("equal", 2, 4), ("slow middle", 4, 6), ("mixed", 4, 12), ("slow last", 3, 5)]


@pytest.mark.parametrize(("shape", "stages", "window"), SHAPES)
def test_the_coordinator_does_what_was_planned_and_learns_it(shape: str, stages: int, window: int) -> None:
    """From operation counts alone: the third prompt is as fast as with the best fixed size, and as predicted."""
    case = Case("small", stages, shape, window, 4096)
    counted = CostModel(tuple(case.costs.stages[0].scaled(3e12) for _ in range(stages)), in_seconds=False)
    costs = CostLearner(counted)
    context = PolicyContext(
        stages=stages,
        window=window,
        page_size=16,
        context_length=1 << 20,
        max_chunk=4096,
        chunk_size=4096,
        smooth_factor=0.75,
        costs=costs,
    )
    took = measured(case, PlannedChunks(context), costs, prompts=3)
    seconds, chunks = took[-1]
    by_recurrence = makespan(case.costs.chunk_times(chunks), in_window(len(chunks), window))
    assert seconds == pytest.approx(by_recurrence, rel=2e-3)
    best, _ = case.fixed()
    assert seconds <= 1.01 * best
    predicted = costs.model.chunk_times(chunks)
    assert makespan(predicted, in_window(len(chunks), window)) == pytest.approx(seconds, rel=0.01)
