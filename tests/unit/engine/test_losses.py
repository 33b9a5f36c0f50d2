"""An engine that loses a stage actor, a session or its coordinator, with real stages on the test's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from actorpp.config import EngineConfig
from actorpp.coordinator.scheduler import Scheduler
from actorpp.engine import Engine
from actorpp.errors import CoordinatorFailedError, StageFailedError, StageLoadError
from actorpp.runtime import ActorSystem
from actorpp.serving.api import Finished, GenerationParams, Tokens
from actorpp.stages.host import StageHost
from actorpp.stages.messages import Output, SamplingParams, Step
from tests.unit.engine.support import PROMPT

COUNT = 12
ASKED = [
    GenerationParams(max_tokens=COUNT, ignore_eos=True),
    GenerationParams(max_tokens=COUNT, ignore_eos=True, sampling=SamplingParams(temperature=0.9), seed=7),
    GenerationParams(max_tokens=COUNT, ignore_eos=True, sampling=SamplingParams(frequency_penalty=-2.0)),
]
Body = Callable[[Engine, ActorSystem], Coroutine[Any, Any, None]]


def with_engine(model: Path, body: Body, **options: Any) -> None:
    async def main() -> None:
        defaults = {"kv_tokens": 1024, "dtype": "float32", "threads_per_stage": 1, "chunked_prefill_size": 16}
        config = EngineConfig(model=str(model), stages=3, transport="inproc", **defaults | options)
        async with ActorSystem() as system:
            async with Engine(config, system=system) as engine:
                await body(engine, system)
            assert system.dead_letters.observers == []  # the system lives on

    asyncio.run(main())


def test_what_still_comes_while_the_coordinator_ends_is_a_dead_letter(model: Path) -> None:
    """A signal ends an engine at any moment: Outputs are on their way, and clients abort their requests."""

    async def body(engine: Engine, system: ActorSystem) -> None:
        handle = engine.submit(PROMPT, ASKED[0])
        life = engine._requests
        output = Output(epoch=1, seq=0)
        closing = asyncio.create_task(life.close())
        turns = 0
        while turns < 10 or not closing.done():
            life.deliver(output)
            handle.abort()
            life.suspend()
            await asyncio.sleep(0)
            turns += 1
        await closing

    with_engine(model, body)


async def complete(engine: Engine, params: GenerationParams) -> list[int]:
    ids: list[int] = []
    async for event in engine.submit(PROMPT, params):
        match event:
            case Tokens(new):
                ids += new
            case Finished():
                return ids
    raise AssertionError("no final event")


async def complete_all(engine: Engine) -> list[list[int]]:
    return await asyncio.gather(*(complete(engine, params) for params in ASKED))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_dead_stage_actor_costs_no_request(model: Path, stage: int) -> None:
    async def body(engine: Engine, system: ActorSystem) -> None:
        expected = await complete_all(engine)
        launch, steps = StageHost.launch, 0
        loop = asyncio.get_running_loop()
        killing: list[asyncio.Task[Any]] = []

        def strike(host: StageHost, step: Step, *rest: Any) -> Any:
            nonlocal steps
            steps += host.spec.stage == stage
            if steps in (3, 12) and host.spec.stage == stage:  # in the prefill, and in decode
                kill = system.kill(system.get(f"node-{stage}"))
                loop.call_soon_threadsafe(lambda: killing.append(loop.create_task(kill)))
            return launch(host, step, *rest)

        with patch.object(StageHost, "launch", strike):
            assert await complete_all(engine) == expected
        await asyncio.gather(*killing)
        stats = engine.stats()
        assert stats.state == "ready"
        assert stats.recoveries == 2
        assert stats.replays >= 3
        assert [each.restarts for each in stats.stages] == [2 * (index == stage) for index in range(3)]
        while engine.scheduler.in_flight:  # noqa: ASYNC110 - dead segments come back within milliseconds
            await asyncio.sleep(0)
        assert engine.stats().pages_used == 0

    with_engine(model, body)


def test_a_crashed_session_costs_an_epoch_and_no_stage(model: Path) -> None:
    async def body(engine: Engine, system: ActorSystem) -> None:
        expected = await complete_all(engine)
        launch, steps = StageHost.launch, 0

        def strike(host: StageHost, step: Step, *rest: Any) -> Any:
            nonlocal steps
            steps += host.spec.stage == 1
            if steps == 5:
                steps += 1
                raise ZeroDivisionError("planted")
            return launch(host, step, *rest)

        with patch.object(StageHost, "launch", strike):
            assert await complete_all(engine) == expected
        stats = engine.stats()
        assert (stats.recoveries, stats.epoch) == (1, 2)
        assert [each.restarts for each in stats.stages] == [0, 0, 0]

    with_engine(model, body)


def test_a_stage_that_crashes_again_and_again_ends_the_engine(model: Path) -> None:
    async def body(engine: Engine, system: ActorSystem) -> None:
        def strike(host: StageHost, step: Step, *rest: Any) -> Any:
            raise ZeroDivisionError("planted")

        with patch.object(StageHost, "launch", strike):
            answers = await asyncio.gather(*(complete(engine, params) for params in ASKED), return_exceptions=True)
        assert [type(answer) for answer in answers] == [StageFailedError] * 3
        assert "planted" in str(answers[0])
        with pytest.raises(StageFailedError, match="planted"):
            await engine.failed()
        assert engine.stats().state == "failed"
        with pytest.raises(StageFailedError, match="the pipeline has failed") as refused:
            engine.submit(PROMPT, ASKED[0])
        assert refused.value.stage in range(3)

    with_engine(model, body, max_restarts=2)


def test_a_stage_without_room_for_one_page_or_its_device_ends_the_start_at_once(model: Path) -> None:
    async def body(engine: Engine, system: ActorSystem) -> None:
        raise AssertionError("it started")

    with pytest.raises(StageLoadError, match="no room for one KV page of 2048 tokens"):
        with_engine(model, body, page_size=2048, kv_tokens=None, mem_fraction_static=1e-9)
    absent = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(StageLoadError, match=f"device {absent}: torch finds"):
        with_engine(model, body, device=absent)


@pytest.mark.parametrize("where", ["submit", "on_output", "next_entry"])
def test_a_crash_inside_the_coordinator_ends_requests_and_engine_with_the_cause(model: Path, where: str) -> None:
    async def body(engine: Engine, system: ActorSystem) -> None:
        method, calls = getattr(Scheduler, where), 0

        def strike(scheduler: Scheduler, *rest: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise ZeroDivisionError("planted")
            return method(scheduler, *rest)

        with patch.object(Scheduler, where, strike):
            answers = await asyncio.gather(*(complete(engine, params) for params in ASKED), return_exceptions=True)
        assert [type(answer) for answer in answers] == [CoordinatorFailedError] * 3
        assert any("ZeroDivisionError" in str(answer) for answer in answers)
        with pytest.raises(CoordinatorFailedError, match="the coordinator crashed: ZeroDivisionError: planted"):
            await engine.failed()
        with pytest.raises(CoordinatorFailedError):
            engine.submit(PROMPT, ASKED[0])

    with_engine(model, body)
