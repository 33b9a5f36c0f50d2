"""Probes record, expect, ignore and answer."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from actorpp.errors import DeadlockError
from actorpp.testing import Probe, run


class Beat(msgspec.Struct, frozen=True):
    n: int


class Event(msgspec.Struct, frozen=True):
    name: str


def test_expect_returns_messages_in_order_and_skips_the_ignored() -> None:
    async def main() -> None:
        probe = Probe()
        probe.ignore(Beat)
        asyncio.get_running_loop().call_later(5, probe.tell_nowait, Event("late"))
        probe.tell_nowait(Beat(1))
        await probe.tell(Event("first"))
        assert (await probe.expect(Event)).name == "first"
        probe.expect_nothing()
        assert (await probe.expect(Event)).name == "late"
        assert probe.received == [Beat(1), Event("first"), Event("late")]

    run(main)


def test_what_was_not_expected_fails_the_test() -> None:
    async def main() -> None:
        probe = Probe("sink")
        probe.tell_nowait(Beat(1))
        with pytest.raises(AssertionError, match="sink expected nothing"):
            probe.expect_nothing()
        with pytest.raises(AssertionError, match="sink expected Event and got Beat"):
            await probe.expect(Event)
        clock = asyncio.create_task(asyncio.sleep(100))
        with pytest.raises(AssertionError, match="got no Event within 3 s"):
            await probe.expect(Event, within=3)
        clock.cancel()
        await asyncio.wait([clock])

    run(main)


def test_a_message_that_cannot_come_is_a_deadlock_at_once() -> None:
    async def main() -> None:
        await Probe().expect(Event)

    with pytest.raises(DeadlockError):
        run(main)


def test_asks_are_answered_as_told() -> None:
    async def main() -> None:
        probe = Probe()
        probe.reply_to(Beat, lambda beat: beat.n + 1)
        assert await probe.ask(Beat(1)) == 2
        with pytest.raises(TimeoutError):
            await probe.ask(Event("nobody answers"), timeout=1)

    run(main)
