"""Requests of random lengths, priorities and deadlines, aborted in every state, on the shipped Coordinator.

Virtual time, shipped sessions whose compute is simulated, a network that delays and reorders by seed; in some runs
epochs are lost with a stage, and in some the engine gives up after one. Whatever happens: each request ends once with
the tokens it must have, none twice, pages return to zero, bounds hold, dead letters reconcile, and the same seed gives
the same plan.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from actorpp.coordinator.coordinator import Coordinator, GiveUp
from actorpp.coordinator.request import Phase, Request
from actorpp.errors import DeadlineExceededError, OverloadedError, StageFailedError
from actorpp.runtime import ActorSystem, DeadLetter
from actorpp.stages.messages import End, LogEntry, Step
from actorpp.testing import FakeNetwork, run
from tests.support.pipeline import Answer, SimulatedPipeline, expected_ids

STATES = {"unseen", "waiting", "prefill", "between two stages", "decode"}
NOTICED_S = 0.5  # after which a stage's death is known to the coordinator


@dataclass(frozen=True)
class Life:
    """One request's; times in seconds. ``aborts`` are counted from its arrival; 0 is at once, None after its end."""

    arrival: float
    length: int
    count: int
    priority: int
    deadline: float | None
    aborts: tuple[float | None, ...]


@dataclass(frozen=True)
class Scenario:
    seed: int
    stages: int
    depth: int
    lookahead: int
    chunk: int
    pages: int
    running: int
    queued: int
    max_delay: float
    lives: tuple[Life, ...]
    stale: int  # envelopes of an old epoch
    losses: tuple[tuple[float, int, float], ...]  # after how long which stage dies, and how long the recovery takes
    death: tuple[float, int] | None  # when which stage dies for good


moments = st.floats(0, 8, width=16)
lives = st.builds(
    Life,
    arrival=moments,
    length=st.integers(1, 150),
    count=st.integers(1, 12),
    priority=st.integers(-2, 2),
    deadline=st.none() | st.floats(0, 12, width=16),
    aborts=st.lists(st.none() | st.just(0.0) | moments, max_size=2).map(tuple),
)
scenarios = st.builds(
    Scenario,
    seed=st.integers(0, 10_000),
    stages=st.integers(1, 4),
    depth=st.integers(0, 3),
    lookahead=st.integers(1, 2),
    chunk=st.sampled_from([1, 16, 64]),
    pages=st.integers(12, 60),
    running=st.integers(1, 4),
    queued=st.integers(0, 6),
    max_delay=st.sampled_from([0.0, 0.05, 1.0]),
    lives=st.lists(lives, min_size=1, max_size=8).map(tuple),
    stale=st.integers(0, 3),
    losses=st.lists(st.tuples(moments, st.integers(0, 3), st.floats(0, 4, width=16)), max_size=3).map(tuple),
    death=st.none() | st.tuples(moments, st.integers(0, 3)),
)


@dataclass
class Outcome:
    """What a run left; two of one scenario must be equal."""

    log: list[LogEntry] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    ended_at: list[float] = field(default_factory=list)


def state_of(pipeline: SimulatedPipeline, request: Request) -> str:
    """Where a request is in its life, as the coordinator and the stages see it."""
    if request.phase is Phase.ENDED:
        return "ended"
    if request.phase is Phase.WAITING:
        return "waiting" if request in pipeline.scheduler.waiting else "unseen"
    first, last = ({step.seq for step in host.steps} for host in (pipeline.hosts[0], pipeline.hosts[-1]))
    for step in pipeline.scheduler.in_flight:
        if step.seq in first - last and any(segment.rid == request.rid for segment in step.segments):
            return "between two stages"
    return request.phase.value


