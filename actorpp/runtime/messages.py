"""What travels between actors: the base of askable messages, and the runtime's own notices.

User messages are frozen msgspec Structs; this module does not route or queue them.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, Generic, Literal, TypeVar

import msgspec

if TYPE_CHECKING:
    from actorpp.runtime.address import ActorRef

R_co = TypeVar("R_co", covariant=True)


class Request(msgspec.Struct, Generic[R_co], frozen=True):
    """Base of messages that can be asked: ``class GetStats(Request[Stats], frozen=True)`` is answered by a Stats."""


class Postpone(enum.Enum):
    """The type of POSTPONE."""

    POSTPONE = "postpone"


POSTPONE: Final = Postpone.POSTPONE
"""Returned by a data handler: keep this message and try it again, in arrival order, after ``become()``."""


class Terminated(msgspec.Struct, frozen=True):
    """How an actor ended, once and for all (a restart is not an end).

    Attributes:
        ref: The actor.
        reason: ``finished`` (its run() returned), ``stopped``, ``killed`` or ``crashed``.
        error: What it crashed with, else None.
    """

    ref: ActorRef
    reason: Literal["finished", "stopped", "killed", "crashed"]
    error: Exception | None = None


class DeadLetter(msgspec.Struct, frozen=True):
    """A message that no handler will see.

    Attributes:
        actor: Name of the actor it was for.
        inbox: Name of the inbox.
        message: The message itself.
        reason: ``stopped`` or ``restarted`` (the actor was), ``overflow`` (dropped by the inbox's policy), ``expired``
            (an ask whose asker had given up before its turn came).
    """

    actor: str
    inbox: str
    message: object
    reason: Literal["stopped", "restarted", "overflow", "expired"]
