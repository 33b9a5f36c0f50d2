"""How actors end: stop, kill, run() returning, the end of the system; and what is left of their messages."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import NoReturn

import pytest

from actorpp.errors import ActorDefinitionError, ActorStoppedError, DeadlockError
from actorpp.runtime import Actor, ActorSystem, Inbox, OneForOne
from actorpp.runtime.cell import Cell
from actorpp.testing import run
from tests.unit.runtime.support import Boom, Double, Factory, Fail, Hold, Note, Recorder, Seen


def test_stop_handles_what_is_queued_and_refuses_the_rest() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            factory = Factory()
            ref = await system.spawn(factory)
            hold = asyncio.create_task(ref[Recorder.data].ask(Hold()))
            await factory.last.holding.wait()
            for n in range(3):
                await ref[Recorder.data].tell(Note(n))
            stop = asyncio.create_task(system.stop(ref))
            await asyncio.sleep(1)
            with pytest.raises(ActorStoppedError):
                await ref[Recorder.data].tell(Note(3))
            assert await ref[Recorder.control].ask(Seen()) == []  # control answers until the end
            factory.last.gate.set()
            ended = await stop
            assert (ended.reason, ended.error, ended.ref) == ("stopped", None, ref)
            assert await hold == 1
            assert factory.last.seen == [0, 1, 2]
            assert [letter.message for letter in system.dead_letters.recent] == [Note(3)]
            assert not ref.alive

    run(main)


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_ending_overtakes_ten_thousand_messages(how: str) -> None:
    """Thespian#58, pykka#46: the end must not stand in the queue behind the backlog."""

    async def main() -> None:
        async with ActorSystem() as system:
            factory = Factory()
            ref = await system.spawn(factory, capacity={Recorder.data: 10_001})
            hold = asyncio.create_task(ref[Recorder.data].ask(Hold()))
            await factory.last.holding.wait()
            for n in range(9_999):
                ref[Recorder.data].tell_nowait(Note(n))
            queued = asyncio.create_task(ref[Recorder.data].ask(Double(1)))
            await asyncio.sleep(0)
            factory.last.gate.set()
            ended = await (system.stop(ref, drain=False) if how == "stop" else system.kill(ref))
            assert ended.reason == ("stopped" if how == "stop" else "killed")
            assert factory.last.seen == []
            assert system.dead_letters.by_reason == {"stopped": 9_999}
            with pytest.raises(ActorStoppedError):
                await queued
            if how == "stop":
                assert await hold == 1  # the message in hand is finished
            else:
                with pytest.raises(ActorStoppedError):
                    await hold

    run(main)


def test_a_stop_that_takes_longer_than_its_grace_becomes_a_kill() -> None:
    async def main() -> float:
        async with ActorSystem() as system:
            factory = Factory()
            ref = await system.spawn(factory)
            hold = asyncio.create_task(ref[Recorder.data].ask(Hold()))
            await factory.last.holding.wait()
            clock = asyncio.create_task(asyncio.sleep(100))  # a guard timer alone would be a deadlock
            assert (await system.stop(ref, grace=5)).reason == "killed"
            with pytest.raises(ActorStoppedError):
                await hold
            clock.cancel()
            await asyncio.wait([clock])
            return asyncio.get_running_loop().time()

    assert run(main) == 5


