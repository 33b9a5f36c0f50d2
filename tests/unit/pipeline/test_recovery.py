"""Stages that die, stop or lose their links at random moments, in virtual time: no request is lost, none differs."""

from __future__ import annotations

import asyncio
import errno
import gc
import random
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorpp.coordinator.recovery import SETTLE_S
from actorpp.coordinator.request import Request
from actorpp.coordinator.stage_process import StageProcess
from actorpp.errors import ConfigError, CoordinatorFailedError, StageFailedError
from actorpp.runtime import ActorSystem
from actorpp.runtime.cell import Cell
from actorpp.runtime.mailbox import Mailbox
from actorpp.runtime.supervision import Supervisor
from actorpp.stages.messages import Step
from actorpp.testing import FakeNetwork, run
from tests.support.pipeline import expected_ids
from tests.support.recovering import LOAD_S, RecoveringPipeline

KINDS = ("kill", "stop", "hang", "break")
WATCHDOG_S = 20.0


@dataclass(frozen=True)
class Fault:
    """So many seconds after the one before it."""

    after: float
    stage: int
    kind: str


def prompt(number: int, length: int) -> tuple[int, ...]:
    generator = random.Random(1000 * number + length)
    return tuple(generator.randrange(1000) for _ in range(length))


def strike(pipeline: RecoveringPipeline, fault: Fault) -> str:
    """Returns the phase that it met."""
    phase = pipeline.recovery.state
    if phase == "ready":
        phases = {request.phase.value for request in pipeline.requests.scheduler.requests()}
        phase = "prefill" if "prefill" in phases else "decode" if "decode" in phases else "idle"
    stage = pipeline.ports.stages[fault.stage % pipeline.stages]
    match fault.kind:
        case "kill":
            stage.die()
        case "stop":
            stage.stop()
        case "hang":
            stage.hang()
        case "break":
            stage.broken(pipeline.recovery.epoch, ConnectionError("connection reset"))
    return phase


async def play(
    seed: int, stages: int, depth: int, max_delay: float, lengths: list[tuple[int, int]], faults: list[Fault]
) -> Counter[str]:
    """Requests at random moments under these faults; afterwards all have what they must have. What met what."""
    met: Counter[str] = Counter()
    generator = random.Random(seed)
    async with ActorSystem() as system:
        pipeline = RecoveringPipeline(
            system, FakeNetwork(seed, max_delay=max_delay), stages=stages, depth=depth, watchdog_s=WATCHDOG_S
        )
        ticking = asyncio.create_task(tick())  # what waits for the watchdog is no deadlock here

        async def strike_all() -> None:
            for fault in faults:
                await asyncio.sleep(fault.after)
                if fault.stage % stages in pipeline.ports.stages:  # not before its first start
                    met[f"{fault.kind} in {strike(pipeline, fault)}"] += 1

        striking = asyncio.create_task(strike_all())
        await pipeline.open()
        asked = []
        for number, (length, count) in enumerate(lengths):
            asked.append((prompt(number, length), count))
            pipeline.submit(*asked[-1])
            await asyncio.sleep(generator.random())
        await striking
        for (ids, count), answer in zip(asked, pipeline.answers, strict=True):
            await answer.done.wait()
            assert answer.end == "length"
            assert tuple(answer.ids) == expected_ids(ids, count)
        scheduler = pipeline.requests.scheduler
        while scheduler.in_flight:  # noqa: ASYNC110 - virtual time: the sleep costs nothing
            await asyncio.sleep(0.1)
        assert scheduler.pool.used_pages == 0
        assert pipeline.failure is None
        check_log(pipeline)
        await pipeline.close()
        ticking.cancel()
    return met


async def tick() -> None:
    while True:  # noqa: ASYNC110 - it waits for nothing
        await asyncio.sleep(1)


def check_log(pipeline: RecoveringPipeline) -> None:
    """The log of each epoch is contiguous."""
    seqs: dict[int, list[int]] = {}
    for entry in pipeline.ports.log:
        seqs.setdefault(entry.epoch, []).append(entry.seq)
    assert all(written == list(range(len(written))) for written in seqs.values())
    assert list(seqs) == sorted(seqs)


faults = st.builds(
    Fault, after=st.floats(0, 9, width=16), stage=st.integers(0, 3), kind=st.sampled_from(("kill", *KINDS))
)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    stages=st.integers(1, 4),
    depth=st.integers(0, 2),
    max_delay=st.sampled_from([0.0, 0.05, 0.5]),
    lengths=st.lists(st.tuples(st.integers(1, 150), st.integers(1, 12)), min_size=1, max_size=6),
    schedule=st.lists(faults, max_size=5),
)
def test_no_request_is_lost_or_differs_whatever_happens_to_the_stages(
    seed: int, stages: int, depth: int, max_delay: float, lengths: list[tuple[int, int]], schedule: list[Fault]
) -> None:
    run(lambda: play(seed, stages, depth, max_delay, lengths, schedule), seed=seed)


