"""A network that does not exist: links that delay, reorder among each other, and drop, all by a seed.

A message sent on a link is delivered later by calling a function, such as ``address.tell_nowait``. One link never
reorders; two links do. It encodes nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class FakeNetwork:
    """Makes links. Their delays and losses are a function of the seed, the link's name and the message's number on it.

    Args:
        seed: Same seed, same network.
        max_delay: Seconds; each message's delay is uniform in [0, max_delay].
        drop: Chance that a message is lost.
    """

    def __init__(self, seed: int = 0, *, max_delay: float = 1.0, drop: float = 0.0) -> None:
        if max_delay < 0 or not 0 <= drop <= 1:
            raise ValueError(f"max_delay is not negative and drop a probability, not {max_delay} and {drop}")
        self.seed = seed
        self.max_delay = max_delay
        self.drop = drop
        self.links: dict[str, Link[Any]] = {}

    def link(
        self,
        name: str,
        deliver: Callable[[T], object],
        *,
        max_delay: float | None = None,
        drop: float | None = None,
    ) -> Link[T]:
        """A new link; use one per pair of peers and kind of message that may overtake others.

        Args:
            name: Unique in the network.
            deliver: Called with each message when it arrives, on the loop. What it raises ends run() with an error.
            max_delay: Instead of the network's.
            drop: Instead of the network's.
        """
        if name in self.links:
            raise ValueError(f"there is a link {name!r} already")
        link = Link(
            random.Random(f"{self.seed}/{name}"),
            deliver,
            self.max_delay if max_delay is None else max_delay,
            self.drop if drop is None else drop,
        )
        self.links[name] = link
        return link


class Link(Generic[T]):
    """One direction between two peers: in order, late, and perhaps lossy.

    Attributes:
        sent: Messages given to it.
        dropped: Of these, lost.
        in_flight: Under way now.
        cut: While true, every message is lost. Set it to fail the link.
    """

    def __init__(self, generator: random.Random, deliver: Callable[[T], object], max_delay: float, drop: float) -> None:
        self._random = generator
        self._deliver = deliver
        self._max_delay = max_delay
        self._drop = drop
        self._last = 0.0
        self.sent = self.dropped = self.in_flight = 0
        self.cut = False

    def send(self, message: T) -> None:
        """Send; returns at once. It arrives after every message sent here before."""
        loop = asyncio.get_running_loop()
        delay, chance = self._random.uniform(0, self._max_delay), self._random.random()
        self.sent += 1
        if self.cut or chance < self._drop:
            self.dropped += 1
            return
        # A timer due at the same instant as the one before could run first: never let two meet.
        self._last = max(loop.time() + delay, self._last + 1e-6)
        self.in_flight += 1
        loop.call_at(self._last, self._arrive, message)

    def _arrive(self, message: T) -> None:
        self.in_flight -= 1
        self._deliver(message)
