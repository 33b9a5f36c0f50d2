"""Asks: every one gets exactly one answer or a typed error."""

from __future__ import annotations

import asyncio

import pytest

from actorpp.errors import (
    ActorRestartedError,
    ActorStoppedError,
    AskTimeoutError,
    DeadlockError,
    InvalidRequestError,
    MailboxFullError,
)
from actorpp.runtime import Actor, ActorSystem, Address, Inbox, OneForOne, Overflow
from actorpp.testing import run
from tests.unit.runtime.support import Boom, Double, Factory, Fail, Hold, Note, Recorder, Seen


def test_ask_gets_the_reply() -> None:
    async def main() -> tuple[int, list[int]]:
        async with ActorSystem() as system:
            ref = await system.spawn(Recorder)
            return await ref[Recorder.data].ask(Double(4), timeout=1), await ref[Recorder.control].ask(
                Seen(), timeout=1
            )

    assert run(main) == (8, [])


def test_an_ask_that_expired_in_the_queue_is_never_handled() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            factory = Factory()
            ref = await system.spawn(factory)
            hold = asyncio.create_task(ref[Recorder.data].ask(Hold()))
            await factory.last.holding.wait()
            late = asyncio.create_task(ref[Recorder.data].ask(Double(1), timeout=2))
            await asyncio.sleep(5)
            with pytest.raises(AskTimeoutError, match="did not answer Double within 2 s"):
                await late
            factory.last.gate.set()
            await hold
            assert await ref[Recorder.data].ask(Double(3)) == 6
            assert [(letter.reason, letter.message) for letter in system.dead_letters.recent] == [
                ("expired", Double(1))
            ]

    run(main)


def test_asks_to_the_stopped_fail_at_once() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Recorder)
            await system.stop(ref)
            with pytest.raises(ActorStoppedError):
                await ref[Recorder.data].ask(Double(1), timeout=1)
            with pytest.raises(ActorStoppedError):
                ref[Recorder.data].tell_nowait(Note(1))
            assert system.dead_letters.by_reason == {"stopped": 1}  # the note; the ask was answered with an error

    run(main)


def test_an_ask_waits_for_room_within_its_timeout() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            factory = Factory()
            ref = await system.spawn(factory, capacity={Recorder.data: 1})
            address = ref[Recorder.data]
            hold = asyncio.create_task(address.ask(Hold()))
            await factory.last.holding.wait()
            queued = asyncio.create_task(address.ask(Double(1)))
            waiting = asyncio.create_task(address.ask(Double(2)))
            short = asyncio.create_task(address.ask(Double(3), timeout=1))
            await asyncio.sleep(2)
            assert isinstance(short.exception(), AskTimeoutError)
            factory.last.gate.set()
            assert [await hold, await queued, await waiting] == [1, 2, 4]

    run(main)


def test_a_full_inbox_fails_the_ask_by_its_policy() -> None:
    class Strict(Actor):
        data = Inbox[Double](capacity=1, overflow=Overflow.FAIL)
        newest = Inbox[Double](capacity=1, overflow=Overflow.DROP_NEWEST)

        @data.handler
        async def on_data(self, message: Double) -> int:
            await asyncio.sleep(10)
            return 0

        @newest.handler
        async def on_newest(self, message: Double) -> int:
            return 0

    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Strict)
            for inbox in (Strict.data, Strict.newest):
                asks = [asyncio.create_task(ref[inbox].ask(Double(n))) for n in range(3)]
                done, _ = await asyncio.wait(asks, return_when=asyncio.FIRST_EXCEPTION)
                assert any(isinstance(ask.exception(), MailboxFullError) for ask in done)
                for ask in asks:
                    ask.cancel()
                await asyncio.wait(asks)

    run(main)


class Broker(Actor):
    """Answers later, from elsewhere, by returning a future."""

    data = Inbox[Double](capacity=10)

    def __init__(self) -> None:
        self.open: dict[int, asyncio.Future[int]] = {}

    @data.handler
    def on_data(self, message: Double) -> asyncio.Future[int]:
        future = self.open[message.n] = asyncio.get_running_loop().create_future()
        return future


def test_a_handler_may_return_a_future_and_go_on() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            broker = Broker()
            ref = await system.spawn(lambda: broker)
            asks = [asyncio.create_task(ref[Broker.data].ask(Double(n))) for n in range(3)]
            await asyncio.sleep(1)
            broker.open[2].set_result(4)
            broker.open[1].set_exception(InvalidRequestError("not one"))
            assert await asks[2] == 4
            with pytest.raises(InvalidRequestError):
                await asks[1]
            assert not asks[0].done()
            await system.stop(ref)
            with pytest.raises(ActorStoppedError):
                await asks[0]

    run(main)


