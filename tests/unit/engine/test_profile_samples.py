"""Which measurements make a profile, over a pipeline that computes in no time and says what its chunks took."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import structlog.testing

from actorpp.coordinator.chunking.fixed import FixedChunks
from actorpp.coordinator.chunking.policy import ChunkRequest
from actorpp.coordinator.chunking.profile import Profile, ProfileKey
from actorpp.coordinator.request import ChunkTimes
from actorpp.profiling import PASSES, measure_profile
from actorpp.serving.api import Finished, GenerationParams, RequestMetrics
from tests.unit.coordinator.chunking.support import model

COSTS = model(2, speeds=[1.0, 1.3])


class Pipeline:
    """``slowness`` gives the factor on the times of prompt number n, the first one being 0."""

    def __init__(self, slowness: Callable[[int], float]) -> None:
        self.scheduler: Any = SimpleNamespace(
            policy=FixedChunks(10),
            requests=list,
            pool=SimpleNamespace(num_pages=1 << 16),
            config=SimpleNamespace(page_size=16, async_depth=1, num_stages=2, max_running_requests=8),
        )
        key = ProfileKey("m", "float32", "cpu", "flash", 1, (2, 2))
        self.planning: Any = SimpleNamespace(key=key, context_length=8192, max_chunk=2080)
        self.checkpoint: Any = SimpleNamespace(vocab_size=320)
        self.prompts: list[tuple[int, ...]] = []  # their chunks
        self.under_way = 0
        self._rids = count(1)
        self._slowness = slowness

    def submit(self, prompt_ids: Sequence[int], params: GenerationParams) -> Any:
        self.under_way += 1
        return _Prompt(self, next(self._rids), len(prompt_ids))

    def compute(self, rid: int, tokens: int) -> tuple[ChunkTimes, ...]:
        chunks: list[int] = []
        while (history := sum(chunks)) < tokens:
            request = ChunkRequest(rid, tokens)
            chunks.append(self.scheduler.policy.next_chunk(request, history, tokens - history, 2080))
        factor = self._slowness(len(self.prompts))
        self.prompts.append(tuple(chunks))
        self.under_way -= 1
        times = COSTS.chunk_times(chunks)
        return tuple(
            ChunkTimes(sum(chunks[:index]), chunk, None).measured(tuple(factor * t for t in times[index]), alone=True)
            for index, chunk in enumerate(chunks)
        )


class _Prompt:
    """Iterated, it gives its only event."""

    def __init__(self, pipeline: Pipeline, rid: int, tokens: int) -> None:
        self.id = str(rid)
        self._pipeline, self._tokens = pipeline, tokens

    def __aiter__(self) -> _Prompt:
        return self

    async def __anext__(self) -> Finished:
        times = self._pipeline.compute(int(self.id), self._tokens)
        chunks = tuple(time.tokens for time in times)
        return Finished(
            "length",
            RequestMetrics(
                ttft_s=1.0, e2e_s=1.0, prefill_tok_s=None, tpot_s=None, chunks=chunks, stage_busy=(), chunk_times=times
            ),
        )

    def abort(self) -> None:
        """It has ended."""


def measured(pipeline: Pipeline) -> Profile:
    return asyncio.run(measure_profile(pipeline))


def exact(profile: Profile) -> None:
    for sample in profile.samples:
        expected = COSTS.times(sample.history, sample.tokens, sample.samples)
        assert sample.seconds == pytest.approx(expected), sample


def test_the_grid_is_measured_in_passes_of_different_orders_after_a_warm_up() -> None:
    pipeline = Pipeline(lambda number: 1.0)
    profile = measured(pipeline)
    warm_up, *counted = pipeline.prompts
    assert warm_up == (2048, 1024, 512, 256, 128, 64)
    size = len(counted) // PASSES
    passes = [counted[start : start + size] for start in range(0, len(counted), size)]
    assert len(passes) == PASSES == 3
    assert all(sorted(one) == sorted(passes[0]) for one in passes)
    assert len({tuple(one) for one in passes}) == PASSES
    assert len(profile.samples) == sum(map(len, passes[0]))
    exact(profile)


def test_the_pipeline_is_full_but_for_the_warm_up() -> None:
    under_way: list[int] = []

    def note(number: int) -> float:
        under_way.append(pipeline.under_way)
        return 1.0

    pipeline = Pipeline(note)
    measured(pipeline)
    assert under_way == [1, *[3] * (len(pipeline.prompts) - 3), 2, 1]


def test_what_warms_up_does_not_count() -> None:
    exact(measured(Pipeline(lambda number: 100.0 if number == 0 else 1.0)))


def test_a_pass_on_a_slow_machine_does_not_count() -> None:
    quiet = Pipeline(lambda number: 1.0)
    measured(quiet)
    size = (len(quiet.prompts) - 1) // PASSES
    exact(measured(Pipeline(lambda number: 3.0 if size < number <= 2 * size else 1.0)))


def test_a_fit_that_is_not_to_be_trusted_is_a_warning() -> None:
    noise = random.Random(1)
    with structlog.testing.capture_logs() as logs:
        measured(Pipeline(lambda number: 1.0))
        assert logs == []
        profile = measured(Pipeline(lambda number: noise.choice([0.3, 3.0])))
    (warning,) = logs
    assert warning["log_level"] == "warning"
    assert "fits badly" in warning["event"]
    assert "actorpp profile" in warning["advice"]
    assert warning["reason"] == "; ".join(profile.doubts)
    assert "R^2 is" in warning["reason"]
