"""Which handler runs when: priorities, the control lane, fairness, postponing."""

from __future__ import annotations

import asyncio

import pytest

from actorpp.errors import ActorDefinitionError
from actorpp.runtime import POSTPONE, Actor, ActorSystem, Inbox, Postpone
from actorpp.testing import run
from tests.unit.runtime.support import Factory, Fail, Hold, Note, Recorder, Seen


def test_control_is_handled_while_the_main_task_waits() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            factory = Factory()
            ref = await system.spawn(factory)
            await ref[Recorder.data].tell(Note(1))
            hold = asyncio.create_task(ref[Recorder.data].ask(Hold()))
            await factory.last.holding.wait()
            await ref[Recorder.data].tell(Note(2))
            assert await ref[Recorder.control].ask(Seen()) == [1]
            factory.last.gate.set()
            assert await hold == 1

    run(main)


def test_control_overtakes_a_backlog_whose_handlers_never_wait() -> None:
    """cases: what concerns control must not stand behind 10,000 messages."""

    async def main() -> list[int]:
        async with ActorSystem() as system:
            ref = await system.spawn(Recorder, capacity={Recorder.data: 10_000})
            for n in range(10_000):
                ref[Recorder.data].tell_nowait(Note(n))
            return await ref[Recorder.control].ask(Seen())

    assert len(run(main)) == 0


def test_control_goes_between_two_messages_of_a_running_backlog() -> None:
    class Busy(Recorder):
        async def on_data(self, message: object) -> None:
            assert isinstance(message, Note)
            self.seen.append(message.n)
            if message.n == 5:
                self.ref[Recorder.control].tell_nowait(Seen())

        def on_control(self, message: object) -> list[int]:
            self.seen.append(-1)
            return self.seen

    async def main() -> list[int]:
        async with ActorSystem() as system:
            factory = Factory(Busy)
            ref = await system.spawn(factory)
            for n in range(10):
                ref[Recorder.data].tell_nowait(Note(n))
            await system.stop(ref)
            return factory.last.seen

    assert run(main) == [0, 1, 2, 3, 4, 5, -1, 6, 7, 8, 9]


class Lanes(Actor):
    """Three data lanes; the order of service is what is tested."""

    low = Inbox[Note](capacity=1000, priority=9)
    middle = Inbox[Note](capacity=1000, priority=5)
    high = Inbox[Note](capacity=1000)

    def __init__(self) -> None:
        self.order: list[str] = []
        self.running = 0

    async def serve(self, lane: str) -> None:
        assert self.running == 0, "a handler was entered while another one ran"
        self.running += 1
        await asyncio.sleep(0.001)
        self.running -= 1
        self.order.append(lane)

    @high.handler
    async def on_high(self, message: Note) -> None:
        await self.serve("high")

    @middle.handler
    async def on_middle(self, message: Note) -> None:
        await self.serve("middle")

    @low.handler
    async def on_low(self, message: Note) -> None:
        await self.serve("low")


def test_lanes_go_by_priority_and_the_lowest_gets_one_in_65() -> None:
    async def main() -> list[str]:
        async with ActorSystem() as system:
            actor = Lanes()
            ref = await system.spawn(lambda: actor)
            for n in range(200):
                ref[Lanes.low].tell_nowait(Note(n))
                ref[Lanes.high].tell_nowait(Note(n))
            ref[Lanes.middle].tell_nowait(Note(0))
            await system.stop(ref, grace=100)
            return actor.order

    order = run(main)
    assert order[:65] == ["high"] * 64 + ["low"]
    assert order[65:130] == ["high"] * 64 + ["low"]
    assert order[130:195] == ["high"] * 64 + ["low"]
    assert order[195:204] == ["high"] * 8 + ["middle"]
    assert len(order) == 401


class Landing(Actor):
    """A plain def handler on a data inbox, and a run() that waits for what it files."""

    data = Inbox[Note](capacity=100)

    def __init__(self) -> None:
        self.landed: list[int] = []
        self.used: list[int] = []

    @data.handler
    def on_data(self, message: Note) -> None:
        self.landed.append(message.n)
        self.notify()

    async def run(self) -> None:
        for n in range(4):
            await self.until(lambda n=n: n in self.landed)  # type: ignore[misc]
            self.used.append(n)


def test_plain_handlers_of_data_run_in_order_of_arrival_while_run_waits() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            actor = Landing()
            ref = await system.spawn(lambda: actor)
            for n in (3, 1, 0):
                await ref[Landing.data].tell(Note(n))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert actor.landed == [3, 1, 0]
            assert actor.used == [0, 1]
            await ref[Landing.data].tell(Note(2))
            assert (await ref.join()).reason == "finished"
            assert actor.used == [0, 1, 2, 3]

    run(main)


def test_control_goes_before_plain_handlers_of_data() -> None:
    class Both(Actor):
        data = Inbox[Note](capacity=100)
        control = Inbox[Note](capacity=1, priority=0)

        def __init__(self) -> None:
            self.order: list[int] = []

        @data.handler
        def on_data(self, message: Note) -> None:
            self.order.append(message.n)

        @control.handler
        def on_control(self, message: Note) -> None:
            self.order.append(-1)

    async def main() -> list[int]:
        async with ActorSystem() as system:
            actor = Both()
            ref = await system.spawn(lambda: actor)
            for n in range(100):
                ref[Both.data].tell_nowait(Note(n))
            ref[Both.control].tell_nowait(Note(0))
            await system.stop(ref)
            return actor.order

    assert run(main) == [-1, *range(100)]