class Careful(Actor):
    """Notes the order of its life."""

    data = Inbox[Note](capacity=1)

    def __init__(self, journal: list[str]) -> None:
        self.journal = journal

    async def started(self) -> None:
        self.journal.append("started")

    async def run(self) -> None:
        self.start(self.child())
        try:
            await self.data.next()
        finally:
            self.journal.append("run ended")

    async def child(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.journal.append("child ended")

    async def stopping(self) -> None:
        self.journal.append("stopping")


@pytest.mark.parametrize("how", ["finish", "stop", "kill"])
def test_lifecycle_order(how: str) -> None:
    async def main() -> list[str]:
        journal: list[str] = []
        async with ActorSystem() as system:
            ref = await system.spawn(lambda: Careful(journal))
            await asyncio.sleep(1)
            if how == "finish":
                await ref[Careful.data].tell(Note(1))
                assert (await ref.join()).reason == "finished"
            else:
                await (system.stop(ref) if how == "stop" else system.kill(ref))
        return journal

    assert run(main) == ["started", "run ended", "child ended", "stopping"]


def test_an_actor_may_stop_itself_but_not_wait_for_it() -> None:
    class Tired(Recorder):
        async def on_data(self, message: object) -> None:
            with pytest.raises(DeadlockError):
                await self.system.stop(self.ref)
            self.seen.append(len(self.seen))
            self.stop()

    async def main() -> list[int]:
        async with ActorSystem() as system:
            factory = Factory(Tired)
            ref = await system.spawn(factory)
            for n in range(3):
                ref[Recorder.data].tell_nowait(Note(n))
            assert (await ref.join()).reason == "stopped"
            return factory.last.seen

    assert run(main) == [0, 1, 2]


def test_the_end_of_the_system_stops_the_last_spawned_first() -> None:
    order: list[str] = []

    class Member(Recorder):
        async def stopping(self) -> None:
            order.append(self.name)

    async def main() -> None:
        async with ActorSystem() as system:
            for name in "abc":
                await system.spawn(Member, name=name)

    run(main)
    assert order == ["c", "b", "a"]


def test_an_error_in_the_body_kills_all_and_comes_out_as_it_is() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            factory = Factory()
            ref = await system.spawn(factory)
            ref[Recorder.data].tell_nowait(Hold())
            await factory.last.holding.wait()
            raise Boom

    with pytest.raises(Boom):
        run(main)


def test_a_crash_that_nobody_handles_ends_the_body_with_a_group() -> None:
    async def main() -> None:
        async with ActorSystem("pipeline") as system:
            ref = await system.spawn(Recorder)
            ref[Recorder.data].tell_nowait(Fail("broken"))
            await asyncio.Event().wait()  # cancelled by the crash

    with pytest.raises(ExceptionGroup, match="actors of pipeline crashed") as caught:
        run(main)
    assert caught.group_contains(Boom, match="broken", depth=1)

    async def owner() -> int:
        with pytest.raises(ExceptionGroup):
            await main()
        await asyncio.sleep(1)  # goes on as if nothing had cancelled it
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    assert run(owner) == 0


def test_a_crash_and_an_error_of_the_body_come_out_together() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Recorder)
            ref[Recorder.data].tell_nowait(Fail())
            try:
                await asyncio.Event().wait()
            finally:
                raise ValueError("while cleaning up")

    with pytest.raises(ExceptionGroup) as caught:
        run(main)
    assert caught.group_contains(Boom)
    assert caught.group_contains(ValueError)


def test_a_crash_while_stopping_is_reported_too() -> None:
    class Bad(Recorder):
        async def stopping(self) -> None:
            raise Boom("in stopping")

    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Bad)
            assert (await system.stop(ref)).reason == "crashed"

    with pytest.raises(ExceptionGroup) as caught:
        run(main)
    assert caught.group_contains(Boom, match="in stopping")


def test_a_crash_that_is_joined_is_handled() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Recorder)
            joined = asyncio.create_task(ref.join())
            await asyncio.sleep(0)
            ref[Recorder.data].tell_nowait(Fail())
            ended = await joined
            assert (ended.reason, type(ended.error)) == ("crashed", Boom)

    run(main)


def test_cancelling_the_owner_ends_the_actors() -> None:
    async def main() -> None:
        ended: list[str] = []

        class Member(Recorder):
            async def stopping(self) -> None:
                ended.append(self.name)

        async def owner() -> None:
            async with ActorSystem() as system:
                await system.spawn(Member, name="m")
                await asyncio.Event().wait()

        task = asyncio.create_task(owner())
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert ended == ["m"]

    run(main)


