"""Messages and actors that several tests use."""

from __future__ import annotations

import asyncio

import msgspec

from actorpp.runtime import Actor, Inbox, Request


class Note(msgspec.Struct, frozen=True, tag="note"):
    """Data. The number tells notes apart."""

    n: int


class Fail(msgspec.Struct, frozen=True, tag="fail"):
    """Makes the handler raise."""

    text: str = "as told"


class Seen(Request[list[int]], frozen=True, tag="seen"):
    """Asks for the numbers handled so far."""


class Double(Request[int], frozen=True, tag="double"):
    """Asks for twice n."""

    n: int


class Hold(Request[int], frozen=True, tag="hold"):
    """Asks something that is answered when the gate opens."""


class Boom(Exception):
    """What Fail raises."""


class Recorder(Actor):
    """Notes in order; a control lane that says which; Fail crashes it; Hold waits for the gate."""

    control = Inbox[Seen | Fail](capacity=8, priority=0)
    data = Inbox[Note | Double | Hold | Fail](capacity=100)

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.gate = asyncio.Event()
        self.holding = asyncio.Event()

    @control.handler
    def on_control(self, message: Seen | Fail) -> list[int] | None:
        match message:
            case Seen():
                return list(self.seen)
            case Fail(text):
                raise Boom(text)

    @data.handler
    async def on_data(self, message: Note | Double | Hold | Fail) -> int | None:
        match message:
            case Note(n):
                self.seen.append(n)
                return None
            case Double(n):
                return 2 * n
            case Hold():
                self.holding.set()
                await self.gate.wait()
                return 1
            case Fail(text):
                raise Boom(text)


class Factory:
    """Makes actors of one class and keeps them, so that a test can look inside."""

    def __init__(self, cls: type[Recorder] = Recorder) -> None:
        self.cls = cls
        self.made: list[Recorder] = []

    def __call__(self) -> Recorder:
        self.made.append(self.cls())
        return self.made[-1]

    @property
    def last(self) -> Recorder:
        return self.made[-1]