def test_a_busy_actor_lets_the_loop_run() -> None:
    async def main() -> int:
        async with ActorSystem() as system:
            factory = Factory()
            ref = await system.spawn(factory, capacity={Recorder.data: 10_000})
            for n in range(10_000):
                ref[Recorder.data].tell_nowait(Note(n))
            turns = 0
            while len(factory.last.seen) < 10_000:
                await asyncio.sleep(0)
                turns += 1
            return turns

    assert run(main) > 100


def test_stop_drains_plain_handlers_before_a_wait_gives_up() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            actor = Landing()
            ref = await system.spawn(lambda: actor)
            for n in range(4):
                ref[Landing.data].tell_nowait(Note(n))
            assert (await system.stop(ref)).reason == "stopped"
            assert actor.used == [0, 1, 2, 3]

    run(main)


@pytest.mark.parametrize("waits", [True, False])
def test_an_actor_that_stops_itself_still_gets_what_is_on_its_way(waits: bool) -> None:
    class Last(Landing):
        async def run(self) -> None:
            self.ref[Landing.data].tell_nowait(Note(7))
            self.stop()
            if waits:
                await self.until(lambda: 7 in self.landed)
                self.used.append(7)

    async def main() -> Landing:
        async with ActorSystem() as system:
            actor = Last()
            await (await system.spawn(lambda: actor)).join()
            assert system.dead_letters.count == 0
            return actor

    actor = run(main)
    assert actor.landed == [7]
    assert actor.used == ([7] if waits else [])


class Turnstile(Actor):
    """Locked, it postpones notes; the control message opens it."""

    control = Inbox[Seen](capacity=1, priority=0)
    data = Inbox[Note](capacity=4)

    def __init__(self) -> None:
        self.seen: list[int] = []

    async def started(self) -> None:
        self.become(Turnstile.data, self.locked)

    @control.handler
    def on_control(self, message: Seen) -> list[int]:
        self.become(Turnstile.data, self.on_data)
        return self.seen

    @data.handler
    async def on_data(self, message: Note) -> None:
        self.seen.append(message.n)

    async def locked(self, message: Note) -> Postpone:
        return POSTPONE


def test_postponed_messages_are_retried_in_order_of_arrival_after_become() -> None:
    async def main() -> list[int]:
        async with ActorSystem() as system:
            actor = Turnstile()
            ref = await system.spawn(lambda: actor)
            for n in range(3):
                await ref[Turnstile.data].tell(Note(n))
            await asyncio.sleep(1)
            assert len(actor.data) == 3  # they keep their places
            await ref[Turnstile.control].ask(Seen())
            await ref[Turnstile.data].tell(Note(3))
            await system.stop(ref)
            return actor.seen

    assert run(main) == [0, 1, 2, 3]


def test_postponed_messages_are_bounded_and_dead_letters_at_the_end() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Turnstile)
            for n in range(4):
                await ref[Turnstile.data].tell(Note(n))
            blocked = asyncio.create_task(ref[Turnstile.data].tell(Note(4)))
            await asyncio.sleep(1)
            assert not blocked.done()
            await system.kill(ref)
            await asyncio.wait([blocked])
            assert blocked.exception() is not None
            assert system.dead_letters.by_reason == {"stopped": 5}

    run(main)


def test_become_refuses_a_handler_of_another_kind() -> None:
    class Wrong(Turnstile):
        async def started(self) -> None:
            with pytest.raises(ActorDefinitionError, match="serial"):
                self.become(Turnstile.data, lambda note: None)

    async def main() -> None:
        async with ActorSystem() as system:
            await system.spawn(Wrong)

    run(main)


def test_control_cannot_be_postponed() -> None:
    class Wrong(Recorder):
        def on_control(self, message: object) -> object:  # type: ignore[override]
            return POSTPONE

    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Wrong)
            ref[Recorder.control].tell_nowait(Fail())
            ended = await ref.join()
            assert isinstance(ended.error, ActorDefinitionError)

    run(main)


def test_nothing_is_handled_before_started_has_returned() -> None:
    class Slow(Recorder):
        async def started(self) -> None:
            self.ref[Recorder.control].tell_nowait(Seen())
            self.ref[Recorder.data].tell_nowait(Note(1))
            await asyncio.sleep(1)
            self.seen.append(0)

        def on_control(self, message: object) -> list[int]:
            self.seen.append(-1)
            return self.seen

    async def main() -> list[int]:
        async with ActorSystem() as system:
            factory = Factory(Slow)
            ref = await system.spawn(factory)
            await system.stop(ref)
            return factory.last.seen

    assert run(main) == [0, -1, 1]


def test_only_one_task_dispatches() -> None:
    class Two(Recorder):
        async def run(self) -> None:
            self.start(self.dispatch())
            await asyncio.sleep(1)
            with pytest.raises(ActorDefinitionError, match="dispatches already"):
                await self.dispatch()

    async def main() -> None:
        async with ActorSystem() as system:
            assert (await (await system.spawn(Two)).join()).error is None

    run(main)
