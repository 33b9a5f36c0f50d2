"""What an actor does besides handling: threads, child tasks, interrupts, timers, channels."""

from __future__ import annotations

import asyncio
import threading

import pytest

from actorpp.runtime import (
    Actor,
    ActorSystem,
    Channel,
    ChannelClosedError,
    Inbox,
    OneForOne,
    guard_sleep,
    guard_timeout,
)
from actorpp.testing import VirtualTimeLoop, run
from tests.unit.runtime.support import Boom, Factory, Note, Recorder, Seen


class Worker(Actor):
    """Runs the test's coroutine as its main task."""

    control = Inbox[Note](capacity=1, priority=0)
    data = Inbox[Note](capacity=10)

    def __init__(self) -> None:
        self.log: list[object] = []

    @control.handler
    def on_control(self, message: Note) -> None:
        self.interrupt(Boom(f"interrupt {message.n}"))

    async def run(self) -> None:
        await self.data.next()


def test_offload_runs_in_the_actors_own_thread() -> None:
    class Thinker(Worker):
        async def run(self) -> None:
            for _ in range(3):
                self.log.append(await self.offload(threading.get_ident))
            self.log.append(await self.offload(int, "ff", base=16))

    async def main() -> None:
        async with ActorSystem() as system:
            actors = [Thinker(), Thinker()]
            refs = [await system.spawn(lambda actor=actor: actor) for actor in actors]  # type: ignore[misc]
            await asyncio.gather(*(ref.join() for ref in refs))
            threads = [set(actor.log[:3]) for actor in actors]
            assert [len(seen) for seen in threads] == [1, 1]
            assert not threads[0] & threads[1]
            assert actors[0].log[3] == 255
            assert threading.get_ident() not in threads[0] | threads[1]

    run(main)


def test_an_error_in_the_thread_is_the_callers() -> None:
    def fail() -> None:
        raise Boom("in the thread")

    class Thinker(Worker):
        async def run(self) -> None:
            with pytest.raises(Boom, match="in the thread"):
                await self.offload(fail)

    async def main() -> None:
        async with ActorSystem() as system:
            assert (await (await system.spawn(Thinker)).join()).error is None

    run(main)


def test_cancelling_an_offload_waits_for_the_thread() -> None:
    entered, gate = threading.Event(), threading.Event()
    done: list[str] = []

    def work() -> None:
        entered.set()
        gate.wait()
        done.append("thread")

    class Thinker(Worker):
        async def run(self) -> None:
            try:
                await self.offload(work)
            finally:
                done.append("run")

    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Thinker)
            await asyncio.get_running_loop().run_in_executor(None, entered.wait)
            kill = asyncio.create_task(system.kill(ref))
            await asyncio.sleep(0)
            assert not kill.done()
            gate.set()
            await kill
            assert done == ["thread", "run"]

    run(main)


def test_time_stands_still_while_an_offload_is_out() -> None:
    entered, gate = threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        gate.wait()

    def open_gate() -> None:
        entered.wait()
        gate.set()

    class Thinker(Worker):
        async def run(self) -> None:
            await self.offload(work)
            self.log.append(asyncio.get_running_loop().time())

    async def main() -> list[object]:
        async with ActorSystem() as system:
            actor = Thinker()
            ref = await system.spawn(lambda: actor)
            asyncio.get_running_loop().call_later(1000, actor.log.append, "timer")
            opener = threading.Thread(target=open_gate)
            opener.start()
            await ref.join()
            opener.join()
            return actor.log

    assert run(main) == [0.0]


def test_a_child_tasks_error_crashes_the_actor() -> None:
    """cpython#117379, xoscar#121: a task's exception must not be lost."""

    class Parent(Worker):
        async def run(self) -> None:
            task = self.start(self.fail(), name="emit")
            assert task.get_name().endswith("/emit")
            await self.data.next()

        async def fail(self) -> None:
            await asyncio.sleep(1)
            raise Boom("in a child")

    async def main() -> None:
        async with ActorSystem() as system:
            error = (await (await system.spawn(Parent)).join()).error
            assert str(error) == "in a child"

    run(main)


def test_an_error_that_run_awaits_too_is_one_error() -> None:
    class Parent(Worker):
        async def run(self) -> None:
            await self.start(self.fail())

        async def fail(self) -> None:
            await asyncio.sleep(1)
            raise Boom

    async def main() -> None:
        async with ActorSystem() as system:
            assert type((await (await system.spawn(Parent)).join()).error) is Boom

    run(main)


def test_two_errors_are_both_reported() -> None:
    class Parent(Worker):
        async def run(self) -> None:
            raise Boom("in run")

        async def stopping(self) -> None:
            raise Boom("in stopping")

    async def main() -> None:
        async with ActorSystem() as system:
            error = (await (await system.spawn(Parent)).join()).error
            assert isinstance(error, ExceptionGroup)
            assert [str(part) for part in error.exceptions] == ["in run", "in stopping"]

    run(main)


def test_a_child_task_is_not_collected() -> None:
    """cpython#117379: nobody but the runtime holds the task, and it runs to its end."""
    import gc

    class Parent(Worker):
        async def run(self) -> None:
            self.start(self.count())
            for _ in range(3):
                await asyncio.sleep(1)
                gc.collect()
            await self.until(lambda: len(self.log) == 5)

        async def count(self) -> None:
            for n in range(5):
                await asyncio.sleep(1)
                self.log.append(n)
            self.notify()

    async def main() -> None:
        async with ActorSystem() as system:
            assert (await (await system.spawn(Parent)).join()).reason == "finished"

    run(main)


