"""Ceilings on the cost of a message, five times the target; the numbers themselves are in tests/bench/actors.py."""

from __future__ import annotations

import asyncio
import time

import msgspec

from actorpp.runtime import Actor, ActorSystem, Inbox, Request


class Ping(Request[int], frozen=True, tag="ping"):
    """Asks for nothing."""


class Count(msgspec.Struct, frozen=True, tag="count"):
    """Is counted."""


class Echo(Actor):
    inbox = Inbox[Ping | Count](capacity=1024)

    @inbox.handler
    async def on_message(self, message: Ping | Count) -> int:
        return 0


async def best(rounds: int) -> tuple[float, float]:
    """Seconds per ask and per tell, in the best of some rounds: other load on the machine cannot make it faster."""
    asks, tells = [], []
    async with ActorSystem() as system:
        address = (await system.spawn(Echo))[Echo.inbox]
        for _ in range(rounds):
            start = time.perf_counter()
            for _ in range(1000):
                await address.ask(Ping(), timeout=10)
            asks.append(time.perf_counter() - start)
            start = time.perf_counter()
            for _ in range(10_000):
                await address.tell(Count())
            await address.ask(Ping())
            tells.append(time.perf_counter() - start)
    return min(asks) / 1000, min(tells) / 10_000


def test_ask_and_tell_are_cheap() -> None:
    ask, tell = asyncio.run(best(5))
    assert ask < 5 * 12e-6
    assert tell < 5 / 500_000
