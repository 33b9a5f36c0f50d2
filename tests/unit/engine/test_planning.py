"""Chunk plans of the shipped engine: what it predicts, what it does, and what it takes from a saved profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actorpp.coordinator.chunking.cost import CostModel
from actorpp.coordinator.chunking.profile import Profile
from actorpp.errors import ContextLengthExceededError, InvalidRequestError
from actorpp.serving.gateway import Gateway
from tests.unit.coordinator.chunking.support import sample
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
        Profile.of(planning.key, tuple(sample(true[0], h, x, n % 2 == 1) for n, (h, x) in enumerate(grid))).save()

    async def load(gateway: Gateway) -> None:
        plan = gateway.engine.plan(700)  # type: ignore[attr-defined]
        expected = true[0].chunk_times(plan.chunks)
        assert plan.predicted_chunk_s == tuple(pytest.approx(row, rel=0.02) for row in expected)

    served(model, save, context_length=1024, layer_partition=(2, 3))
    served(model, load, context_length=1024, layer_partition=(2, 3))


@pytest.mark.parametrize(("tokens", "error"), [(0, InvalidRequestError), (1024, ContextLengthExceededError)])
def test_what_cannot_be_planned_is_refused(model: Path, tokens: int, error: type[Exception]) -> None:
    async def body(gateway: Gateway) -> None:
        with pytest.raises(error):
            gateway.engine.plan(tokens)  # type: ignore[attr-defined]

    served(model, body, context_length=1024)


def test_layers_are_split_by_what_they_cost(model: Path) -> None:
    async def body(gateway: Gateway) -> None:
        assert gateway.engine.planning.key.partition in ((3, 2), (2, 3))  # type: ignore[attr-defined]
        assert (await complete(gateway, max_tokens=2)).metrics.chunks

    served(model, body, layer_partition="auto")