def test_errors_of_factory_and_started_come_out_of_spawn() -> None:
    class NotReady(Recorder):
        async def started(self) -> None:
            raise Boom("not ready")

    def broken() -> NoReturn:
        raise Boom("no actor")

    async def main() -> None:
        async with ActorSystem() as system:
            with pytest.raises(Boom, match="not ready"):
                await system.spawn(NotReady, name="x")
            with pytest.raises(Boom, match="no actor"):
                await system.spawn(broken, name="x")
            await system.spawn(Recorder, name="x")  # the name is free again
            with pytest.raises(ActorDefinitionError, match="already"):
                await system.spawn(Recorder, name="x")
            assert system.get("x").name == "x"

    run(main)


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_name_is_free_as_soon_as_its_actor_has_ended(how: str) -> None:
    """Not some turns of the loop later: who restarts an actor would be refused now and then."""

    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Recorder, name="x")
            ending = asyncio.create_task(system.stop(ref) if how == "stop" else system.kill(ref))
            while ref.alive:  # noqa: ASYNC110 - the first turn of the loop after its end is what counts
                await asyncio.sleep(0)
            new = await system.spawn(Recorder, name="x")
            await ending
            await asyncio.sleep(1)  # whatever was still to be done for the old one
            assert system.get("x") is new
            assert new.alive

    run(main)


def test_a_cancelled_spawn_leaves_nothing() -> None:
    class Slow(Recorder):
        async def started(self) -> None:
            await asyncio.sleep(100)

    async def main() -> None:
        async with ActorSystem() as system:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await system.spawn(Slow, name="slow")
            with pytest.raises(KeyError):
                system.get("slow")

    run(main)


def test_spawn_needs_an_open_system() -> None:
    async def main() -> None:
        system = ActorSystem()
        with pytest.raises(ActorDefinitionError, match="not open"):
            await system.spawn(Recorder)
        async with system:
            pass
        with pytest.raises(ActorDefinitionError, match="not open"):
            await system.spawn(Recorder)
        with pytest.raises(ActorDefinitionError, match="opened before"):
            async with system:
                pass

    run(main)


def test_a_kill_past_its_grace_ends_the_process() -> None:
    """A thread cannot be stopped, so the hook is called; by default it is os._exit."""
    gate = threading.Event()
    entered = threading.Event()
    reasons: list[str] = []

    def hang() -> None:
        entered.set()
        gate.wait()

    class Hung(Actor):
        async def run(self) -> None:
            await self.offload(hang)

    def on_hang(reason: str) -> None:
        reasons.append(reason)
        gate.set()  # instead of ending the process

    async def main() -> None:
        async with ActorSystem(on_hang=on_hang) as system:
            ref = await system.spawn(Hung, name="hung")
            await asyncio.get_running_loop().run_in_executor(None, entered.wait)
            assert (await system.kill(ref, grace=0.05)).reason == "killed"

    asyncio.run(main())
    assert reasons == ["hung was killed, and has not ended within 0.05 s"]


def test_a_killed_actor_whose_stopping_waits_is_cancelled_again() -> None:
    class Stubborn(Recorder):
        async def stopping(self) -> None:
            await asyncio.sleep(1000)

    async def main() -> float:
        async with ActorSystem() as system:
            ref = await system.spawn(Stubborn)
            await system.kill(ref, grace=3)
        return asyncio.get_running_loop().time()

    assert run(main) == 3


def test_what_an_actor_held_is_freed_while_references_to_it_live_on() -> None:
    made: list[weakref.ref[Recorder]] = []

    def make() -> Recorder:
        actor = Recorder()
        made.append(weakref.ref(actor))
        return actor

    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(make, supervision=OneForOne())
            address = ref[Recorder.data]
            await address.ask(Double(1), timeout=1)
            await system.stop(ref)
            await asyncio.sleep(0)
            gc.collect()
            assert [actor() for actor in made] == [None]
            assert not address.ref.alive

    run(main)


def test_a_child_that_has_ended_is_forgotten_by_its_parent() -> None:
    class Parent(Actor):
        async def run(self) -> None:
            for ended in range(3):
                child = await self.spawn(Recorder, name="child")
                cells.append(weakref.ref(child._cell))
                await (self.system.stop if ended else self.system.kill)(child)
                del child
                await asyncio.sleep(1)
                gc.collect()
                assert [cell() for cell in cells] == [None] * len(cells)

    cells: list[weakref.ref[Cell]] = []

    async def main() -> None:
        async with ActorSystem() as system:
            assert (await (await system.spawn(Parent)).join()).error is None

    run(main)
    assert len(cells) == 3
