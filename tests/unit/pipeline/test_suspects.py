"""A request that crashes its stage whenever it is computed, among innocent ones, in virtual time: it fails alone."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorpp.coordinator.suspects import CONVICTED
from actorpp.errors import CrashingRequestError, StageFailedError
from actorpp.runtime import ActorSystem
from actorpp.stages.messages import Step
from actorpp.testing import FakeNetwork, run
from tests.support.pipeline import Answer, expected_ids
from tests.support.recovering import RecoveringPipeline, SimulatedStage

PATIENCE_S = 1000.0
LIMIT = 5  # restarts allowed: the default


@dataclass(frozen=True)
class Asked:
    """A request; with ``crash`` one that crashes that stage, in that way, when it computes that position."""

    length: int
    count: int
    crash: tuple[int, str, float] | None = None  # position as a share of all that it has


INNOCENT = Asked(1, 1)


def prompt(number: int, length: int) -> tuple[int, ...]:
    generator = random.Random(1000 * number + length)
    return tuple(generator.randrange(1000) for _ in range(length))


class Poison:
    """What happens to stages as they begin a step."""

    def __init__(self, asked: list[Asked]) -> None:
        self.asked = asked
        self.crashes = 0

    def __call__(self, stage: SimulatedStage, step: Step) -> None:
        for segment in step.segments:
            asked = self.asked[segment.rid - 1] if segment.rid <= len(self.asked) else INNOCENT
            if asked.crash is None:
                continue
            victim, kind, share = asked.crash
            position = int(share * (asked.length + asked.count - 1))
            if victim % stage.spec.num_stages == stage.spec.stage and position - segment.start in range(segment.length):
                self.crash(stage, kind, step.epoch)
                return

    def crash(self, stage: SimulatedStage, kind: str, epoch: int) -> None:
        self.crashes += 1
        match kind:
            case "die":
                stage.die("was ended by signal 11", crashed=True)
            case "hang":
                stage.hang()
            case "raise":
                stage.broken(epoch, ZeroDivisionError("planted"), "internal")
                stage.ports.start(stage.end_session())


async def play(seed: int, stages: int, depth: int, asked: list[Asked], kills: list[tuple[float, int]]) -> Poison:
    """All at random moments of the first second. Every innocent one gets what it must, and every other one an error."""
    generator = random.Random(seed)
    poison = Poison(asked)
    async with ActorSystem() as system, asyncio.timeout(PATIENCE_S):
        network = FakeNetwork(seed, max_delay=0.02)
        restarts = LIMIT + len(kills)
        pipeline = RecoveringPipeline(
            system, network, stages=stages, depth=depth, watchdog_s=5.0, max_restarts=restarts
        )
        pipeline.ports.computing = poison
        await pipeline.open()
        ticking = asyncio.create_task(tick())
        answers: list[Answer] = []
        for number, each in enumerate(asked):
            answers.append(pipeline.submit(prompt(number, each.length), each.count))
            await asyncio.sleep(generator.random() / len(asked))
        for after, stage in kills:
            await asyncio.sleep(after)
            pipeline.ports.stages[stage % stages].die()
        for number, (each, answer) in enumerate(zip(asked, answers, strict=True)):
            await answer.done.wait()
            expected = expected_ids(prompt(number, each.length), each.count)
            assert tuple(answer.ids) == expected[: len(answer.ids)]
            if each.crash is None:
                assert (answer.end, len(answer.ids)) == ("length", each.count)
            else:
                assert isinstance(answer.end, CrashingRequestError), answer.end
                assert not answer.end.retryable
        scheduler = pipeline.requests.scheduler
        while scheduler.in_flight or pipeline.recovery.state != "ready":  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.1)
        assert scheduler.pool.used_pages == 0
        assert pipeline.failure is None
        assert scheduler.suspects.alone is None
        late = pipeline.submit(prompt(99, 20), 3)
        await late.done.wait()
        assert tuple(late.ids) == expected_ids(prompt(99, 20), 3)
        await pipeline.close()
        ticking.cancel()
    return poison


async def tick() -> None:
    while True:  # noqa: ASYNC110 - what waits for the watchdog is no deadlock here
        await asyncio.sleep(1)


innocent = st.builds(Asked, length=st.integers(1, 150), count=st.integers(1, 12))
crash = st.tuples(st.integers(0, 3), st.sampled_from(["die", "hang", "raise"]), st.floats(0, 0.999))
guilty = st.builds(Asked, length=st.integers(1, 150), count=st.integers(1, 12), crash=crash)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    stages=st.integers(1, 4),
    depth=st.integers(0, 2),
    asked=st.lists(innocent, max_size=6),
    one=guilty,
    place=st.integers(0, 6),
    kills=st.lists(st.tuples(st.floats(0, 9, width=16), st.integers(0, 3)), max_size=2),
)
def test_a_request_that_crashes_its_stage_fails_alone(
    seed: int, stages: int, depth: int, asked: list[Asked], one: Asked, place: int, kills: list[tuple[float, int]]
) -> None:
    asked = [*asked[:place], one, *asked[place:]]
    poison = run(lambda: play(seed, stages, depth, asked, kills), seed=seed)
    assert poison.crashes <= CONVICTED + len(kills)


@pytest.mark.parametrize("for_good", [False, True])
def test_a_stage_that_is_broken_itself_is_started_anew_and_where_that_does_not_help_the_engine_ends(
    for_good: bool,
) -> None:
    """Whatever it computes raises, as on a device after an error that sticks to its process."""

    async def main() -> None:
        async with ActorSystem() as system, asyncio.timeout(PATIENCE_S):
            pipeline = RecoveringPipeline(system, FakeNetwork(max_delay=0.02), stages=2, max_restarts=LIMIT)
            await pipeline.open()
            first = pipeline.ports.stages[1]

            def raising(stage: SimulatedStage, step: Step) -> None:
                if stage is first or (for_good and stage.spec.stage == 1):
                    stage.broken(step.epoch, ZeroDivisionError("planted"), "internal")
                    stage.ports.start(stage.end_session())

            pipeline.ports.computing = raising
            prompts = [prompt(number, 40) for number in range(12)]
            answers = [pipeline.submit(ids, 5) for ids in prompts]
            for ids, answer in zip(prompts, answers, strict=True):
                await answer.done.wait()
                if for_good:
                    assert isinstance(answer.end, StageFailedError)
                else:
                    assert tuple(answer.ids) == expected_ids(ids, 5)
            assert (pipeline.failure is not None) == for_good
            if not for_good:
                assert pipeline.group.restarts == [0, 1]
            await pipeline.close()

    run(main)


def test_several_of_them_are_found_one_after_the_other() -> None:
    asked = [Asked(80, 6), Asked(90, 6, (1, "die", 0.5)), Asked(70, 8), Asked(60, 6, (0, "raise", 0.9)), Asked(5, 9)]
    asked += [Asked(40, 4, (2, "die", 0.99)), Asked(30, 30)]
    poison = run(lambda: play(1, 3, 1, asked, []))
    assert poison.crashes > LIMIT  # those that were explained do not count against it