async def play(scenario: Scenario, seen: Counter[str]) -> Outcome:
    outcome = Outcome()
    async with ActorSystem() as system:
        pipeline = SimulatedPipeline(
            system,
            FakeNetwork(scenario.seed, max_delay=scenario.max_delay),
            stages=scenario.stages,
            depth=scenario.depth,
            lookahead=scenario.lookahead,
            chunk=scenario.chunk,
            pages=scenario.pages,
            running=scenario.running,
            queued=scenario.queued,
        )
        letters: list[DeadLetter] = []
        system.dead_letters.observe(letters.append)
        await pipeline.open()
        count_states(pipeline, seen)
        check_bounds(pipeline)
        answers: list[Answer] = [Answer() for _ in scenario.lives]
        async with asyncio.TaskGroup() as group:
            for number, life in enumerate(scenario.lives):
                group.create_task(live(pipeline, life, number, answers))
            group.create_task(disturb(pipeline, scenario))
            group.create_task(lose_stages(pipeline, scenario))
        if scenario.death is None:
            await pipeline.finish()
        for life, answer in zip(scenario.lives, answers, strict=True):
            check_end(life, answer, number=answers.index(answer), died=scenario.death is not None)
        if scenario.death is None:
            assert pipeline.failures == []
            assert pipeline.scheduler.pool.used_pages == 0
            assert not pipeline.scheduler.running
            assert not pipeline.scheduler.waiting
            pipeline.write(End(epoch=pipeline.epoch, seq=pipeline.scheduler.next_seq))
            for session in pipeline.sessions:
                assert (await session.join()).reason == "finished"
        await asyncio.sleep(10 * scenario.max_delay)  # what is on its way arrives
        for session in pipeline.sessions:
            await system.kill(session)
        check_dead_letters(pipeline, scenario, letters)
    outcome.log = pipeline.log
    outcome.ids = [answer.ids for answer in answers]
    outcome.ends = [str(answer.end) for answer in answers]
    outcome.ended_at = [answer.ended_at for answer in answers]
    return outcome


async def live(pipeline: SimulatedPipeline, life: Life, number: int, answers: list[Answer]) -> None:
    """Submit a request and abort it when its time has come, or after its end."""
    await asyncio.sleep(life.arrival)
    answer = answers[number] = pipeline.submit(
        prompt_of(life, number), life.count, priority=life.priority, deadline_s=life.deadline
    )
    began = asyncio.get_running_loop().time()
    for moment in sorted(life.aborts, key=lambda moment: 1e9 if moment is None else moment):
        if moment is None:
            await answer.done.wait()
        elif moment > 0:
            await asyncio.sleep(max(0.0, began + moment - asyncio.get_running_loop().time()))
        pipeline.abort(answer)
    await answer.done.wait()


async def disturb(pipeline: SimulatedPipeline, scenario: Scenario) -> None:
    """Envelopes of an old epoch."""
    generator = random.Random(scenario.seed)
    for seq in range(scenario.stale):
        await asyncio.sleep(generator.random())
        generator.choice(pipeline.log_links).send(Step(epoch=0, seq=seq, slot=0, segments=()))


async def lose_stages(pipeline: SimulatedPipeline, scenario: Scenario) -> None:
    """Stages die, and come back in another epoch, but for the last one."""
    for moment, stage, downtime in scenario.losses:
        await asyncio.sleep(moment)
        await pipeline.system.kill(pipeline.sessions[stage % scenario.stages])
        await asyncio.sleep(NOTICED_S)
        await pipeline.next_epoch(downtime)
    if scenario.death is not None:
        moment, stage = scenario.death
        await asyncio.sleep(moment)
        await pipeline.system.kill(pipeline.sessions[stage % scenario.stages])
        await asyncio.sleep(NOTICED_S)
        pipeline.coordinator[Coordinator.control].tell_nowait(GiveUp(StageFailedError("a stage died")))


def prompt_of(life: Life, number: int) -> tuple[int, ...]:
    generator = random.Random(1000 * number + life.length)
    return tuple(generator.randrange(1000) for _ in range(life.length))


def count_states(pipeline: SimulatedPipeline, seen: Counter[str]) -> None:
    """In which state aborts and deadlines meet a request; an abort of an aborted one has a state of its own."""
    aborted: set[int] = set()

    def counting(kind: str, end: Callable[..., None]) -> Callable[..., None]:
        def counted(request: Request, *error: Exception) -> None:
            state = state_of(pipeline, request)
            seen[f"{kind}, {'aborted' if state == 'ended' and request.rid in aborted else state}"] += 1
            if kind == "abort" and state != "ended":
                aborted.add(request.rid)
            end(request, *error)

        return counted

    scheduler = pipeline.scheduler
    scheduler.abort = counting("abort", scheduler.abort)  # type: ignore[method-assign]
    scheduler.fail = counting("deadline", scheduler.fail)  # type: ignore[method-assign]


