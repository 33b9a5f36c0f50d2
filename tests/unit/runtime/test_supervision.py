"""Restarts: who, how often, when; what becomes of messages; escalation and death watch."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorpp.errors import ActorDefinitionError, ActorError, ActorRestartedError, ConfigError
from actorpp.runtime import (
    Actor,
    ActorRef,
    ActorSystem,
    Inbox,
    OneForAll,
    OneForOne,
    Request,
    RestForOne,
    Strategy,
    Terminated,
)
from actorpp.testing import run
from tests.unit.runtime.support import Boom, Double, Factory, Fail, Hold, Note, Recorder, Seen


async def crash(ref: ActorRef) -> None:
    """Crash a Recorder, and let its supervisor act."""
    ref[Recorder.control].tell_nowait(Fail())
    await asyncio.sleep(0.001)


def test_a_restart_makes_a_new_actor_behind_the_same_ref() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            factory = Factory()
            ref = await system.spawn(factory, supervision=OneForOne())
            await ref[Recorder.data].tell(Note(1))
            await asyncio.sleep(1)
            await crash(ref)
            await ref[Recorder.data].tell(Note(2))
            await asyncio.sleep(1)
            assert [actor.seen for actor in factory.made] == [[1], [2]]
            assert (ref.restarts, ref.alive) == (1, True)

    run(main)


def test_the_message_in_hand_is_never_run_again_and_the_queue_is_accounted_for() -> None:
    """ray#11990: queued messages vanished in a restart. Here they become dead letters, and their asks fail."""

    async def main() -> None:
        async with ActorSystem() as system:
            factory = Factory()
            ref = await system.spawn(factory, supervision=OneForOne())
            address = ref[Recorder.data]
            address.tell_nowait(Fail())
            address.tell_nowait(Note(1))
            queued = asyncio.create_task(address.ask(Double(1)))
            await asyncio.sleep(1)
            with pytest.raises(ActorRestartedError) as caught:
                await queued
            assert isinstance(caught.value.__cause__, Boom)
            assert ref.restarts == 1
            assert [(letter.reason, letter.message) for letter in system.dead_letters.recent] == [
                ("restarted", Note(1))
            ]
            assert [actor.seen for actor in factory.made] == [[], []]

    run(main)


def test_a_sender_that_waited_for_room_reaches_the_new_actor() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            factory = Factory()
            ref = await system.spawn(factory, capacity={Recorder.data: 1}, supervision=OneForOne())
            hold = asyncio.create_task(ref[Recorder.data].ask(Hold()))
            await factory.last.holding.wait()
            await ref[Recorder.data].tell(Note(1))
            blocked = asyncio.create_task(ref[Recorder.data].tell(Note(2)))
            await asyncio.sleep(1)
            await crash(ref)
            with pytest.raises(ActorRestartedError):
                await hold
            await blocked
            await asyncio.sleep(1)
            assert factory.last.seen == [2]

    run(main)


def test_restart_intensity() -> None:
    """Three restarts in ten seconds are allowed; older ones do not count."""

    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Recorder, name="r", supervision=OneForOne(max_restarts=3, within=10))
            joined = asyncio.create_task(ref.join())
            for _ in range(3):
                await crash(ref)
            await asyncio.sleep(11)
            for _ in range(3):
                await crash(ref)
            assert ref.alive
            await crash(ref)
            error = (await joined).error
            assert isinstance(error, Boom)
            assert error.__notes__ == ["actor 'r' was restarted 3 times within 10 s: no more"]

    run(main)


def test_backoff_doubles_up_to_its_limit() -> None:
    times: list[float] = []

    class Timed(Recorder):
        async def started(self) -> None:
            times.append(asyncio.get_running_loop().time())

    async def main() -> None:
        strategy = OneForOne(max_restarts=5, within=1000, backoff=1, max_backoff=4)
        async with ActorSystem() as system:
            ref = await system.spawn(Timed, supervision=strategy)
            for _ in range(4):
                ref[Recorder.control].tell_nowait(Fail())
                await asyncio.sleep(10)

    run(main)
    assert [after % 10 for after in times] == [0, 1, 2, 4, 4]


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_an_end_cuts_the_backoff_short(how: str) -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Recorder, supervision=OneForOne(backoff=1000, max_backoff=1000))
            await crash(ref)
            await ref[Recorder.data].tell(Note(1))  # kept for the next incarnation, which does not come
            ended = await (system.stop(ref) if how == "stop" else system.kill(ref))
            assert ended.error is None
            assert ended.reason == ("stopped" if how == "stop" else "killed")
            assert system.dead_letters.by_reason == {"stopped": 1}
        assert asyncio.get_running_loop().time() < 1

    run(main)


