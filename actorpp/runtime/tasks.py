"""Two tools of an actor's main task: a thread of its own for blocking calls, and errors raised in it from outside."""

from __future__ import annotations

import asyncio
import logging
import types
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

log = logging.getLogger("actorpp.runtime")


class OwnThread:
    """One thread, started at first use, that runs an actor's blocking calls one at a time.

    Attributes:
        calls: How many are under way or wait for the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._executor: ThreadPoolExecutor | None = None
        self.calls = 0

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Await ``function(*args)`` in the thread. A cancel, or an error raised in the await, waits for the thread."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self._name)
        self.calls += 1
        future = asyncio.get_running_loop().run_in_executor(self._executor, function, *args)
        future.add_done_callback(self._returned)
        try:
            return await asyncio.shield(future)
        except (asyncio.CancelledError, Exception) as error:
            failure = error
        while not future.done():  # the thread still uses what the caller lent it
            try:
                await asyncio.wait([future])
            except (asyncio.CancelledError, Exception) as error:
                failure = error
        lost = None if future.cancelled() else future.exception()
        if lost is not None and lost is not failure:
            log.error("%s: %r failed while it was being cancelled", self._name, function, exc_info=lost)
        raise failure

    def close(self) -> None:
        """End the thread; one that hangs is left to the process's end."""
        if self._executor is not None:
            self._executor.shutdown(wait=self.calls == 0)

    def _returned(self, future: asyncio.Future[Any]) -> None:
        self.calls -= 1


@types.coroutine
def interruptible(
    coro: Coroutine[Any, Any, None], interruption: Callable[[], Exception | None]
) -> Generator[Any, None, None]:
    """``await coro``, but a cancel arrives in it as what ``interruption()`` returns, if that is an error."""
    error: BaseException | None = None
    while True:
        try:
            waited = coro.send(None) if error is None else coro.throw(error)
        except StopIteration:
            return
        try:
            yield waited
            error = None
        except GeneratorExit:
            coro.close()
            raise
        except BaseException as thrown:  # the error of what was waited for, or a cancel
            error = thrown
            if isinstance(thrown, asyncio.CancelledError):
                error = interruption() or thrown
