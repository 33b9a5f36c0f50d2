"""Dispatcher: calls the handlers of one actor, and does with what they return what it asks for.

Plain ``def`` handlers run between the main task's awaits, control first; ``async def`` handlers run in the main task
one at a time. Starting and ending the actor is the Cell's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from actorpp.errors import ActorDefinitionError, ActorError, RequestError
from actorpp.runtime.asks import Ask
from actorpp.runtime.inbox import CONTROL, Inbox, handler_kind
from actorpp.runtime.mailbox import FAIRNESS, Lanes, Mailbox, no_handler
from actorpp.runtime.messages import POSTPONE

if TYPE_CHECKING:
    from actorpp.runtime.actor import Actor
    from actorpp.runtime.cell import Cell

log = logging.getLogger("actorpp.runtime")

Entry = tuple[Ask, Mailbox[Any]]


class Dispatcher:
    """The handlers of one actor.

    Attributes:
        serving: Handlers may run: between started() and the end of run().
        scheduled: Plain handlers are about to run.
    """

    def __init__(self, cell: Cell, boxes: list[Mailbox[Any]]) -> None:
        self._cell = cell
        self._boxes = boxes
        self._control = Lanes([box for box in boxes if box.inbox.priority == CONTROL])
        self._atomic = Lanes([b for b in boxes if b.inbox.kind == "atomic" and b.inbox.priority != CONTROL])
        self._serial = Lanes([box for box in boxes if box.inbox.kind == "serial"])
        self._in_hand: list[Entry] = []
        self._deferred: dict[asyncio.Future[Any], Entry | None] = {}
        self._dispatching = False
        self.serving = False
        self.scheduled = False

    def bind(self, actor: Actor) -> None:
        """Take the handlers of a new incarnation."""
        for box in self._boxes:
            if box.inbox.handler_name is not None:
                box.handler = getattr(actor, box.inbox.handler_name)

    def unbind(self) -> None:
        """Let go of the last incarnation."""
        for box in self._boxes:
            box.handler = no_handler

    def open(self) -> None:
        """Begin to serve."""
        self.serving = True
        self.schedule()

    def drain_atomic(self) -> None:
        """Handle what is queued for plain handlers, after the mailboxes were closed."""
        while self._serve_atomic():
            pass

    def become(self, inbox: Inbox[Any] | None, handler: Callable[[Any], Any] | None) -> None:
        """See Actor.become."""
        if (inbox is None) != (handler is None):
            raise ActorDefinitionError("become() takes an inbox and its new handler, or neither")
        if inbox is not None and handler is not None:
            if inbox.kind != handler_kind(handler):
                raise ActorDefinitionError(f"{inbox} is {inbox.kind}: {handler.__name__} cannot handle it")
            self._cell.mailboxes[inbox].handler = handler
        for box in self._boxes:
            box.retry_postponed()

    def defers(self, future: asyncio.Future[Any]) -> bool:
        """Whether a handler returned this future, to answer later."""
        return future in self._deferred

    def unanswered(self) -> Iterator[Entry]:
        """Asks that were taken from their mailboxes and have no reply yet."""
        yield from self._in_hand
        yield from (entry for entry in self._deferred.values() if entry is not None)

    def fail_asks(self, error: Callable[[], ActorError]) -> None:
        """The incarnation has ended: no reply will come."""
        for ask, _ in self.unanswered():
            ask.fail(error())
        self._in_hand.clear()
        self._deferred.clear()

    # --- plain handlers ------------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Run atomic handlers as soon as the loop is free."""
        if self.serving and not self.scheduled:
            self.scheduled = True
            self._cell.loop.call_soon(self._run, context=self._cell.context)

    def _run(self) -> None:
        self.scheduled = False
        if self._serve_atomic():
            self.schedule()  # let the loop breathe
        elif self._cell.stopping:
            self._cell.wake()  # whoever waits may now have what it needs, or will never get it

    def _serve_atomic(self) -> bool:
        """Handle up to FAIRNESS messages of atomic inboxes, control first. Returns whether there may be more."""
        for _ in range(FAIRNESS):
            if not self.serving:
                return False
            box = self._control.pick() or self._atomic.pick()
            if box is None:
                return False
            item = box.pop()
            if isinstance(item, Ask):
                if box.expired(item):
                    continue
                entry = (item, box)
                self._in_hand.append(entry)
                try:
                    self._settle(box, item, box.handler(item.message))
                    self._in_hand.remove(entry)
                except RequestError as error:
                    item.fail(error)
                    self._in_hand.remove(entry)
                except Exception as error:
                    self._cell.crash(error)
            else:
                try:
                    self._settle(box, item, box.handler(item))
                except Exception as error:
                    self._cell.crash(error)
        return True

    # --- async handlers ------------------------------------------------------------------------------------------

    async def dispatch(self) -> None:
        """Handle the messages of all ``async def`` inboxes, one at a time, until the actor stops and they are empty."""
        if self._dispatching:
            raise ActorDefinitionError(f"{self._cell.name} dispatches already: a handler could be entered twice")
        self._dispatching = True
        cell, lanes, served = self._cell, self._serial, 0
        try:
            while True:
                if self.scheduled:
                    self._serve_atomic()
                if not self.serving:
                    raise asyncio.CancelledError(f"{cell.name} crashed")
                box = lanes.pick()
                if box is None:
                    if cell.stopping and not self.scheduled:
                        return
                    await cell.wait("any message")
                    continue
                served += 1
                if served % FAIRNESS == 0:
                    await asyncio.sleep(0)  # a handler that never waits must not starve the loop
                    if not box.ready:
                        continue
                item = box.pop()
                if not isinstance(item, Ask):
                    result = await box.handler(item)
                    if result is not None:
                        self._settle(box, item, result)
                elif not box.expired(item):
                    entry = (item, box)
                    self._in_hand.append(entry)
                    try:
                        self._settle(box, item, await box.handler(item.message))
                    except RequestError as error:
                        item.fail(error)
                    self._in_hand.remove(entry)
        finally:
            self._dispatching = False

    def _settle(self, box: Mailbox[Any], item: object, result: object) -> None:
        """Do with a handler's result what it asks for: reply, reply later, or postpone the message."""
        if result is POSTPONE:
            if box.inbox.priority == CONTROL:
                raise ActorDefinitionError(f"{self._cell.name}: a control message cannot be postponed")
            box.postpone(item)
        elif isinstance(result, asyncio.Future):
            self._deferred[result] = (item, box) if isinstance(item, Ask) else None
            result.add_done_callback(self._settle_later)
        elif isinstance(item, Ask):
            item.reply(result)

    def _settle_later(self, result: asyncio.Future[Any]) -> None:
        """A future that a handler returned is done: answer the ask. Any error but a RequestError is a crash."""
        error = None if result.cancelled() else result.exception()
        if result not in self._deferred:  # of an incarnation that has ended, and its ask with it
            if error is not None:
                log.error("%s: a reply failed after its ask had", self._cell.name, exc_info=error)
            return
        entry = self._deferred.pop(result)
        if entry is not None:
            ask = entry[0]
            if isinstance(error, RequestError):
                ask.fail(error)
                return
            if error is not None or (result.cancelled() and not self.serving):
                self._in_hand.append(entry)  # it fails with the incarnation
            elif result.cancelled():
                ask.fail(ActorError(f"{self._cell.name} cancelled its reply"))
            else:
                ask.reply(result.result())
        if error is not None:
            self._cell.crash(error)
