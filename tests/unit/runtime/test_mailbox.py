"""Mailboxes: order, bounds, overflow policies, stash."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actorpp.errors import ActorDefinitionError, ActorError, MailboxFullError
from actorpp.runtime import Actor, ActorRef, ActorSystem, Inbox, Mailbox, Overflow
from actorpp.testing import run
from tests.unit.runtime.support import Hold, Note


class Idle(Actor):
    """Has inboxes of every policy and takes from them when the test says so."""

    block = Inbox[Note](capacity=2)
    fail = Inbox[Note](capacity=2, overflow=Overflow.FAIL)
    oldest = Inbox[Note](capacity=2, overflow=Overflow.DROP_OLDEST)
    newest = Inbox[Note](capacity=2, overflow=Overflow.DROP_NEWEST)
    stash = Inbox[Note](capacity=2, key=lambda note: note.n)

    async def run(self) -> None:
        boxes = [self.block, self.fail, self.oldest, self.newest, self.stash]
        await self.until(lambda: len(boxes) == 0)


class Bench:
    """An Idle actor seen from both sides."""

    def __init__(self) -> None:
        self.actor = Idle()

    async def open(self, system: ActorSystem) -> ActorRef:
        return await system.spawn(lambda: self.actor, name="idle")


async def drain(mailbox: Mailbox[Note]) -> list[int]:
    return [(await mailbox.next()).n for _ in range(len(mailbox))]


def test_tell_blocks_until_there_is_room_and_keeps_order() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            bench = Bench()
            ref = await bench.open(system)
            address = ref[Idle.block]
            senders = [asyncio.create_task(address.tell(Note(n))) for n in range(6)]
            await asyncio.sleep(1)
            assert [sender.done() for sender in senders] == [True, True, False, False, False, False]
            with pytest.raises(MailboxFullError):
                address.tell_nowait(Note(9))
            mailbox = bench.actor.block
            assert (await mailbox.next()).n == 0
            await asyncio.sleep(1)
            assert [sender.done() for sender in senders] == [True, True, True, False, False, False]
            senders[3].cancel()
            taken = [(await mailbox.next()).n for _ in range(4)]
            assert taken == [1, 2, 4, 5]
            await asyncio.wait(senders)

    run(main)


def test_fail_raises_for_tell_too() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            bench = Bench()
            address = (await bench.open(system))[Idle.fail]
            await address.tell(Note(0))
            address.tell_nowait(Note(1))
            with pytest.raises(MailboxFullError, match=r"idle\.fail is full \(2 messages\)"):
                await address.tell(Note(2))
            with pytest.raises(MailboxFullError):
                address.tell_nowait(Note(2))
            assert await drain(bench.actor.fail) == [0, 1]
            assert system.dead_letters.count == 0  # the sender knows

    run(main)


@pytest.mark.parametrize(("policy", "kept", "dropped"), [("oldest", [2, 3], [0, 1]), ("newest", [0, 1], [2, 3])])
def test_drops_are_dead_letters(policy: str, kept: list[int], dropped: list[int]) -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            bench = Bench()
            ref = await bench.open(system)
            inbox: Inbox[Note] = getattr(Idle, policy)
            for n in range(4):
                ref[inbox].tell_nowait(Note(n))
            assert await drain(getattr(bench.actor, policy)) == kept
            letters: list[Any] = [letter.message for letter in system.dead_letters.recent]
            assert [note.n for note in letters] == dropped
            assert system.dead_letters.by_reason == {"overflow": 2}

    run(main)


def test_stash_gives_by_key_what_came_in_any_order() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            bench = Bench()
            address = (await bench.open(system))[Idle.stash]
            stash = bench.actor.stash
            address.tell_nowait(Note(8))
            address.tell_nowait(Note(7))
            assert stash.has(7)
            assert not stash.has(6)
            assert stash.keys() == [8, 7]
            assert (await stash.take(7)).n == 7
            assert stash.discard(8)
            assert not stash.discard(8)
            assert len(stash) == 0
            assert system.dead_letters.count == 0

    run(main)


def test_stash_keeps_room_for_the_awaited_key() -> None:
    """cases: a full stash without the message that everybody waits for could never move again."""

    async def main() -> None:
        async with ActorSystem() as system:
            bench = Bench()
            address = (await bench.open(system))[Idle.stash]
            stash = bench.actor.stash
            address.tell_nowait(Note(5))
            address.tell_nowait(Note(6))
            waiting = asyncio.create_task(stash.take(4))
            await asyncio.sleep(0)
            with pytest.raises(MailboxFullError):
                address.tell_nowait(Note(7))
            address.tell_nowait(Note(4))
            assert (await waiting).n == 4

    run(main)


def test_stash_lets_in_a_blocked_sender_of_the_awaited_key() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            bench = Bench()
            address = (await bench.open(system))[Idle.stash]
            for n in (5, 6):
                address.tell_nowait(Note(n))
            senders = [asyncio.create_task(address.tell(Note(n))) for n in (8, 4)]
            await asyncio.sleep(1)
            assert (await bench.actor.stash.take(4)).n == 4
            assert (await bench.actor.stash.take(5)).n == 5
            assert (await bench.actor.stash.take(8)).n == 8
            await asyncio.wait(senders)

    run(main)


def test_stash_refuses_a_second_message_with_the_same_key() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            bench = Bench()
            address = (await bench.open(system))[Idle.stash]
            address.tell_nowait(Note(5))
            with pytest.raises(ActorError, match="already holds a message with key 5"):
                address.tell_nowait(Note(5))

    run(main)


def test_stash_takes_by_key_in_constant_time() -> None:
    """Counted, not timed: the key function runs once per message however many wait."""
    calls = 0

    def key(note: Note) -> int:
        nonlocal calls
        calls += 1
        return note.n

    class Big(Actor):
        stash = Inbox[Note](capacity=10_000, key=key)

        async def run(self) -> None:
            await self.until(lambda: len(self.stash) == 10_000)
            for n in range(10_000):
                assert (await self.stash.take(n)).n == n

    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Big)
            for n in reversed(range(10_000)):
                ref[Big.stash].tell_nowait(Note(n))
            assert (await ref.join()).reason == "finished"

    run(main)
    assert calls == 10_000


def test_a_cancelled_take_loses_nothing() -> None:
    """pyzmq#1925 in small: a deadline on a mailbox never swallows the message that comes at the same moment."""

    async def main() -> None:
        async with ActorSystem() as system:
            bench = Bench()
            ref = await bench.open(system)
            for box in ("block", "stash"):
                mailbox: Mailbox[Note] = getattr(bench.actor, box)
                waiting = asyncio.create_task(mailbox.take(1) if box == "stash" else mailbox.next())
                await asyncio.sleep(1)
                inbox: Inbox[Note] = getattr(Idle, box)
                ref[inbox].tell_nowait(Note(1))
                waiting.cancel()
                await asyncio.wait([waiting])
                assert waiting.cancelled()
                assert len(mailbox) == 1

    run(main)


def test_wrong_calls_are_refused() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            bench = Bench()
            ref = await bench.open(system)
            with pytest.raises(ActorDefinitionError, match="has no key"):
                await bench.actor.block.take(1)
            with pytest.raises(ActorDefinitionError, match="use take"):
                await bench.actor.stash.next()
            with pytest.raises(TypeError, match=r"idle\.block takes Note, not Hold"):
                ref[Idle.block].tell_nowait(Hold())  # type: ignore[arg-type]
            with pytest.raises(ActorDefinitionError, match="nothing there answers an ask"):
                await ref[Idle.fail].ask(Note(1))  # type: ignore[arg-type]

    run(main)


def test_capacity_can_be_set_at_spawn() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Idle, capacity={Idle.fail: 3})
            for n in range(3):
                ref[Idle.fail].tell_nowait(Note(n))
            with pytest.raises(MailboxFullError):
                ref[Idle.fail].tell_nowait(Note(3))

            class Other(Idle):
                mine = Inbox[Note](capacity=1)

                async def started(self) -> None:
                    assert self.mine.capacity == 1

            with pytest.raises(ActorDefinitionError, match="has no inbox"):
                await system.spawn(Idle, capacity={Other.mine: 3})

    run(main)
