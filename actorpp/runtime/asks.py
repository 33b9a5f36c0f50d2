"""Asks as they lie in a mailbox: a message, who asked, and where the answer goes. Queues and deadlines are not here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actorpp.runtime.cell import Cell
    from actorpp.runtime.deadlines import Deadlines


class Ask:
    """A message whose sender expects a reply, as it lies in a mailbox."""

    __slots__ = ("asker", "message")

    message: object
    asker: Cell | None

    def done(self) -> bool:
        """Whether it has been answered or given up."""
        raise NotImplementedError

    def reply(self, value: Any) -> None:
        """Answer it, unless it is done."""
        raise NotImplementedError

    def fail(self, error: Exception) -> None:
        """Answer it with an error, unless it is done."""
        raise NotImplementedError


class AwaitedAsk(Ask):
    """An ask whose sender awaits a future."""

    __slots__ = ("future",)

    def __init__(self, message: object, asker: Cell | None, future: asyncio.Future[Any]) -> None:
        self.message = message
        self.asker = asker
        self.future = future

    def done(self) -> bool:
        return self.future.done()

    def reply(self, value: Any) -> None:
        if not self.future.done():
            self.future.set_result(value)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class CallbackAsk(Ask):
    """An ask whose outcome goes to a function, at once.

    Args:
        reply, failed: One of them is called, once. What they raise is the loop's business, not the replying actor's.

    Attributes:
        deadlines: Where its deadline is kept, if it has one.
    """

    __slots__ = ("_done", "_failed", "_reply", "deadlines")

    def __init__(
        self,
        message: object,
        asker: Cell | None,
        reply: Callable[[Any], object],
        failed: Callable[[Exception], object],
    ) -> None:
        self.message = message
        self.asker = asker
        self.deadlines: Deadlines | None = None
        self._reply = reply
        self._failed = failed
        self._done = False

    def done(self) -> bool:
        return self._done

    def reply(self, value: Any) -> None:
        if not self._done:
            self._end(self._reply, value)

    def fail(self, error: Exception) -> None:
        if not self._done:
            self._end(self._failed, error)

    def _end(self, function: Callable[[Any], object], outcome: Any) -> None:
        self._done = True
        try:
            function(outcome)  # before anything else: somebody waits for it
        except Exception as error:
            context = {"message": "a reply to ask_nowait was not handled", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)
        if self.deadlines is not None:
            self.deadlines.remove(self)