@pytest.mark.parametrize(
    ("strategy", "restarts"),
    [
        (OneForOne(), {"a": 0, "b": 1, "c": 0}),
        (OneForAll(), {"a": 1, "b": 1, "c": 1}),
        (RestForOne(), {"a": 0, "b": 1, "c": 1}),
    ],
)
def test_group_strategies(strategy: Strategy, restarts: dict[str, int]) -> None:
    order: list[str] = []

    class Member(Recorder):
        async def started(self) -> None:
            order.append(f"+{self.name}")

        async def stopping(self) -> None:
            order.append(f"-{self.name}")

    async def main() -> None:
        async with ActorSystem() as system:
            group = await system.spawn_group(dict.fromkeys("abc", Member), supervision=strategy)
            asks = {name: asyncio.create_task(ref[Recorder.data].ask(Hold())) for name, ref in group.items()}
            await asyncio.sleep(1)
            order.clear()
            await crash(group["b"])
            assert {name: ref.restarts for name, ref in group.items()} == restarts
            for name, count in restarts.items():
                assert asks[name].done() == bool(count)
                if count:
                    assert isinstance(asks[name].exception(), ActorRestartedError)
            downs = [event for event in order if event[0] == "-"]
            ups = [event for event in order if event[0] == "+"]
            assert order == downs + ups
            assert ups == [f"+{name}" for name, count in restarts.items() if count]
            await asyncio.gather(*(system.kill(ref) for ref in group.values()))
            await asyncio.gather(*asks.values(), return_exceptions=True)

    run(main)


def test_a_group_that_gives_up_ends_whole() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            group = await system.spawn_group(dict.fromkeys("abc", Recorder), supervision=OneForAll(max_restarts=1))
            ends = [asyncio.create_task(ref.join()) for ref in group.values()]
            await crash(group["a"])
            await crash(group["c"])
            assert [(await end).reason for end in ends] == ["killed", "killed", "crashed"]

    run(main)


def test_a_restart_that_fails_counts_as_a_crash() -> None:
    class Flaky(Recorder):
        made = 0

        async def started(self) -> None:
            Flaky.made += 1
            if 1 < Flaky.made < 4:
                raise Boom("not yet")

    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Flaky, supervision=OneForOne(max_restarts=3))
            await crash(ref)
            await asyncio.sleep(1)
            assert ref.restarts == 3
            assert await ref[Recorder.control].ask(Seen()) == []

    run(main)


def test_a_child_ends_with_its_parent_and_crashes_it() -> None:
    class Parent(Recorder):
        async def started(self) -> None:
            self.child = await self.spawn(Recorder, name="child")

    async def main() -> None:
        async with ActorSystem() as system:
            parent = await system.spawn(Parent, name="parent", supervision=OneForOne())
            first = system.get("child")
            await crash(first)
            await asyncio.sleep(1)
            assert parent.restarts == 1  # the child's crash went up to it, and a new parent made a new child
            second = system.get("child")
            assert (first.alive, second.alive) == (False, True)
            await system.stop(parent)
            assert not second.alive

    run(main)


def test_death_watch() -> None:
    class Guardian(Actor):
        deaths = Inbox[Terminated](capacity=1)

        def __init__(self) -> None:
            self.seen: list[Terminated] = []

        @deaths.handler
        async def on_death(self, message: Terminated) -> None:
            self.seen.append(message)

    async def main() -> list[Terminated]:
        async with ActorSystem() as system:
            guardian = Guardian()
            deaths = (await system.spawn(lambda: guardian))[Guardian.deaths]
            refs = [await system.spawn(Recorder) for _ in range(3)]
            for ref in refs:
                guardian.watch(ref, deaths)
            await crash(refs[0])
            await asyncio.gather(system.stop(refs[1]), system.kill(refs[2]))  # more than its inbox holds
            guardian.watch(refs[1], guardian.deaths.address)  # one that is dead already
            await asyncio.sleep(1)
            assert [notice.ref for notice in guardian.seen[:1]] == refs[:1]
            return guardian.seen

    reasons = [(notice.reason, type(notice.error)) for notice in run(main)]
    assert reasons[0] == ("crashed", Boom)
    assert sorted(reason for reason, _ in reasons) == ["crashed", "killed", "stopped", "stopped"]


def test_a_factory_that_fails_counts_as_a_crash_and_ends_nothing_twice() -> None:
    stopped: list[int] = []

    class Member(Recorder):
        async def stopping(self) -> None:
            stopped.append(self.ref.restarts)

    makers = iter([Member, None, Member])

    def make() -> Member:
        maker = next(makers)
        if maker is None:
            raise Boom("no actor today")
        return maker()

    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(make, supervision=OneForOne())
            await crash(ref)
            await asyncio.sleep(1)
            assert (ref.restarts, stopped) == (2, [0])
        assert stopped == [0, 2]

    run(main)


