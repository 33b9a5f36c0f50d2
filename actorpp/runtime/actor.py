"""Actor: the base class of all actors. Its methods are what an actor may do from inside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from actorpp.errors import ActorDefinitionError
from actorpp.runtime.address import ActorRef, Address
from actorpp.runtime.definition import check, inboxes_of
from actorpp.runtime.inbox import Inbox
from actorpp.runtime.mailbox import Mailbox
from actorpp.runtime.messages import Terminated
from actorpp.runtime.supervision import OneForOne, Strategy
from actorpp.runtime.timers import Timer

if TYPE_CHECKING:
    from actorpp.runtime.cell import Cell
    from actorpp.runtime.system import ActorSpec, ActorSystem

M = TypeVar("M")
P = ParamSpec("P")
T = TypeVar("T")


class _Unspawned:
    """Stands in until a system has spawned the actor."""

    def __getattr__(self, name: str) -> Any:
        raise ActorDefinitionError("this actor is not in a system yet: use started(), not __init__")


class Actor:
    """State, inboxes, and one main task. Subclass it, declare inboxes, and write handlers or ``run()``.

    One incarnation: the factory makes the object; the main task calls ``started()``, ``run()`` and ``stopping()``.
    Handlers run between the first and the last. After a crash a supervised actor begins again with a new object.
    """

    _cell: Cell = cast("Cell", _Unspawned())

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check(cls, Actor)

    @classmethod
    def inboxes(cls) -> dict[str, Inbox[Any]]:
        """The class's inboxes by name."""
        return inboxes_of(cls)

    # --- for subclasses to override ------------------------------------------------------------------------------

    async def started(self) -> None:
        """Runs first in the main task, before any message is handled; spawn() returns when it has."""

    async def run(self) -> None:
        """The main task. By default it dispatches to the ``async def`` handlers until the actor is stopped.

        When it returns, the actor has finished. A stopped actor's run() ends at its next wait for a message.
        """
        await self.dispatch()

    async def stopping(self) -> None:
        """Runs last in the main task, however the incarnation ended; child tasks and child actors have ended before."""

    # --- who and where -------------------------------------------------------------------------------------------

    @property
    def ref(self) -> ActorRef:
        """This actor, for others."""
        return self._cell.ref

    @property
    def name(self) -> str:
        """Its name in the system."""
        return self._cell.name

    @property
    def system(self) -> ActorSystem:
        """The system it lives in."""
        return self._cell.system

    # --- waiting -------------------------------------------------------------------------------------------------

    def dispatch(self) -> Coroutine[Any, Any, None]:
        """Handle messages of ``async def`` inboxes by priority until the actor is stopped; for a run() of your own."""
        return self._cell.dispatcher.dispatch()

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait until the predicate holds. It is tried when a message arrives and on notify()."""
        while not predicate():
            await self._cell.wait(predicate)

    def notify(self) -> None:
        """Something that an ``until`` looks at has changed."""
        self._cell.wake()

    def interrupt(self, error: Exception) -> None:
        """Raise an error in the main task, at the await where it waits (or, if it is running, at its next one)."""
        self._cell.interrupt(error)

    def stop(self) -> None:
        """Stop this actor: it takes no more messages, handles what is queued, and ends. Returns at once."""
        self._cell.request_stop(drain=True)

    async def offload(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a blocking function in this actor's own thread, one at a time, and await its result.

        When the await is cancelled it first waits for the thread, which cannot be cancelled.
        """
        if kwargs:
            return cast(T, await self._cell.thread.call(lambda: function(*args, **kwargs)))
        return cast(T, await self._cell.thread.call(function, *args))

    def start(self, coro: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Run a coroutine as a child task. Its error crashes the actor; it is cancelled when run() has ended."""
        return self._cell.start_task(coro, name or getattr(coro, "__name__", "task"))

    # --- messages ------------------------------------------------------------------------------------------------

    def become(self, inbox: Inbox[M] | None = None, handler: Callable[[M], Any] | None = None) -> None:
        """Change behaviour: optionally put another handler behind an inbox; then retry all postponed messages.

        Raises:
            ActorDefinitionError: The inbox has no handler, or the new one is not of its kind (``def``, ``async def``).
        """
        self._cell.dispatcher.become(inbox, handler)

    def after(self, delay: float, mailbox: Mailbox[M], message: M, *, guard: bool = False) -> Timer:
        """Put a message into one of this actor's inboxes in ``delay`` seconds.

        A ``guard`` timer (a deadline or watchdog) does not keep virtual time going by itself.
        """
        return Timer(self._cell, mailbox, message, delay, None, guard)

    def every(self, period: float, mailbox: Mailbox[M], message: M, *, guard: bool = False) -> Timer:
        """Put a message into one of this actor's inboxes every ``period`` seconds."""
        return Timer(self._cell, mailbox, message, period, period, guard)

    # --- other actors --------------------------------------------------------------------------------------------

    def watch(self, ref: ActorRef, address: Address[Terminated]) -> None:
        """Have a Terminated put into ``address`` when that actor ends, or now if it has ended."""
        self.system.watch(ref, address)

    async def spawn(
        self,
        factory: Callable[[], Actor],
        *,
        name: str | None = None,
        supervision: OneForOne | None = None,
        capacity: Mapping[Inbox[Any], int] | None = None,
        tells: Iterable[Address[Any] | str] = (),
    ) -> ActorRef:
        """Spawn a child actor: it ends with this incarnation, and its unhandled crash crashes this actor."""
        return await self.system._spawn(factory, name, supervision, capacity, tells, self._cell)

    async def spawn_group(
        self, members: Mapping[str, Callable[[], Actor] | ActorSpec], *, supervision: Strategy
    ) -> dict[str, ActorRef]:
        """Spawn child actors that are restarted together; see ActorSystem.spawn_group."""
        return await self.system._spawn_group(members, supervision, self._cell)
