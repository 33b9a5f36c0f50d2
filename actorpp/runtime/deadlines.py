"""Deadlines of asks: one timer for all asks of an actor that have the same timeout, instead of one each.

Most asks are answered long before, and a loop timer that is made and cancelled costs as much as the rest of an ask.
Deadlines of one timeout fall due in the order in which they were set, so a timer for the oldest is enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from actorpp.runtime.asks import Ask
from actorpp.runtime.clock import guard_later


class Deadlines:
    """Pending asks that all have the same timeout.

    Args:
        seconds: The timeout.
        expire: Called with an ask and the timeout when it is due.
        forget: Called when the timer has run out and nothing is pending.
    """

    __slots__ = ("_expire", "_forget", "_loop", "_pending", "_seconds")

    def __init__(self, seconds: float, expire: Callable[[Ask, float], None], forget: Callable[[float], object]) -> None:
        self._seconds = seconds
        self._expire = expire
        self._forget = forget
        self._loop = asyncio.get_running_loop()
        self._pending: dict[Ask, float] = {}
        guard_later(seconds, self._look)

    def add(self, ask: Ask) -> None:
        """Set the deadline of an ask that begins now."""
        self._pending[ask] = self._loop.time() + self._seconds

    def remove(self, ask: Ask) -> None:
        """The ask has ended."""
        self._pending.pop(ask, None)

    def _look(self) -> None:
        now = self._loop.time()
        while self._pending:
            ask, due = next(iter(self._pending.items()))  # the oldest
            if due > now:
                guard_later(due - now, self._look)
                return
            del self._pending[ask]
            self._expire(ask, self._seconds)
        self._forget(self._seconds)