def check_bounds(pipeline: SimulatedPipeline) -> None:
    """With every log entry: window, token budget, running and waiting requests, pages."""
    scheduler, write = pipeline.scheduler, pipeline.write
    config = scheduler.config

    def checked(entry: LogEntry) -> None:
        assert entry.epoch == pipeline.epoch
        assert not pipeline.down
        assert len(scheduler.in_flight) <= config.window
        assert len(scheduler.running) <= config.max_running_requests
        assert len(scheduler.waiting) <= config.max_queued_requests + config.max_running_requests
        owned = [page for request in scheduler.running.values() for page in request.pages]
        assert len(owned) == len(set(owned)) == scheduler.pool.used_pages <= config.num_pages
        if isinstance(entry, Step):
            assert entry.num_tokens <= config.max_num_batched_tokens
        write(entry)

    pipeline.write = checked  # type: ignore[method-assign]


def check_end(life: Life, answer: Answer, *, number: int, died: bool) -> None:
    expected = expected_ids(prompt_of(life, number), life.count)
    assert tuple(answer.ids) == expected[: len(answer.ids)]
    match answer.end:
        case "length":
            assert len(answer.ids) == life.count
        case "abort":
            assert life.aborts
        case DeadlineExceededError():
            assert life.deadline is not None
            assert answer.ended_at >= life.arrival + life.deadline
        case StageFailedError():
            assert died
        case OverloadedError():
            assert not answer.ids
        case other:
            raise AssertionError(other)
    if life.deadline is not None:
        assert answer.ended_at <= life.arrival + life.deadline + 1e-6


def check_dead_letters(pipeline: SimulatedPipeline, scenario: Scenario, letters: list[DeadLetter]) -> None:
    """Every log entry that reached a stage was applied or is a dead letter; one at most was in hand as it ended."""
    for stage, host in enumerate(pipeline.hosts):
        applied = pipeline.applied[stage] + host.applied + (scenario.death is None)
        left = sum(letter.actor == f"stage-{stage}" and letter.inbox == "log" for letter in letters)
        in_hand = pipeline.arrived[stage] - applied - left
        assert 0 <= in_hand <= len(scenario.losses) + (scenario.death is not None)
    assert pipeline.stale == scenario.stale
    if (
        scenario.death is None and not scenario.losses
    ):  # what fed a segment that never came may find the first stage gone
        assert all((letter.actor, letter.inbox) == ("stage-0", "output") for letter in letters)


def check_scenario(scenario: Scenario, seen: Counter[str]) -> None:
    """Play it twice: every check holds, and the same seed gives the same plan, ids and times."""
    first, second = (run(partial(play, scenario, states), seed=scenario.seed) for states in (seen, Counter[str]()))
    assert msgspec.msgpack.encode(first.log) == msgspec.msgpack.encode(second.log)
    assert (first.ids, first.ends, first.ended_at) == (second.ids, second.ends, second.ended_at)


@settings(max_examples=150, deadline=None)
@given(scenario=scenarios)
def test_every_request_ends_once_whatever_happens_to_it(scenario: Scenario) -> None:
    check_scenario(scenario, Counter())


def drawn(number: int) -> Scenario:
    """One of a fixed series of scenarios. Hypothesis will not do where every state must have been met: what it tries
    depends on the modules that are loaded."""
    generator = random.Random(number)

    def life() -> Life:
        return Life(
            arrival=generator.uniform(0, 8),
            length=generator.randint(1, 150),
            count=generator.randint(1, 12),
            priority=generator.randint(-2, 2),
            deadline=generator.choice([None, generator.uniform(0, 12)]),
            aborts=tuple(generator.choices([None, 0.0, generator.uniform(0, 8)], k=generator.randint(0, 2))),
        )

    return Scenario(
        seed=number,
        stages=generator.randint(1, 4),
        depth=generator.randint(0, 3),
        lookahead=generator.randint(1, 2),
        chunk=generator.choice([1, 16, 64]),
        pages=generator.randint(12, 60),
        running=generator.randint(1, 4),
        queued=generator.randint(0, 6),
        max_delay=generator.choice([0.0, 0.05, 1.0]),
        lives=tuple(life() for _ in range(generator.randint(1, 8))),
        stale=generator.randint(0, 3),
        losses=tuple(
            (generator.uniform(0, 4), generator.randint(0, 3), generator.uniform(0, 3))
            for _ in range(generator.choice([0, 0, 1, 3]))
        ),
        death=generator.choice([None, (generator.uniform(0, 8), generator.randint(0, 3))]),
    )


def test_aborts_and_deadlines_meet_requests_in_every_state() -> None:
    seen: Counter[str] = Counter()
    for number in range(150):
        check_scenario(drawn(number), seen)
    wanted = {f"abort, {state}" for state in {*STATES, "aborted", "ended"}}
    wanted |= {f"deadline, {state}" for state in STATES - {"unseen"}}
    assert wanted <= set(seen), seen