def drawn(number: int) -> Counter[str]:
    """One of a fixed series of schedules."""
    generator = random.Random(number)
    schedule = [
        Fault(generator.uniform(0, 6), generator.randrange(4), generator.choice(KINDS))
        for _ in range(generator.randint(1, 6))
    ]
    lengths = [(generator.randint(1, 150), generator.randint(1, 12)) for _ in range(6)]
    stages, depth, max_delay = generator.randint(1, 4), generator.randrange(3), generator.choice([0.0, 0.05, 0.5])
    return run(lambda: play(number, stages, depth, max_delay, lengths, schedule), seed=number)


def test_faults_meet_every_phase() -> None:
    met: Counter[str] = Counter()
    for number in range(60):
        met += drawn(number)
    assert {f"{kind} in {phase}" for kind in KINDS for phase in ("prefill", "decode", "recovering")} <= set(met), met
    assert {"kill in starting", "stop in starting"} <= set(met), met


def test_survivors_keep_their_weights() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            pipeline = RecoveringPipeline(system, FakeNetwork(max_delay=0.01), stages=3)
            await pipeline.open()
            before = dict(pipeline.ports.stages)
            ids = prompt(1, 200)
            answer = pipeline.submit(ids, 8)
            await asyncio.sleep(0.35)
            before[1].die()
            await answer.done.wait()
            assert tuple(answer.ids) == expected_ids(ids, 8)
            assert [pipeline.ports.stages[stage] is before[stage] for stage in range(3)] == [True, False, True]
            assert pipeline.group.restarts == [0, 1, 0]
            assert pipeline.recovery.epoch == 2
            assert pipeline.recovery.seconds == pytest.approx(LOAD_S, abs=1.0)
            await pipeline.close()

    run(main)


def test_of_a_stage_that_died_the_driver_keeps_nothing() -> None:
    """Told by which of the driver's objects are alive after many recoveries with requests under way."""
    kinds = (StageProcess, Cell, Mailbox, Supervisor, Request, StageFailedError)
    alive: list[dict[str, int]] = []

    async def main() -> None:
        async with ActorSystem() as system:
            network = FakeNetwork(max_delay=0.01)
            pipeline = RecoveringPipeline(system, network, stages=3)
            await pipeline.open()
            for number in range(20):
                answer = pipeline.submit(prompt(number, 200), 8)
                await asyncio.sleep(0.35)
                pipeline.ports.stages[number % 2].die()
                await answer.done.wait()
                if number in (9, 19):
                    pipeline.answers.clear()
                    network.links.clear()  # the pretended ends of stages that died: not the driver's
                    pipeline.ports._meetings.clear()
                    gc.collect()
                    there = Counter(map(type, gc.get_objects()))
                    alive.append({kind.__name__: there[kind] for kind in kinds})
            assert {letter.actor.split()[0] for letter in system.dead_letters.recent} == {"session"}  # of stages
            await pipeline.close()

    run(main)
    assert alive[0] == alive[1]


def test_a_stall_is_noticed_within_the_watchdogs_time_and_a_death_at_once() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            pipeline = RecoveringPipeline(system, FakeNetwork(max_delay=0.01), stages=2, watchdog_s=5.0)
            await pipeline.open()
            loop = asyncio.get_running_loop()
            ticking = asyncio.create_task(tick())
            for kind, within in (("stop", 5.0), ("hang", 5.0), ("kill", 0.1)):
                answer = pipeline.submit(prompt(1, 2000), 8)
                await asyncio.sleep(0.5)
                struck, restarts = loop.time(), pipeline.group.restarts[1]
                strike(pipeline, Fault(0, 1, kind))
                while pipeline.group.restarts[1] == restarts:  # noqa: ASYNC110 - virtual time: the sleep costs nothing
                    await asyncio.sleep(0.05)
                assert loop.time() - struck <= within + SETTLE_S
                await answer.done.wait()
                assert answer.end == "length"
            ticking.cancel()
            await pipeline.close()

    run(main)


def test_clocks_of_stages_that_are_10_s_off_change_nothing_and_timings_come_on_the_drivers() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            pipeline = RecoveringPipeline(system, FakeNetwork(max_delay=0.01), stages=3, watchdog_s=5.0)
            pipeline.ports.skews = {0: 10.0, 1: -10.0}
            await pipeline.open()
            ids = prompt(1, 500)
            answer = pipeline.submit(ids, 60)
            await answer.done.wait()
            assert tuple(answer.ids) == expected_ids(ids, 60)
            assert pipeline.recovery.recovered == 0
            spans = [[(timing.start, timing.end) for timing in output.timings] for output in pipeline.ports.outputs]
            for step in spans:
                for (_, ended), (began, _) in pairwise(step):
                    assert ended - 0.02 <= began <= ended + 1  # half a ping's way is what may be wrong
            await pipeline.close()

    run(main)


def test_an_option_that_does_not_go_with_the_stages_sizes_ends_the_start_at_once() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            pipeline = RecoveringPipeline(system, FakeNetwork(0), stages=3)
            with (
                patch.object(pipeline.requests, "_make_scheduler", side_effect=ConfigError("too few pages")),
                pytest.raises(ConfigError, match=r"^too few pages$"),
            ):
                await pipeline.open()
            assert pipeline.group.restarts == [0, 0, 0]
            await pipeline.group.close(1.0)

    run(main)


