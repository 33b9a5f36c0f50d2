"""Probe: an endpoint that records what it is told, so that a test can await and check it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from actorpp.runtime.clock import guard_timeout

T = TypeVar("T")


class Probe:
    """Stands where an Address is expected: it has ``tell``, ``tell_nowait`` and ``ask``, and records the messages.

    Attributes:
        received: All messages, oldest first, also ignored ones.
    """

    def __init__(self, name: str = "probe") -> None:
        self.name = name
        self.received: list[Any] = []
        self._unread: deque[Any] = deque()
        self._ignored: tuple[type, ...] = ()
        self._replies: dict[type, Callable[[Any], Any]] = {}
        self._arrived = asyncio.Event()

    def ignore(self, *types: type) -> None:
        """Messages of these types are recorded, but never expected."""
        self._ignored += types

    def reply_to(self, kind: type[T], reply: Callable[[T], Any]) -> None:
        """Answer asks of this type with ``reply(message)``."""
        self._replies[kind] = reply

    def tell_nowait(self, message: Any) -> None:
        """Record a message."""
        self.received.append(message)
        if not isinstance(message, self._ignored):
            self._unread.append(message)
            self._arrived.set()

    async def tell(self, message: Any) -> None:
        """Record a message; there is always room."""
        self.tell_nowait(message)

    async def ask(self, message: Any, *, timeout: float | None = None) -> Any:  # noqa: ASYNC109 - as Address.ask
        """Record a message and answer it as ``reply_to`` said; without that, never."""
        self.tell_nowait(message)
        reply = self._replies.get(type(message))
        if reply is not None:
            return reply(message)
        async with asyncio.timeout(timeout):
            await asyncio.get_running_loop().create_future()

    async def expect(self, kind: type[T], *, within: float = 10.0) -> T:
        """The next unread message, which must be of this type.

        Args:
            within: Seconds to wait, on a guard timer: in virtual time a message that cannot come is a deadlock at once.

        Raises:
            AssertionError: It is of another type, or does not come in time.
        """
        try:
            async with guard_timeout(within):
                while not self._unread:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            raise AssertionError(f"{self.name} got no {kind.__name__} within {within:g} s") from None
        message = self._unread.popleft()
        if not isinstance(message, kind):
            raise AssertionError(f"{self.name} expected {kind.__name__} and got {message!r}")
        return message

    def expect_nothing(self) -> None:
        """Raise AssertionError if there is an unread message."""
        if self._unread:
            raise AssertionError(f"{self.name} expected nothing and has {list(self._unread)!r}")
