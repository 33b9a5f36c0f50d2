"""A short schedule of faults on the real engine; the long one is ``python -m tests.faults``."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from actorpp.analysis.steps import traced_steps
from actorpp.analysis.trace import Trace
from actorpp.config import EngineConfig
from actorpp.errors import CrashingRequestError
from actorpp.serving.api import GenerationParams
from tests.exactness.tiny import save_llama
from tests.faults.harness import Harness, Tally, opened, schedule
from tests.faults.stage import POISON
from tests.faults.trap import Strike


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("faults"), tied=True, eos_token_id=2)


def check_order(trace: Trace) -> None:
    """On one clock, though the clocks of the stages' processes are 10 s ahead or behind: see ``stage``."""
    steps = traced_steps(trace.stages)
    assert steps
    for step in steps:
        for ended, began in zip(step.ends, step.starts[1:], strict=False):
            assert ended - 1 < began < ended + 5
    asked = {request.rid: request.submitted for request in trace.requests}
    assert all(step.starts[0] > asked[segment.rid] - 1 for step in steps for segment in step.segments)


def play(model: Path, rounds: list[list[Strike]], *, trace: bool = False, **options: Any) -> Tally:
    async def main() -> Tally:
        config = EngineConfig(
            model=str(model),
            stages=3,
            dtype="float32",
            kv_tokens=8192,
            threads_per_stage=1,
            chunked_prefill_size=32,
            max_restarts=1000,
            **options,
        )
        harness: Harness
        async with opened(config, 0, longest=60, trace=trace) as harness:
            for number, strikes in enumerate(rounds):
                await harness.play(number, strikes)
            if trace:
                check_order(await harness.engine.trace())
        return harness.tally

    return asyncio.run(main())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_processes_that_die_stop_or_hang_cost_no_request(model: Path) -> None:
    rounds = [
        [Strike(1, "prefill", visit=2), Strike(1, "loading")],
        [Strike(0, "sending"), Strike(1, "decode", "hang"), Strike(2, "decode", "stop")],
        [Strike(2, "receiving", visit=2), Strike(0, "joining")],
    ]
    tally = play(model, rounds, watchdog_timeout=10.0, warm_spares=1, trace=True)
    assert not tally.failed, tally.summary()
    assert tally.restarts >= 6  # a busy machine may take a slow stage for a stopped one
    assert tally.requests == 12


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_request_that_crashes_its_stages_process_fails_alone(model: Path) -> None:
    async def main() -> None:
        config = EngineConfig(
            model=str(model), stages=2, dtype="float32", kv_tokens=4096, threads_per_stage=1, chunked_prefill_size=32
        )
        harness: Harness
        async with opened(config, 0, longest=60) as harness:
            handle = harness.engine.submit([*POISON, *range(5, 105)], GenerationParams(max_tokens=4))
            playing = asyncio.create_task(harness.play(0, []))
            with pytest.raises(CrashingRequestError, match=r"ended by signal 11: for the 3\. time in a row"):
                async for _ in handle:
                    pass
            await playing
            stats = harness.engine.stats()
        assert not harness.tally.failed, harness.tally.summary()
        assert stats.state == "ready"
        assert [stage.restarts for stage in stats.stages] == [3, 0]

    asyncio.run(main())


def test_stages_on_the_loop_that_die_cost_no_request(model: Path) -> None:
    generator = random.Random(5)
    rounds = [schedule(generator, 3, processes=False) for _ in range(5)]
    tally = play(model, rounds, transport="inproc")
    assert not tally.failed, tally.summary()
    assert tally.restarts == sum(len(strikes) for strikes in rounds)


def test_the_harness_sees_what_it_looks_for(model: Path) -> None:
    """Planted: a replay that forgets a delivered token, and one that delivers it again."""
    from actorpp.coordinator.request import Request

    rewind = Request.rewind
    rounds = [[Strike(1, "decode", visit=visit)] for visit in (2, 3)]

    def forgetting(request: Request) -> None:
        rewind(request)
        request.replayed = max(0, request.replayed - 1)

    def doubling(request: Request) -> None:
        if request.output_ids:
            request.output_ids.pop()
        rewind(request)

    for fault in (forgetting, doubling):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Request, "rewind", fault)
            assert play(model, rounds, transport="inproc").failed, fault
