"""Address and ActorRef: what one actor holds of another. Neither keeps state of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from actorpp.errors import ActorDefinitionError, DeadlockError
from actorpp.runtime.asks import AwaitedAsk, CallbackAsk
from actorpp.runtime.inbox import Inbox
from actorpp.runtime.mailbox import Mailbox
from actorpp.runtime.messages import Request, Terminated
from actorpp.runtime.waits import current_cell

if TYPE_CHECKING:
    from actorpp.runtime.cell import Cell

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)
R = TypeVar("R")


class Address(Generic[M_contra]):
    """One inbox of one actor, for those who send to it. It stays valid across restarts."""

    __slots__ = ("_askable", "_box", "_cell", "_types", "inbox")

    def __init__(self, cell: Cell, box: Mailbox[Any]) -> None:
        self._cell = cell
        self._box = box
        self._types = frozenset(box.inbox.types)
        self._askable = frozenset() if box.inbox.kind == "pulled" else self._types
        self.inbox: Inbox[Any] = box.inbox

    @property
    def ref(self) -> ActorRef:
        """The actor it belongs to."""
        return self._cell.ref

    def __repr__(self) -> str:
        return f"<address {self._cell.name}.{self._box.inbox.name}>"

    async def tell(self, message: M_contra) -> None:
        """Send without a reply. A full BLOCK inbox makes the sender wait; senders are served in order.

        Raises:
            ActorStoppedError: The actor has stopped; the message is a dead letter.
            MailboxFullError: No room, and the inbox's policy is FAIL.
            TypeError: The message is not of the inbox's union.
        """
        if message.__class__ not in self._types:
            self._box.check(message)
        if not self._box.offer(message):
            filed = self._box.wait_for_room(message, current_cell.get())
            if filed is not None:
                await filed

    def tell_nowait(self, message: M_contra) -> None:
        """Send without a reply, never waiting.

        Raises:
            ActorStoppedError: The actor has stopped; the message is a dead letter.
            MailboxFullError: No room, and the inbox's policy is BLOCK or FAIL.
            TypeError: The message is not of the inbox's union.
        """
        if message.__class__ not in self._types:
            self._box.check(message)
        if not self._box.offer(message):
            raise self._box.full_error()

    async def ask(self, message: Request[R], *, timeout: float | None = None) -> R:  # noqa: ASYNC109 - the reply's own
        """Send and await the reply, for at most ``timeout`` seconds. One that expires in the queue is never handled.

        Raises:
            AskTimeoutError: No reply in time.
            ActorStoppedError: The actor has stopped, or stopped before it replied.
            ActorRestartedError: It crashed and was restarted before it replied; the message is not run again.
            MailboxFullError: No room, and the inbox's policy is not BLOCK.
            RequestError: What the handler refused the request with.
            DeadlockError: An actor's main task asks the main task, that is itself.
            TypeError: The message is not of the inbox's union.
        """
        box, cell = self._box, self._cell
        if message.__class__ not in self._askable:
            self._check_ask(message)
        asker = current_cell.get()
        if asker is cell and box.inbox.kind == "serial" and asyncio.current_task() is cell.main:
            raise DeadlockError(f"{cell.name} asks itself in {box.inbox.name}, and would wait for ever")
        future: asyncio.Future[R] = cell.loop.create_future()
        item = AwaitedAsk(message, asker, future)
        if not box.offer(item):
            box.wait_for_room(item, asker)
        deadlines = None
        if timeout is not None:
            deadlines = cell.deadlines.get(timeout) or cell.new_deadlines(timeout)
            deadlines.add(item)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                future.exception()  # an error that came in the same moment has been overtaken
            raise
        finally:
            if deadlines is not None:
                deadlines.remove(item)

    def ask_nowait(
        self,
        message: Request[R],
        reply: Callable[[R], object],
        failed: Callable[[Exception], object],
        *,
        timeout: float | None = None,
    ) -> None:
        """Send a request whose reply goes to a function, for senders that cannot await, such as a socket's reader.

        One of the two functions is called, once, as soon as the reply or an error of ``ask`` is there: they must be
        short. Nothing is called when this method raises.

        Raises:
            ActorStoppedError: The actor has stopped.
            MailboxFullError: No room, and the inbox's policy is BLOCK or FAIL.
            TypeError: The message is not of the inbox's union.
        """
        box, cell = self._box, self._cell
        if message.__class__ not in self._askable:
            self._check_ask(message)
        item = CallbackAsk(message, current_cell.get(), reply, failed)
        if not box.offer(item):
            raise box.full_error()
        if timeout is not None and not item.done():  # an inbox that drops the newest has answered already
            item.deadlines = cell.deadlines.get(timeout) or cell.new_deadlines(timeout)
            item.deadlines.add(item)

    def _check_ask(self, message: object) -> None:
        self._box.check(message)
        if not self._askable:
            raise ActorDefinitionError(f"{self.inbox} has no handler, so nothing there answers an ask")


class ActorRef:
    """An actor, for those who know it. ``ref[Scorer.inbox]`` is the address of one inbox."""

    __slots__ = ("__weakref__", "_addresses", "_cell")

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._addresses: dict[Inbox[Any], Address[Any]] = {}

    def __getitem__(self, inbox: Inbox[M]) -> Address[M]:
        address = self._addresses.get(inbox)
        if address is None:
            box = self._cell.mailboxes.get(inbox)
            if box is None:
                raise ActorDefinitionError(f"{self._cell.name} has no inbox {inbox}")
            address = self._addresses[inbox] = Address(self._cell, box)
        return address

    @property
    def name(self) -> str:
        """The actor's name, unique in its system."""
        return self._cell.name

    @property
    def alive(self) -> bool:
        """Whether it has not ended; an actor that is being restarted is alive."""
        return not self._cell.terminated.done()

    @property
    def restarts(self) -> int:
        """How often it has been restarted."""
        return self._cell.restarts

    @property
    def depths(self) -> dict[str, int]:
        """By the name of each inbox, how many messages wait there."""
        return {inbox.name: len(box) for inbox, box in self._cell.mailboxes.items()}

    async def join(self) -> Terminated:
        """Wait until the actor has ended, and say how. A crash that is joined counts as handled."""
        self._cell.observed += 1
        try:
            return await asyncio.shield(self._cell.terminated)
        except asyncio.CancelledError:
            self._cell.observed -= 1
            raise

    def __repr__(self) -> str:
        return f"<actor {self._cell.name}>"