def test_a_request_error_answers_the_ask_and_anything_else_crashes() -> None:
    class Picky(Recorder):
        async def on_data(self, message: object) -> int:
            if message == Double(0):
                raise InvalidRequestError("no zero")
            raise Boom

        def on_control(self, message: object) -> list[int]:
            raise InvalidRequestError("no control")

    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Picky, supervision=OneForOne())
            with pytest.raises(InvalidRequestError, match="no zero"):
                await ref[Recorder.data].ask(Double(0))
            with pytest.raises(InvalidRequestError, match="no control"):
                await ref[Recorder.control].ask(Seen())
            assert ref.restarts == 0
            with pytest.raises(ActorRestartedError) as caught:
                await ref[Recorder.data].ask(Double(1))
            assert isinstance(caught.value.__cause__, Boom)
            await ref[Recorder.data].tell(Double(0))  # refused, and nobody to be told: a crash
            await asyncio.sleep(1)
            assert ref.restarts == 2

    run(main)


@pytest.mark.parametrize("inbox", ["control", "data"])
def test_an_ask_in_hand_at_a_crash_fails_with_the_reason(inbox: str) -> None:
    class Fragile(Recorder):
        def on_control(self, message: object) -> list[int]:
            raise Boom

        async def on_data(self, message: object) -> int:
            raise Boom

    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Fragile, supervision=OneForOne())
            ask = ref[Recorder.control].ask(Seen()) if inbox == "control" else ref[Recorder.data].ask(Double(1))
            with pytest.raises(ActorRestartedError) as caught:
                await ask
            assert isinstance(caught.value.__cause__, Boom)

    run(main)


def test_asking_oneself_is_refused_at_once() -> None:
    class Narcissus(Recorder):
        async def on_data(self, message: object) -> int:
            if message == Double(1):
                return await self.ref[Recorder.data].ask(Double(2))
            return len(await self.ref[Recorder.control].ask(Seen()))  # its control lane does answer meanwhile

    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Narcissus)
            assert await ref[Recorder.data].ask(Double(2)) == 0
            with pytest.raises(ActorStoppedError):
                await ref[Recorder.data].ask(Double(1))
            ended = await ref.join()
            assert isinstance(ended.error, DeadlockError)

    with pytest.raises(ExceptionGroup) as caught:
        run(main)
    assert caught.group_contains(DeadlockError, match="asks itself")


def test_the_union_of_an_inbox_is_checked_when_asked() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Recorder)
            with pytest.raises(TypeError, match=r"takes Seen \| Fail, not Double"):
                await ref[Recorder.control].ask(Double(1))

    run(main)


def test_a_cancelled_ask_is_dropped_before_its_turn() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            factory = Factory()
            ref = await system.spawn(factory)
            address: Address[Note | Double | Hold | Fail] = ref[Recorder.data]
            hold = asyncio.create_task(address.ask(Hold()))
            await factory.last.holding.wait()
            gone = asyncio.create_task(address.ask(Double(1)))
            await asyncio.sleep(1)
            gone.cancel()
            factory.last.gate.set()
            assert await hold == 1
            await system.stop(ref)
            assert system.dead_letters.by_reason == {"expired": 1}

    run(main)


def test_a_handler_may_answer_through_a_child_task() -> None:
    class Parallel(Actor):
        data = Inbox[Double](capacity=10)

        @data.handler
        def on_data(self, message: Double) -> asyncio.Task[int]:
            return self.start(self.work(message.n))

        async def work(self, n: int) -> int:
            await asyncio.sleep(n)
            if n == 2:
                raise InvalidRequestError("not two")
            if n == 4:
                raise Boom
            return 2 * n

    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Parallel, supervision=OneForOne())
            asks = [asyncio.create_task(ref[Parallel.data].ask(Double(n))) for n in (3, 1, 2, 4, 5)]
            results = await asyncio.gather(*asks, return_exceptions=True)
            assert results[:2] == [6, 2]
            assert isinstance(results[2], InvalidRequestError)
            assert isinstance(results[3], ActorRestartedError)
            assert isinstance(results[4], ActorRestartedError)
            assert asyncio.get_running_loop().time() == 4
            assert ref.restarts == 1

    run(main)
