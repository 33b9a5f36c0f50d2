"""The actor runtime: actors, their inboxes, supervision, and the system they live in.

It knows nothing of models, sockets or processes, and needs asyncio and msgspec only. The guide is docs/actors.md.
"""

from __future__ import annotations

from actorpp.runtime.actor import Actor
from actorpp.runtime.address import ActorRef, Address
from actorpp.runtime.channel import Channel, ChannelClosedError
from actorpp.runtime.clock import guard_later, guard_sleep, guard_timeout
from actorpp.runtime.deadletters import DeadLetters
from actorpp.runtime.inbox import Inbox, Overflow
from actorpp.runtime.mailbox import Mailbox
from actorpp.runtime.messages import POSTPONE, DeadLetter, Postpone, Request, Terminated
from actorpp.runtime.supervision import OneForAll, OneForOne, RestForOne, Strategy
from actorpp.runtime.system import ActorSpec, ActorSystem
from actorpp.runtime.timers import Timer
from actorpp.runtime.waits import WaitFor, WaitGraph

__all__ = [
    "POSTPONE",
    "Actor",
    "ActorRef",
    "ActorSpec",
    "ActorSystem",
    "Address",
    "Channel",
    "ChannelClosedError",
    "DeadLetter",
    "DeadLetters",
    "Inbox",
    "Mailbox",
    "OneForAll",
    "OneForOne",
    "Overflow",
    "Postpone",
    "Request",
    "RestForOne",
    "Strategy",
    "Terminated",
    "Timer",
    "WaitFor",
    "WaitGraph",
    "guard_later",
    "guard_sleep",
    "guard_timeout",
]