def test_interrupt_raises_in_the_pending_wait() -> None:
    class Sleeper(Worker):
        async def run(self) -> None:
            waits = [self.data.next(), asyncio.sleep(1000), self.until(lambda: False), self.offload(lambda: None)]
            for n, wait in enumerate(waits[:3]):
                try:
                    await wait
                except Boom as error:
                    self.log.append((n, str(error)))
            await waits[3]
            current = asyncio.current_task()
            assert current is not None
            assert current.cancelling() == 0  # no trace is left for asyncio.timeout to trip over
            async with asyncio.timeout(1):
                await asyncio.sleep(0)

    async def main() -> list[object]:
        async with ActorSystem() as system:
            actor = Sleeper()
            ref = await system.spawn(lambda: actor)
            for n in range(3):
                await asyncio.sleep(1)
                ref[Worker.control].tell_nowait(Note(n))
            assert (await ref.join()).error is None
            return actor.log

    assert run(main) == [(0, "interrupt 0"), (1, "interrupt 1"), (2, "interrupt 2")]


def test_an_interrupt_that_is_not_caught_is_a_crash() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Worker)
            joined = asyncio.create_task(ref.join())
            ref[Worker.control].tell_nowait(Note(7))
            assert str((await joined).error) == "interrupt 7"

    run(main)


def test_an_interrupt_as_run_ends_does_not_hit_stopping() -> None:
    class Hasty(Worker):
        async def run(self) -> None:
            self.interrupt(Boom())

        async def stopping(self) -> None:
            await asyncio.sleep(1)
            self.log.append("stopped well")

    async def main() -> list[object]:
        async with ActorSystem() as system:
            actor = Hasty()
            assert (await (await system.spawn(lambda: actor)).join()).error is None
            return actor.log

    assert run(main) == ["stopped well"]


def test_a_kill_is_not_turned_into_an_interrupt() -> None:
    class Stubborn(Worker):
        async def run(self) -> None:
            for _ in range(2):
                try:
                    await asyncio.sleep(1000)
                except Boom:
                    self.log.append("interrupted")

    async def main() -> list[object]:
        async with ActorSystem() as system:
            actor = Stubborn()
            ref = await system.spawn(lambda: actor)
            await asyncio.sleep(1)
            actor.interrupt(Boom())
            assert (await system.kill(ref)).reason == "killed"
            return actor.log

    assert run(main) == []


def test_timers() -> None:
    class Clock(Recorder):
        async def started(self) -> None:
            self.after(2.5, self.data, Note(100))
            self.after(1000, self.data, Note(0)).cancel()
            self.every(1, self.data, Note(1))
            self.every(1.4, self.data, Note(2), guard=True)

    async def main() -> list[int]:
        async with ActorSystem() as system:
            factory = Factory(Clock)
            ref = await system.spawn(factory)
            await asyncio.sleep(3.2)
            await system.stop(ref)
            await asyncio.sleep(10)
            return factory.last.seen

    assert run(main) == [1, 2, 1, 100, 2, 1]


def test_a_late_periodic_timer_skips_what_has_passed_and_keeps_its_grid() -> None:
    class Clock(Worker):
        async def run(self) -> None:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualTimeLoop)
            self.every(1, self.data, Note(1))
            for n in range(4):
                await self.data.next()
                self.log.append(round(loop.time(), 6))
                if n == 0:
                    loop._now += 2.7  # as if something had held up the loop

    async def main() -> list[object]:
        async with ActorSystem() as system:
            actor = Clock()
            await (await system.spawn(lambda: actor)).join()
            return actor.log

    assert run(main) == [1, 3.7, 4, 5]


def test_timers_end_with_their_incarnation_and_count_what_they_lose() -> None:
    class Clock(Worker):
        async def started(self) -> None:
            self.every(1, self.data, Note(1))

        async def run(self) -> None:
            await asyncio.sleep(12.5)
            raise Boom

    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Clock, supervision=OneForOne(backoff=100, max_backoff=100))
            await asyncio.sleep(50)
            assert system.dead_letters.by_reason == {"overflow": 2, "restarted": 10}
            await system.kill(ref)

    run(main)


def test_a_channel_is_bounded_and_drains_after_close() -> None:
    async def main() -> None:
        channel: Channel[int] = Channel(2)
        got: list[int] = []

        async def consume() -> None:
            async for item in channel:
                await asyncio.sleep(1)
                got.append(item)

        consumer = asyncio.create_task(consume())
        for n in range(5):
            await channel.put(n)
            assert len(channel) <= 2
        channel.close()
        with pytest.raises(ChannelClosedError):
            await channel.put(5)
        await consumer
        assert got == [0, 1, 2, 3, 4]
        with pytest.raises(ChannelClosedError):
            await channel.get()

    run(main)
    with pytest.raises(ValueError, match="at least 1"):
        Channel[int](0)


def test_guard_timers_on_a_plain_loop() -> None:
    async def main() -> None:
        await guard_sleep(0.001)
        with pytest.raises(TimeoutError):
            async with guard_timeout(0.001):
                await asyncio.Event().wait()
        async with guard_timeout(60):
            await asyncio.sleep(0)

    asyncio.run(main())


def test_the_runtime_works_on_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def main() -> list[int]:
        async with ActorSystem() as system:
            ref = await system.spawn(Recorder)
            await ref[Recorder.data].tell(Note(1))
            await asyncio.sleep(0.001)
            return await ref[Recorder.control].ask(Seen(), timeout=10)

    assert uvloop.run(main()) == [1]
