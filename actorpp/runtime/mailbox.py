"""Mailbox: one inbox of one actor, the queue itself, with its bound and its overflow policy.

Plain and keyed storage, senders that wait for room, and postponed messages. Which mailbox is served next is decided by
Lanes; who serves it, by the Cell.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, cast

from actorpp.errors import ActorDefinitionError, ActorError, ActorStoppedError, MailboxFullError
from actorpp.runtime.asks import Ask
from actorpp.runtime.inbox import Inbox, Overflow
from actorpp.runtime.messages import DeadLetter

if TYPE_CHECKING:
    from actorpp.runtime.address import Address
    from actorpp.runtime.cell import Cell

M = TypeVar("M")

FAIRNESS = 64
"""After this many takes the lowest non-empty lane gets one."""


class Sender(NamedTuple):
    """A sender that waits for room. Its future ends when the item has been filed; an ask has no such future."""

    item: object
    filed: asyncio.Future[None] | None
    cell: Cell | None

    def gave_up(self) -> bool:
        return cast(Ask, self.item).done() if self.filed is None else self.filed.done()


class Mailbox(Generic[M]):
    """What ``self.<inbox>`` is inside an actor. Only the actor takes from it; others hold its Address."""

    __slots__ = (
        "_awaited", "_cell", "_key", "_keyed", "_postponed", "_queue", "capacity", "closed", "handler", "inbox",
        "senders",
    )  # fmt: skip

    def __init__(self, cell: Cell, inbox: Inbox[M], capacity: int) -> None:
        self._cell = cell
        self._key: Callable[[Any], Hashable] | None = inbox.key
        self._queue: deque[object] = deque()
        self._keyed: dict[Hashable, object] = {}
        self._awaited: set[Hashable] = set()
        self._postponed: deque[object] = deque()
        self.inbox = inbox
        self.capacity = capacity
        self.closed = False
        self.handler: Callable[[Any], Any] = no_handler
        self.senders: deque[Sender] = deque()

    def __len__(self) -> int:
        return len(self._queue) + len(self._keyed) + len(self._postponed)

    def __repr__(self) -> str:
        return f"<{self._cell.name}.{self.inbox.name}: {len(self)} of {self.capacity}>"

    @property
    def address(self) -> Address[M]:
        """Where others send to."""
        return self._cell.ref[self.inbox]

    # --- taking, by the actor ------------------------------------------------------------------------------------

    def has(self, key: Hashable) -> bool:
        """Whether ``take(key)`` would return at once."""
        return key in self._keyed

    def keys(self) -> list[Hashable]:
        """Keys of what waits here, in order of arrival."""
        return list(self._keyed)

    async def take(self, key: Hashable) -> M:
        """Take the message with this key, waiting for it if need be. Room for it is reserved meanwhile.

        Raises:
            ActorDefinitionError: The inbox has no key, or somebody else waits for the same one.
        """
        if self._key is None:
            raise ActorDefinitionError(f"{self.inbox} has no key=: use next()")
        if key in self._keyed:
            return self._take_keyed(key)
        if key in self._awaited:
            raise ActorDefinitionError(f"{self.inbox}: two tasks wait for the key {key!r}")
        self._awaited.add(key)
        try:
            self._admit()  # its sender may wait for room: the reserved place is for it
            while key not in self._keyed:
                await self._cell.wait(f"a message in {self.inbox.name} with key {key!r}")
        finally:
            self._awaited.discard(key)
        return self._take_keyed(key)

    async def next(self) -> M:
        """Take the oldest message, waiting for one if need be.

        Raises:
            ActorDefinitionError: The inbox is keyed, or driven by a handler.
        """
        if self._key is not None:
            raise ActorDefinitionError(f"{self.inbox} is keyed: use take(key)")
        if self.inbox.handler_name is not None:
            raise ActorDefinitionError(f"{self.inbox} is driven by its handler {self.inbox.handler_name!r}")
        while not self._queue:
            await self._cell.wait(f"a message in {self.inbox.name}")
        return cast(M, self.pop())

    def discard(self, key: Hashable) -> bool:
        """Drop the message with this key, on purpose: it is not a dead letter. Returns whether there was one."""
        if key not in self._keyed:
            return False
        self._take_keyed(key)
        return True

    def _take_keyed(self, key: Hashable) -> M:
        message = self._keyed.pop(key)
        if self.senders:
            self._admit()
        return cast(M, message)

    # --- serving, by the cell ------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return bool(self._queue)

    def pop(self) -> object:
        """The oldest item of an unkeyed mailbox; there must be one."""
        item = self._queue.popleft()
        if self.senders:
            self._admit()
        return item

    def postpone(self, item: object) -> None:
        """Keep an item that was popped; it counts as queued."""
        self._postponed.append(item)

    def retry_postponed(self) -> None:
        if self._postponed:
            self._queue.extendleft(reversed(self._postponed))
            self._postponed.clear()
            self._arrived()

    def pending(self) -> Iterator[object]:
        """Everything that waits here, in order of arrival; then what waits for room."""
        yield from self._postponed
        yield from self._queue
        yield from self._keyed.values()
        for sender in self.senders:
            yield sender.item

    def flush(self, reason: Literal["stopped", "restarted"], error: Callable[[], ActorError]) -> None:
        """Make dead letters of what is queued, and fail its asks with ``error()``.

        Senders that wait for room fail likewise on a closed mailbox; on an open one they get the room.
        """
        items = [*self._postponed, *self._queue, *self._keyed.values()]
        self._postponed.clear()
        self._queue.clear()
        self._keyed.clear()
        for item in items:
            if isinstance(item, Ask) and not item.done():
                item.fail(error())
            else:
                self._bury(item, reason)
        if not self.closed:
            self._admit()
            return
        for sender in self.senders:
            if sender.gave_up():
                continue
            if sender.filed is None:
                cast(Ask, sender.item).fail(error())
            else:
                self._bury(sender.item, reason)
                sender.filed.set_exception(error())
        self.senders.clear()

    def expired(self, item: Ask) -> bool:
        """Whether an ask's asker has given up; it is then a dead letter, not a task."""
        if not item.done():
            return False
        self._bury(item, "expired")
        return True

    # --- sending, by addresses -----------------------------------------------------------------------------------

    def check(self, message: object) -> None:
        """Raise TypeError unless the message belongs to the inbox's union."""
        if not isinstance(message, self.inbox.types):
            names = " | ".join(cls.__name__ for cls in self.inbox.types)
            raise TypeError(f"{self._cell.name}.{self.inbox.name} takes {names}, not {type(message).__name__}")

    def offer(self, item: object) -> bool:
        """File an item, or apply the overflow policy. Returns False when the sender has to wait for room (BLOCK).

        Raises:
            ActorStoppedError: The actor takes no more; a told message is then a dead letter.
            MailboxFullError: No room, and the policy is FAIL.
            ActorError: The keyed inbox already holds this key.
        """
        if self.closed:
            if not isinstance(item, Ask):
                self._bury(item, "stopped")
            raise ActorStoppedError(f"{self._cell.name} has stopped")
        if self._key is not None:
            return self._offer_keyed(item)
        if self.senders or len(self._queue) + len(self._postponed) >= self.capacity:
            return self._overflow(item)
        self._queue.append(item)
        self._arrived()
        return True

    def wait_for_room(self, item: object, sender: Cell | None) -> asyncio.Future[None] | None:
        """Join the senders that wait for room. The future ends when the item is filed; for an ask there is none."""
        filed = None if isinstance(item, Ask) else asyncio.get_running_loop().create_future()
        self.senders.append(Sender(item, filed, sender))
        return filed

    def full_error(self) -> MailboxFullError:
        return MailboxFullError(f"{self._cell.name}.{self.inbox.name} is full ({self.capacity} messages)")

    def _offer_keyed(self, item: object) -> bool:
        key = self._key_of(item)
        if key in self._keyed:
            raise ActorError(f"{self._cell.name}.{self.inbox.name} already holds a message with key {key!r}")
        # The awaited key always gets in: without it the actor could not go on and make room.
        if key not in self._awaited and (self.senders or len(self._keyed) >= self.capacity):
            return self._overflow(item)
        self._keyed[key] = item
        self._arrived()
        return True

    def _key_of(self, item: object) -> Hashable:
        return None if self._key is None else self._key(item)

    def force(self, item: object) -> None:
        """File a notice of the runtime even when there is no room; there is one per watch, so it stays bounded."""
        if self.closed:
            self._bury(item, "stopped")
            return
        self._queue.append(item)
        self._arrived()

    def _overflow(self, item: object) -> bool:
        match self.inbox.overflow:
            case Overflow.BLOCK:
                return False
            case Overflow.FAIL:
                raise self.full_error()
            case Overflow.DROP_NEWEST:
                self._drop(item)
            case Overflow.DROP_OLDEST:
                self._drop((self._postponed or self._queue).popleft())
                self._queue.append(item)
                self._arrived()
        return True

    def _drop(self, item: object) -> None:
        if isinstance(item, Ask) and not item.done():
            item.fail(self.full_error())
        else:
            self._bury(item, "overflow")

    def _admit(self) -> None:
        """File what waiting senders hold, oldest first, as far as there is room (or an awaited key)."""
        arrived = False
        waiting: deque[Sender] = deque()
        while self.senders:
            if self._key is None and len(self) >= self.capacity:
                break
            sender = self.senders.popleft()
            if sender.gave_up():
                continue
            if self._key is None:
                self._queue.append(sender.item)
            else:
                key = self._key_of(sender.item)
                if key not in self._awaited and len(self) >= self.capacity:
                    waiting.append(sender)
                    continue
                if key in self._keyed:
                    if sender.filed is not None:
                        sender.filed.set_exception(ActorError(f"{self!r} already holds a message with key {key!r}"))
                    continue
                self._keyed[key] = sender.item
            arrived = True
            if sender.filed is not None:
                sender.filed.set_result(None)
        self.senders.extendleft(reversed(waiting))
        if arrived:
            self._arrived()

    def _arrived(self) -> None:
        if self.inbox.kind == "atomic":
            self._cell.dispatcher.schedule()
        elif self._cell.waiters:
            self._cell.wake()

    def _bury(self, item: object, reason: Literal["stopped", "restarted", "overflow", "expired"]) -> None:
        message = item.message if isinstance(item, Ask) else item
        self._cell.system.dead_letters.add(DeadLetter(self._cell.name, self.inbox.name, message, reason))


class Lanes:
    """Mailboxes that one task serves, lowest priority number first, without starving the last."""

    def __init__(self, boxes: list[Mailbox[Any]]) -> None:
        self._boxes = sorted(boxes, key=lambda box: box.inbox.priority)
        self._upwards = self._boxes[::-1]
        self._streak = 0

    def pick(self) -> Mailbox[Any] | None:
        """The mailbox to take one item from, or None when all are empty."""
        lowest_is_due = self._streak >= FAIRNESS
        for box in self._upwards if lowest_is_due else self._boxes:
            if box._queue:
                self._streak = 0 if lowest_is_due else self._streak + 1
                return box
        return None


def no_handler(message: object) -> None:
    """Stands where no actor handles messages: in a pulled inbox, and after the end."""
    raise ActorDefinitionError(f"nothing handles {message!r}")
