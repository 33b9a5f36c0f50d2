"""Asks whose reply goes to a function: exactly one outcome each, as for those that are awaited."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actorpp.errors import ActorStoppedError, AskTimeoutError, InvalidRequestError, MailboxFullError
from actorpp.runtime import Actor, ActorSystem, Inbox
from actorpp.testing import run
from tests.unit.runtime.support import Double, Factory, Hold, Recorder


class Outcomes:
    """What came, in order."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self.changed = asyncio.Event()

    def __call__(self, outcome: Any) -> None:
        self.all.append(outcome)
        self.changed.set()


class Picky(Actor):
    """Refuses every request."""

    inbox = Inbox[Double](capacity=8)

    @inbox.handler
    def on_double(self, message: Double) -> int:
        raise InvalidRequestError(f"not {message.n}")


def test_the_reply_goes_to_the_function() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Recorder)
            got, failed = Outcomes(), Outcomes()
            for n in range(3):
                ref[Recorder.data].ask_nowait(Double(n), got, failed, timeout=1)
            picky = await system.spawn(Picky)
            picky[Picky.inbox].ask_nowait(Double(3), got, failed)
            await failed.changed.wait()
            assert got.all == [0, 2, 4]
            assert [str(error) for error in failed.all] == ["not 3"]

    run(main)


def test_a_timeout_a_full_inbox_and_the_end_are_told_once() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            factory = Factory()
            ref = await system.spawn(factory, capacity={Recorder.data: 2})
            address = ref[Recorder.data]
            hold = asyncio.create_task(address.ask(Hold()))
            await factory.last.holding.wait()
            got, failed = Outcomes(), Outcomes()
            address.ask_nowait(Double(1), got, failed, timeout=2)
            address.ask_nowait(Double(2), got, failed)
            with pytest.raises(MailboxFullError):
                address.ask_nowait(Double(3), got, failed)
            await asyncio.sleep(5)
            assert [type(error) for error in failed.all] == [AskTimeoutError]
            assert factory.last._cell.deadlines == {}
            await system.kill(ref)
            with pytest.raises(ActorStoppedError):
                await hold
            assert [type(error) for error in failed.all] == [AskTimeoutError, ActorStoppedError]
            assert got.all == []
            with pytest.raises(ActorStoppedError):
                address.ask_nowait(Double(4), got, failed)

    run(main)


def test_a_fault_of_the_function_is_not_the_actors() -> None:
    async def main() -> None:
        def broken(value: int) -> None:
            raise KeyError(value)

        async with ActorSystem() as system:
            ref = await system.spawn(Recorder)
            ref[Recorder.data].ask_nowait(Double(2), broken, broken)
            assert await ref[Recorder.data].ask(Double(3)) == 6

    with pytest.raises(ExceptionGroup, match="nobody handled") as raised:
        run(main)
    assert [error.args for error in raised.value.exceptions] == [(4,)]