def test_beyond_the_limit_every_request_fails_with_the_cause() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            pipeline = RecoveringPipeline(system, FakeNetwork(max_delay=0.01), stages=2, max_restarts=2)
            await pipeline.open()
            answers = [pipeline.submit(prompt(n, 500), 50) for n in range(3)]
            for _ in range(3):
                await asyncio.sleep(4)
                assert pipeline.failure is None
                pipeline.ports.stages[1].die()
            for answer in answers:
                await answer.done.wait()
                assert isinstance(answer.end, StageFailedError)
                assert "stage 1: was ended by signal 9 (after 2 restarts within 300 s)" in str(answer.end)
                assert answer.end.stage == 1
            assert pipeline.recovery.state == "failed"
            assert isinstance(pipeline.failure, StageFailedError)
            late = pipeline.submit(prompt(9, 5), 5)
            await late.done.wait()
            assert isinstance(late.end, StageFailedError)
            await pipeline.close()

    run(main)


def test_a_crash_of_recovery_ends_every_request_also_those_that_are_on_their_way() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            pipeline = RecoveringPipeline(system, FakeNetwork(max_delay=0.01), stages=2)
            await pipeline.open()
            watching = asyncio.create_task(pipeline.requests.watch(pipeline.actor))
            running = pipeline.submit(prompt(1, 500), 50)
            await asyncio.sleep(0.5)
            with patch.object(pipeline.recovery, "recover", side_effect=ZeroDivisionError("planted")):
                pipeline.ports.stages[0].die()
                await watching
            late = pipeline.submit(prompt(2, 5), 5)  # handed over before its client could hear of it
            for answer in (running, late):
                await answer.done.wait()
                assert isinstance(answer.end, CoordinatorFailedError)
                assert "the recovery crashed: ZeroDivisionError: planted" in str(answer.end)
            await pipeline.close()

    run(main)


def test_a_request_that_meets_the_coordinators_end_gets_its_answer() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            pipeline = RecoveringPipeline(system, FakeNetwork(max_delay=0.01), stages=2)
            await pipeline.open()
            await system.kill(system.get("coordinator"))
            answer = pipeline.submit(prompt(1, 5), 5)
            assert isinstance(answer.end, CoordinatorFailedError)
            await pipeline.close()

    run(main)


def test_want_of_file_descriptors_costs_a_round_of_recovery_and_not_the_engine() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            pipeline = RecoveringPipeline(system, FakeNetwork(max_delay=0.01), stages=2)
            await pipeline.open()
            launch, error = pipeline.ports.launch, OSError(errno.EMFILE, "Too many open files")
            starts = iter([error, None])

            async def once_refused(*args: Any) -> Any:
                if (refusal := next(starts)) is not None:
                    raise refusal
                return await launch(*args)

            ids = prompt(1, 100)
            answer = pipeline.submit(ids, 20)
            await asyncio.sleep(0.5)
            with (
                patch.object(pipeline.ports, "launch", once_refused),
                patch.object(pipeline.ports, "prepare", side_effect=error),
            ):
                pipeline.ports.stages[1].die()
                await answer.done.wait()
            assert tuple(answer.ids) == expected_ids(ids, 20)
            assert (pipeline.recovery.state, pipeline.recovery.recovered) == ("ready", 1)
            await pipeline.close()

    run(main)


def test_a_trace_asked_for_while_a_stage_is_restarted_says_so() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            pipeline = RecoveringPipeline(system, FakeNetwork(max_delay=0.01), stages=2)
            await pipeline.open()
            launch = pipeline.ports.launch

            async def asked(*args: Any) -> Any:
                with pytest.raises(StageFailedError, match="restarted"):
                    await pipeline.group.trace()
                asking.set()
                return await launch(*args)

            asking = asyncio.Event()
            with patch.object(pipeline.ports, "launch", asked):
                pipeline.ports.stages[1].die()
                await asking.wait()
            await pipeline.close()

    run(main)


def test_requests_wait_and_can_be_aborted_while_it_recovers() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            pipeline = RecoveringPipeline(system, FakeNetwork(max_delay=0.01), stages=2)
            await pipeline.open()
            running = pipeline.submit(prompt(1, 500), 50)
            await asyncio.sleep(0.5)
            pipeline.ports.stages[0].die()
            await asyncio.sleep(0.5)
            assert pipeline.recovery.state == "recovering"
            written = len(pipeline.ports.log)
            waiting = pipeline.submit(prompt(2, 5), 5)
            pipeline.requests.abort(pipeline.requests.scheduler.requests()[0])
            await running.done.wait()
            assert running.end == "abort"
            assert pipeline.recovery.state == "recovering"
            assert len(pipeline.ports.log) == written
            await waiting.done.wait()
            assert waiting.end == "length"
            steps = [entry for entry in pipeline.ports.log[written:] if isinstance(entry, Step)]
            assert {segment.rid for step in steps for segment in step.segments} == {2}
            await pipeline.close()

    run(main)