def test_a_factory_must_make_the_same_class() -> None:
    made = iter([Recorder, Actor])

    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(lambda: next(made)(), supervision=OneForOne(max_restarts=1))
            joined = asyncio.create_task(ref.join())
            await crash(ref)
            assert isinstance((await joined).error, ActorDefinitionError)

    run(main)


@pytest.mark.parametrize("wrong", [{"max_restarts": -1}, {"within": 0}, {"backoff": -1}])
def test_strategies_check_their_numbers(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        OneForOne(**wrong)  # type: ignore[arg-type]


class Job(Request[int], frozen=True):
    """A unit of work with a number of its own."""

    n: int
    fails: bool = False


class Accountant(Actor):
    """Notes which jobs were delivered, over all incarnations."""

    jobs = Inbox[Job](capacity=6)

    def __init__(self, delivered: list[int]) -> None:
        self.delivered = delivered

    @jobs.handler
    async def on_job(self, job: Job) -> int:
        self.delivered.append(job.n)
        await asyncio.sleep(0.1)
        if job.fails:
            raise Boom
        return job.n


@settings(max_examples=40, deadline=None)
@given(
    actions=st.lists(
        st.sampled_from(["tell", "ask", "impatient ask", "failing tell", "failing ask", "pause"]), max_size=40
    ),
    end=st.sampled_from(["stop", "overtaking stop", "kill"]),
)
def test_every_message_is_delivered_failed_or_a_dead_letter(actions: list[str], end: str) -> None:
    """ray#11990, protoactor-dotnet#474: whatever happens, the sum matches."""

    async def main() -> None:
        delivered: list[int] = []
        asks: dict[int, asyncio.Task[int]] = {}
        tells: dict[int, asyncio.Task[None]] = {}
        async with ActorSystem() as system:
            strategy = OneForOne(max_restarts=1000, backoff=0.05)
            ref = await system.spawn(lambda: Accountant(delivered), supervision=strategy)
            address = ref[Accountant.jobs]
            for n, action in enumerate(actions):
                job = Job(n, fails=action.startswith("failing"))
                if action == "pause":
                    await asyncio.sleep(0.17)
                elif "ask" in action:
                    asks[n] = asyncio.create_task(address.ask(job, timeout=0.25 if action == "impatient ask" else None))
                else:
                    tells[n] = asyncio.create_task(address.tell(job))
            if end == "kill":
                await system.kill(ref)
            else:
                await system.stop(ref, drain=end == "stop", grace=1000)
            outcomes = await asyncio.gather(*asks.values(), return_exceptions=True)
            await asyncio.gather(*tells.values(), return_exceptions=True)
            dead = [letter.message.n for letter in system.dead_letters.recent if isinstance(letter.message, Job)]
        failed = {n for n, outcome in zip(asks, outcomes, strict=True) if isinstance(outcome, ActorError)}
        assert len(set(delivered)) == len(delivered), "a job was run twice"
        assert len(set(dead)) == len(dead)
        assert not set(dead) & set(delivered)
        assert set(delivered) | set(dead) | failed == asks.keys() | tells.keys()
        assert all(outcome == n or n in failed for n, outcome in zip(asks, outcomes, strict=True))

    run(main)


def test_a_restart_that_hangs_does_not_hold_up_the_end_of_others() -> None:
    class Hesitant(Recorder):
        async def started(self) -> None:
            if self.ref.restarts:
                await asyncio.sleep(1000)

    async def main() -> None:
        async with ActorSystem() as system:
            group = await system.spawn_group({"a": Hesitant, "b": Recorder, "c": Recorder}, supervision=OneForAll())
            await crash(group["c"])
            assert [ref.restarts for ref in group.values()] == [1, 0, 0]  # b and c wait for a
            await system.stop(group["b"], grace=1)
            await system.kill(group["c"], grace=1)
            assert asyncio.get_running_loop().time() < 1
            await system.kill(group["a"])

    run(main)


def test_a_crash_of_a_supervised_actor_while_it_stops_is_final() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Recorder, supervision=OneForOne())
            ref[Recorder.data].tell_nowait(Fail())
            ref[Recorder.data].tell_nowait(Note(1))
            ended = await system.stop(ref)
            assert (ended.reason, type(ended.error), ref.restarts) == ("crashed", Boom, 0)
            assert system.dead_letters.by_reason == {"stopped": 1}

    run(main)
