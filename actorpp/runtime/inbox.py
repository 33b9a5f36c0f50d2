"""Inbox: the declaration of one typed, bounded queue in an actor's class body.

An Inbox is a descriptor. On the class it names the queue (``ref[Scorer.inbox]`` is its address); on an instance it is
the queue itself, a Mailbox. It holds no messages.
"""

from __future__ import annotations

import enum
import inspect
import types
import typing
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

import msgspec

from actorpp.errors import ActorDefinitionError

if TYPE_CHECKING:
    from actorpp.runtime.actor import Actor
    from actorpp.runtime.mailbox import Mailbox

M_contra = TypeVar("M_contra", contravariant=True)  # an inbox of A | B serves whoever sends A
S = TypeVar("S")
R = TypeVar("R")

CONTROL = 0
"""Priority of the control lane: handled before all data, between the main task's awaits."""


class Overflow(enum.Enum):
    """What happens to a message for which an inbox has no room."""

    BLOCK = "block"
    """``tell`` and ``ask`` wait for room; ``tell_nowait`` raises MailboxFullError."""
    FAIL = "fail"
    """The sender gets MailboxFullError."""
    DROP_OLDEST = "drop_oldest"
    """The oldest queued message becomes a dead letter."""
    DROP_NEWEST = "drop_newest"
    """The new message becomes a dead letter."""


def handler_kind(function: Callable[..., Any]) -> Literal["atomic", "serial"]:
    """How a handler runs: a plain ``def`` at once, an ``async def`` in the main task."""
    return "serial" if inspect.iscoroutinefunction(function) else "atomic"


class Inbox(Generic[M_contra]):
    """Declares an inbox of messages of type M, one union: ``Inbox[Score | Reset](capacity=256)``.

    Args:
        capacity: Most messages that wait in it (postponed ones included).
        priority: Lower goes first. 0 is the control lane: it needs a plain ``def`` handler, and overtakes all data.
        overflow: What happens when it is full.
        key: Makes it a stash: messages are taken by this key, ``await self.steps.take(seq)``, in any order.
    """

    def __init__(
        self,
        *,
        capacity: int,
        priority: int = 1,
        overflow: Overflow = Overflow.BLOCK,
        key: Callable[[M_contra], Hashable] | None = None,
    ) -> None:
        if capacity < 1:
            raise ActorDefinitionError(f"an inbox needs a capacity of at least 1, not {capacity}")
        if priority < CONTROL:
            raise ActorDefinitionError(f"priorities start at {CONTROL}, not {priority}")
        if key is not None and overflow in (Overflow.DROP_OLDEST, Overflow.DROP_NEWEST):
            raise ActorDefinitionError("a keyed inbox cannot drop messages: a taker would wait for a lost key for ever")
        self.capacity = capacity
        self.priority = priority
        self.overflow = overflow
        self.key = key
        self.name = ""
        self.owner = ""
        self.handler_name: str | None = None
        self.kind: Literal["pulled", "atomic", "serial"] = "pulled"
        self.types: tuple[type, ...] = ()

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.owner = name, owner.__qualname__

    def resolve_types(self) -> None:
        """Find out M, when the class is made: Inbox[M](...) leaves it on the object after __init__ has run."""
        alias = getattr(self, "__orig_class__", None)
        if alias is None:
            raise ActorDefinitionError(f"{self}: write the message type, as in Inbox[Message](capacity=...)")
        self.types = tuple(self._members(typing.get_args(alias)[0]))

    def _members(self, annotation: Any) -> list[type]:
        """The classes of a (possibly nested or aliased) union; each must be a frozen Struct."""
        annotation = getattr(annotation, "__value__", annotation)  # a `type X = ...` alias
        if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
            return [member for part in typing.get_args(annotation) for member in self._members(part)]
        cls = typing.get_origin(annotation) or annotation
        if not (isinstance(cls, type) and issubclass(cls, msgspec.Struct) and cls.__struct_config__.frozen):
            raise ActorDefinitionError(f"{self}: messages are frozen msgspec Structs, {annotation!r} is not one")
        return [cls]

    def handler(self, function: Callable[[S, M_contra], R]) -> Callable[[S, M_contra], R]:
        """Decorator: this method handles the inbox's messages. Override it in a subclass by its name.

        A plain ``def`` is atomic: it runs between the main task's awaits, as soon as the message arrives. An
        ``async def`` runs in the main task, one message at a time, by priority. What it returns answers an ask.
        """
        if self.owner:
            raise ActorDefinitionError(f"{self} belongs to a finished class: override its handler method instead")
        if self.handler_name is not None:
            raise ActorDefinitionError(f"an inbox has one handler, this one has {self.handler_name!r}; use match")
        if self.key is not None:
            raise ActorDefinitionError("a keyed inbox is taken by key, it cannot have a handler")
        self.kind = handler_kind(function)
        if self.priority == CONTROL and self.kind == "serial":
            raise ActorDefinitionError("a control inbox (priority 0) needs a plain def handler")
        self.handler_name = function.__name__
        return function

    def require_capacity(self, window: int, capacity: int | None = None) -> None:
        """Check, when a pipeline is built, that ``window`` messages in flight fit.

        Args:
            window: Most messages that can be under way to this inbox at once.
            capacity: The capacity it will be spawned with, if not the declared one.

        Raises:
            ActorDefinitionError: They do not fit, so the pipeline could stop for ever.
        """
        capacity = self.capacity if capacity is None else capacity
        if capacity < window:
            raise ActorDefinitionError(f"{self} holds {capacity} messages, but {window} can be in flight")

    @overload
    def __get__(self, instance: None, owner: type) -> Inbox[M_contra]: ...
    @overload
    def __get__(self, instance: Actor, owner: type) -> Mailbox[M_contra]: ...
    def __get__(self, instance: Actor | None, owner: type) -> Inbox[M_contra] | Mailbox[M_contra]:
        if instance is None:
            return self
        return instance._cell.mailboxes[self]

    def __repr__(self) -> str:
        return f"{self.owner or 'Inbox'}.{self.name}" if self.name else "Inbox"
