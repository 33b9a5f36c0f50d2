"""Channel: a bounded queue between the tasks of one actor. Between actors, use inboxes."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from actorpp.errors import ActorError
from actorpp.runtime.waits import current_cell

T = TypeVar("T")


class ChannelClosedError(ActorError):
    """The channel was closed: nothing can be put any more, and nothing is left to get."""

    code = "channel_closed"


class Channel(Generic[T]):
    """At most ``capacity`` items; ``put`` waits for room. Iterate with ``async for`` until it is closed and empty."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a channel needs a capacity of at least 1, not {capacity}")
        self.capacity = capacity
        self._items: deque[T] = deque()
        self._waiters: set[asyncio.Future[None]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    async def put(self, item: T) -> None:
        """Append an item, waiting for room if need be.

        Raises:
            ChannelClosedError: It was closed.
        """
        while len(self._items) >= self.capacity and not self._closed:
            await self._wait("room in a channel")
        if self._closed:
            raise ChannelClosedError("put on a closed channel")
        self._items.append(item)
        self._wake()

    async def get(self) -> T:
        """Take the oldest item, waiting for one if need be.

        Raises:
            ChannelClosedError: It was closed, and is empty.
        """
        while not self._items:
            if self._closed:
                raise ChannelClosedError("the channel is closed and empty")
            await self._wait("an item in a channel")
        item = self._items.popleft()
        self._wake()
        return item

    def close(self) -> None:
        """No more items. What is in it can still be taken."""
        self._closed = True
        self._wake()

    def __aiter__(self) -> Channel[T]:
        return self

    async def __anext__(self) -> T:
        try:
            return await self.get()
        except ChannelClosedError:
            raise StopAsyncIteration from None

    async def _wait(self, what: str) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        cell = current_cell.get()
        self._waiters.add(future)
        if cell is not None:
            cell.other_waits[future] = what
        try:
            await future
        finally:
            self._waiters.discard(future)
            if cell is not None:
                del cell.other_waits[future]

    def _wake(self) -> None:
        for future in self._waiters:
            if not future.done():
                future.set_result(None)
