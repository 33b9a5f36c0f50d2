"""Guard timers: deadlines and watchdogs, which end a wait that should have ended by itself.

On a real loop a guard timer is an ordinary one. A virtual-time loop (actorpp.testing) uses the mark: when nothing but
guard timers is left, nothing can happen any more, and it reports a deadlock instead of jumping to the deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TypeVarTuple

Ts = TypeVarTuple("Ts")


def guard_later(delay: float, callback: Callable[[*Ts], object], *args: *Ts) -> asyncio.TimerHandle:
    """Like ``loop.call_later`` on the running loop, ``delay`` in seconds, and marked as a guard."""
    loop = asyncio.get_running_loop()
    handle = loop.call_later(delay, callback, *args)
    mark = getattr(loop, "mark_guard", None)
    if mark is not None:
        mark(handle)
    return handle


async def guard_sleep(delay: float) -> None:
    """Sleep ``delay`` seconds on a guard timer: for the loops of watchdogs and heartbeats."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    handle = guard_later(delay, _wake, future)
    try:
        await future
    finally:
        handle.cancel()


@contextlib.asynccontextmanager
async def guard_timeout(delay: float) -> AsyncIterator[None]:
    """Like ``asyncio.timeout(delay)``, on a guard timer.

    Raises:
        TimeoutError: The block took more than ``delay`` seconds.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as scope:
        handle = guard_later(delay, lambda: scope.reschedule(loop.time()))
        try:
            yield
        finally:
            handle.cancel()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
