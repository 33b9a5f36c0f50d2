"""Chunk plans of the shipped engine: what it predicts, what it does, and what it takes from a saved profile."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actorpp.config import EngineConfig
from actorpp.coordinator.chunking.cost import CostModel, StageCost
from actorpp.coordinator.chunking.profile import Profile, ProfileKey
from actorpp.errors import ContextLengthExceededError, InvalidRequestError
from actorpp.planning import Planning
from actorpp.serving.gateway import Gateway
from tests.unit.coordinator.chunking.support import sample
from tests.unit.coordinator.chunking.test_operations import SMOLLM2
from tests.unit.engine.support import complete, served

LONG = [(11 * n + n * n) % 300 + 5 for n in range(700)]


def test_a_plan_is_predicted_and_followed(model: Path) -> None:
    async def body(gateway: Gateway) -> None:
        engine: Any = gateway.engine
        before = engine.plan(700)
        assert sum(before.chunks) == before.prompt_tokens == 700
        assert before.predicted_ttft_s is None
        first = await complete(gateway, prompt_tokens=LONG, max_tokens=1)
        assert first.metrics.chunk_times[0].predicted_s is None
        await complete(gateway, prompt_tokens=LONG, max_tokens=1)
        after = engine.plan(700)
        assert 0 < after.predicted_ttft_s < 60
        assert after.predicted_ttft_s == after.predicted_done_s[-1]
        assert [len(times) for times in after.predicted_chunk_s] == [2] * len(after.chunks)
        second = await complete(gateway, prompt_tokens=LONG, max_tokens=1)
        metrics = second.metrics
        assert metrics.chunks[0] == after.chunks[0]
        history = 0
        for chunk, times in zip(metrics.chunks, metrics.chunk_times, strict=True):
            assert (times.history, times.tokens, times.alone) == (history, chunk, True)
            assert times.predicted_s is not None
            assert times.measured_s is not None
            assert len(times.predicted_s) == len(times.measured_s) == 2
            assert min(times.measured_s) > 0
            history += chunk

    served(model, body, context_length=1024)


def test_a_chunk_policy_and_its_size_are_obeyed(model: Path) -> None:
    async def body(gateway: Gateway) -> None:
        result = await complete(gateway, prompt_tokens=LONG, max_tokens=1)
        assert result.metrics.chunks == (256, 256, 188)
        assert gateway.engine.plan(700).chunks == (256, 256, 188)  # type: ignore[attr-defined]

    served(model, body, context_length=1024, chunked_prefill_size=256)


def test_a_saved_profile_is_used_from_the_start(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORPP_CACHE", str(tmp_path))

    true: list[CostModel] = []

    async def save(gateway: Gateway) -> None:
        planning = gateway.engine.planning  # type: ignore[attr-defined]
        assert planning.key.partition == (2, 3)
        assert gateway.engine.plan(700).predicted_chunk_s is None  # type: ignore[attr-defined]
        true.append(CostModel(tuple(stage.scaled(3e-10) for stage in planning.costs.model.stages)))
        grid = [(h, x) for h in (0, 256, 512) for x in (64, 128, 256, 512)]
        Profile(planning.key, tuple(sample(true[0], h, x, n % 2 == 1) for n, (h, x) in enumerate(grid))).save()

    async def load(gateway: Gateway) -> None:
        plan = gateway.engine.plan(700)  # type: ignore[attr-defined]
        expected = true[0].chunk_times(plan.chunks)
        assert plan.predicted_chunk_s == tuple(pytest.approx(row, rel=0.02) for row in expected)

    served(model, save, context_length=1024, layer_partition=(2, 3))
    served(model, load, context_length=1024, layer_partition=(2, 3))


QUADRATIC = StageCost(c=1e-3, gamma=0.0, b=1e-9, a=1e-9)  # seconds: next to all of it is attention


def quadratic(key: ProfileKey, longest: int) -> Profile:
    costs = CostModel((QUADRATIC,) * 2)
    return Profile(key, tuple(sample(costs, 0, longest * n // 12) for n in range(1, 13)))


def test_the_smoothing_factor_changes_the_chunks_of_the_running_engine(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACTORPP_CACHE", str(tmp_path))
    chunks: dict[float | None, tuple[int, ...]] = {}

    async def save(gateway: Gateway) -> None:
        quadratic(gateway.engine.planning.key, 600).save()  # type: ignore[attr-defined]

    served(model, save)
    for factor in (None, 0.0, 0.5, 1.0):

        async def body(gateway: Gateway, factor: float | None = factor) -> None:
            chunks[factor] = (await complete(gateway, prompt_tokens=LONG, max_tokens=1)).metrics.chunks

        options = {"chunked_prefill_size": 256, "enable_dynamic_chunking": True}
        served(model, body, context_length=1024, dynamic_chunking_smooth_factor=factor, **options)
    # Behind 256 tokens the equation wants 106, behind 384 it wants 77: from 256 so far, in multiples of 64.
    assert chunks[0.0] == (256, 256, 188)
    assert chunks[0.5] == (256, 128, 128, 128, 60)
    assert chunks[None] == (256, 128, 64, 64, 64, 64, 60)
    assert chunks[1.0] == (256, 64, 64, 64, 64, 64, 64, 60)


def test_the_smoothing_factor_is_three_quarters_by_default() -> None:
    checkpoint: Any = SimpleNamespace(config=SMOLLM2, dtype="bfloat16")

    def sizes(factor: float | None) -> tuple[int, ...]:
        options = {"chunked_prefill_size": 12288, "enable_dynamic_chunking": True}
        config = EngineConfig(stages=2, dynamic_chunking_smooth_factor=factor, **options)
        planning = Planning(config, checkpoint, 200_000, [(0, 15), (15, 30)])
        planning.profile = quadratic(planning.key, 12288)
        return planning.plan(planning.policy(), 150_000).chunks

    assert sizes(None) == sizes(0.75)
    assert sizes(None) not in (sizes(0.74), sizes(0.76))


def test_the_policy_of_the_example_is_followed(model: Path) -> None:
    async def body(gateway: Gateway) -> None:
        result = await complete(gateway, prompt_tokens=LONG, max_tokens=1)
        assert result.metrics.chunks == (336, 176, 80, 64, 44)

    served(model, body, context_length=1024, chunk_policy="examples.10_own_chunk_policy:Halving")


@pytest.mark.parametrize(("tokens", "error"), [(0, InvalidRequestError), (1024, ContextLengthExceededError)])
def test_what_cannot_be_planned_is_refused(model: Path, tokens: int, error: type[Exception]) -> None:
    async def body(gateway: Gateway) -> None:
        with pytest.raises(error):
            gateway.engine.plan(tokens)  # type: ignore[attr-defined]

    served(model, body, context_length=1024)
