"""Profiles of the shipped engine: what is measured, that nothing stays behind, and what follows from a failure."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import torch

from actorpp.config import EngineConfig
from actorpp.coordinator.chunking.fixed import FixedChunks
from actorpp.coordinator.chunking.policy import ChunkRequest
from actorpp.coordinator.chunking.profile import load_profile
from actorpp.coordinator.chunking.sglang import SglangChunks
from actorpp.engine import Engine
from actorpp.errors import ProfilingError
from actorpp.profiling import _OwnPrompts, measure_profile
from actorpp.serving.api import GenerationParams, StartupProgress
from actorpp.serving.gateway import Gateway
from tests.unit.engine.support import PROMPT, complete, served


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORPP_CACHE", str(tmp_path))


def test_a_profile_covers_histories_and_sizes_and_leaves_nothing_behind(model: Path) -> None:
    told: list[tuple[int, int]] = []

    async def body(gateway: Gateway) -> None:
        engine: Any = gateway.engine
        before, policy = engine.stats().pages_used, engine.scheduler.policy
        profile = await measure_profile(engine, on_progress=lambda done, total: told.append((done, total)))
        assert engine.stats().pages_used == before == 0
        assert engine.scheduler.policy is policy
        assert engine.scheduler.requests() == []
        first = {sample.tokens for sample in profile.samples if not sample.history}
        assert len(first) >= 8
        behind = [(sample.history, sample.tokens) for sample in profile.samples if sample.history]
        assert {tokens for _, tokens in behind} >= {64, 128, 256}
        assert max(history for history, _ in behind) > 512
        assert all(len(sample.seconds) == 2 and min(sample.seconds) > 0 for sample in profile.samples)
        assert len(profile.fit()) == 2
        assert all(fit.cost.time(0, 512) > 0 for fit in profile.fit())
        assert sum(tokens for _, tokens in behind) + sum(first) < told[-1][0] == told[-1][1]  # the warm-up is left out

    served(model, body, context_length=1024)


def test_memory_is_as_before(model: Path) -> None:
    """The same request before and after: what stages and driver hold then is its own, and nothing of the profile's."""
    prompt = [(11 * n + n * n) % 300 + 5 for n in range(900)]

    def held(engine: Any) -> tuple[Any, ...]:
        gc.collect()
        tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        hosts = [port.host for port in engine._stages._ports.stages.values()]
        pool = engine.scheduler.pool
        return sum(storages.values()), [host.num_requests for host in hosts], pool.free_pages, pool.num_pages

    async def body(gateway: Gateway) -> None:
        engine: Any = gateway.engine
        await complete(gateway, prompt_tokens=prompt, max_tokens=2)
        before = held(engine)
        await measure_profile(engine)
        await complete(gateway, prompt_tokens=prompt, max_tokens=2)
        assert held(engine) == before

    served(model, body, context_length=1024, chunked_prefill_size=512)


def test_a_busy_or_tiny_engine_gives_no_profile(model: Path) -> None:
    async def busy(gateway: Gateway) -> None:
        engine: Any = gateway.engine
        handle = engine.submit(PROMPT, GenerationParams())
        while not engine.scheduler.requests():  # noqa: ASYNC110 - until the coordinator has it
            await asyncio.sleep(0)
        with pytest.raises(ProfilingError, match="busy"):
            await measure_profile(engine)
        handle.abort()
        async for _ in handle:
            pass

    async def tiny(gateway: Gateway) -> None:
        with pytest.raises(ProfilingError, match=r"needed|no room"):
            await measure_profile(gateway.engine)  # type: ignore[arg-type]

    served(model, busy)
    served(model, tiny, context_length=8)


def test_dynamic_chunking_takes_a_profile_at_start_and_the_next_engine_uses_it(model: Path) -> None:
    keys = []

    async def first(gateway: Gateway) -> None:
        engine: Any = gateway.engine
        assert load_profile(engine.planning.key) == engine.planning.profile is not None
        assert isinstance(engine.scheduler.policy, SglangChunks)
        await complete(gateway, max_tokens=2)
        keys.append(engine.planning.profile)
        assert engine.planning.key.file.exists()

    async def second(gateway: Gateway) -> None:
        assert gateway.engine.planning.profile == keys[0]  # type: ignore[attr-defined]

    served(model, first, context_length=1024, enable_dynamic_chunking=True)
    served(model, second, context_length=1024, enable_dynamic_chunking=True)


def test_how_far_the_profile_is_at_start_is_told(model: Path) -> None:
    told: list[StartupProgress] = []

    async def main() -> None:
        options = {"stages": 2, "dtype": "float32", "kv_tokens": 2048, "threads_per_stage": 1, "transport": "inproc"}
        async with Engine(EngineConfig(model=str(model), chunk_policy="sglang", **options), on_startup=told.append):
            pass

    asyncio.run(main())
    profile = [progress for progress in told if progress.phase == "profile"]
    assert len(profile) > 10
    assert [progress.done for progress in profile] == sorted(progress.done for progress in profile)
    assert {(progress.total, progress.unit) for progress in profile} == {(profile[-1].done, "tokens")}


@pytest.mark.parametrize("limits", [{"context_length": 400}, {"chunked_prefill_size": 256, "context_length": 1024}])
def test_a_profile_within_small_limits_is_used_but_not_kept_for_others(model: Path, limits: dict[str, Any]) -> None:
    async def body(gateway: Gateway) -> None:
        planning: Any = gateway.engine.planning  # type: ignore[attr-defined]
        assert planning.profile is not None
        assert load_profile(planning.key) is None

    with structlog.testing.capture_logs() as logs:
        served(model, body, enable_dynamic_chunking=True, **limits)
    (warning,) = [entry for entry in logs if "not saved" in entry["event"]]
    assert "too little for engines with larger limits" in warning["reason"]


def test_where_a_profile_fails_chunks_have_one_size_and_that_is_said(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*args: Any, **options: Any) -> None:
        raise ProfilingError("a prompt failed")

    monkeypatch.setattr("actorpp.engine.measure_profile", fail)

    async def body(gateway: Gateway) -> None:
        result = await complete(gateway, max_tokens=2)
        assert result.metrics.chunks == (32, 28)

    with structlog.testing.capture_logs() as logs:
        served(model, body, enable_dynamic_chunking=True, chunked_prefill_size=32)
    assert [entry["log_level"] for entry in logs if "reason" in entry] == ["warning", "warning"]


def test_a_profile_that_cannot_be_saved_is_used_all_the_same(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(gateway: Gateway) -> None:
        assert gateway.engine.planning.profile is not None  # type: ignore[attr-defined]

    monkeypatch.setenv("ACTORPP_CACHE", "/dev/null/cache")
    with structlog.testing.capture_logs() as logs:
        served(model, body, context_length=1024, enable_dynamic_chunking=True)
    assert any("not saved" in entry["event"] and "/dev/null" in entry["reason"] for entry in logs)


def test_prompts_of_others_are_cut_as_before() -> None:
    own = _OwnPrompts(FixedChunks(10))
    own.plans[1] = [5, 20]
    assert own.next_chunk(ChunkRequest(1, 25), 0, 25, 100) == 20
    assert own.next_chunk(ChunkRequest(2, 25), 0, 25, 100) == 10
    assert own.next_chunk(ChunkRequest(1, 25, step_tokens=10), 20, 5, 100) == 0
    assert own.next_chunk(ChunkRequest(1, 25), 20, 5, 100) == 5
