"""ActorSystem: spawns actors, finds them by name, stops them, and reports what nobody else handles."""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Any, Self

from actorpp.errors import ActorDefinitionError, ActorppError, DeadlockError
from actorpp.runtime.actor import Actor
from actorpp.runtime.address import ActorRef, Address
from actorpp.runtime.cell import Cell
from actorpp.runtime.clock import guard_timeout
from actorpp.runtime.deadletters import KEPT, DeadLetters
from actorpp.runtime.inbox import Inbox
from actorpp.runtime.messages import Terminated
from actorpp.runtime.routes import Routes
from actorpp.runtime.supervision import OneForOne, Strategy, Supervisor

log = logging.getLogger("actorpp.runtime")

EX_SOFTWARE = 70
"""Exit status of a process that was ended because an actor's thread hangs (sysexits.h)."""

live_systems: weakref.WeakSet[ActorSystem] = weakref.WeakSet()
"""All systems that are open, for reports."""


def end_process(reason: str) -> None:
    """The default for ``ActorSystem(on_hang=...)``: a thread cannot be stopped, so the process is."""
    log.critical("%s: ending the process", reason)
    os._exit(EX_SOFTWARE)


@dataclass(frozen=True)
class ActorSpec:
    """A member of a group, where more than the factory has to be said. See ActorSystem.spawn."""

    factory: Callable[[], Actor]
    capacity: Mapping[Inbox[Any], int] = field(default_factory=dict)
    tells: Iterable[Address[Any] | str] = ()


class ActorSystem:
    """Actors on the running loop. ``async with ActorSystem("rag") as system:`` stops them all at its end.

    A crash that no supervision, parent, watcher or join() takes care of cancels the body of the ``async with``, which
    then raises an ExceptionGroup of all such errors, as an asyncio.TaskGroup does.

    Args:
        name: For logs.
        grace: Seconds that a killed actor (or a stopped one, before it is killed) has to end.
        on_hang: Called with a sentence when a killed actor does not end in time, because its thread hangs.
        kept_letters: How many dead letters are kept for a look.
    """

    def __init__(
        self,
        name: str = "actors",
        *,
        grace: float = 10.0,
        on_hang: Callable[[str], None] = end_process,
        kept_letters: int = KEPT,
    ) -> None:
        self.name = name
        self.grace = grace
        self.dead_letters = DeadLetters(kept_letters)
        self._on_hang = on_hang
        self._cells: dict[str, Cell] = {}
        self._supervisors: dict[Supervisor, asyncio.Task[None]] = {}
        self._routes = Routes()
        self._numbers = count(1)
        self._failures: list[Exception] = []
        self._owner: asyncio.Task[Any] | None = None
        self._owner_cancelled = False
        self._closing = False

    # --- spawning ------------------------------------------------------------------------------------------------

    async def spawn(
        self,
        factory: Callable[[], Actor],
        *,
        name: str | None = None,
        supervision: OneForOne | None = None,
        capacity: Mapping[Inbox[Any], int] | None = None,
        tells: Iterable[Address[Any] | str] = (),
    ) -> ActorRef:
        """Start an actor, and return when its started() has.

        Args:
            factory: Makes the actor; called again for each restart. The class itself, or ``lambda: Scorer(model)``.
            name: Unique in the system; by default the class's name and a number.
            supervision: Restart it after a crash. Without, a crash is final.
            capacity: Capacities that replace declared ones.
            tells: The inboxes it sends to with ``await tell``, as addresses or, for actors that are spawned later, as
                ``"name.inbox"``. A cycle of BLOCK inboxes is refused, because all of it could come to wait for room.

        Raises:
            ActorDefinitionError: The name is taken, the capacity is for a foreign inbox, or BLOCK inboxes form a cycle.
            Exception: What the factory or started() raised.
        """
        return await self._spawn(factory, name, supervision, capacity, tells, None)

    async def spawn_group(
        self, members: Mapping[str, Callable[[], Actor] | ActorSpec], *, supervision: Strategy
    ) -> dict[str, ActorRef]:
        """Start actors, in order, that share one supervision: OneForAll, RestForOne or OneForOne.

        Args:
            members: Factories, or ActorSpecs, by name.
            supervision: Its restarts are counted over the whole group; beyond them the whole group ends.
        """
        return await self._spawn_group(members, supervision, None)

    async def _spawn(
        self,
        factory: Callable[[], Actor],
        name: str | None,
        supervision: Strategy | None,
        capacity: Mapping[Inbox[Any], int] | None,
        tells: Iterable[Address[Any] | str],
        parent: Cell | None,
    ) -> ActorRef:
        kind = factory.__name__.lower() if isinstance(factory, type) else "actor"
        name = name or f"{kind}-{next(self._numbers)}"
        spec = ActorSpec(factory, capacity or {}, tells)
        return (await self._spawn_group({name: spec}, supervision, parent))[name]

    async def _spawn_group(
        self,
        members: Mapping[str, Callable[[], Actor] | ActorSpec],
        supervision: Strategy | None,
        parent: Cell | None,
    ) -> dict[str, ActorRef]:
        if self._closing or self._owner is None:
            raise ActorDefinitionError(f"the system {self.name} is not open: spawn inside `async with`")
        cells: list[Cell] = []
        try:
            for name, member in members.items():
                if name in self._cells:
                    raise ActorDefinitionError(f"there is an actor {name!r} already")
                spec = member if isinstance(member, ActorSpec) else ActorSpec(member)
                cell = self._cells[name] = Cell(self, name, spec.factory, spec.capacity, parent)
                cells.append(cell)
                self._routes.add(cell, spec.tells)
            for cell in cells:
                self._routes.refuse_cycles(cell, self._cells)
            supervisor = Supervisor(cells, supervision, self._escalate)
            await supervisor.start()
        except BaseException:
            for cell in cells:
                self.forget(cell)
            raise
        if parent is not None:
            parent.dependents.update(dict.fromkeys(cells))
        task = asyncio.create_task(supervisor.supervise(), name=f"supervisor of {', '.join(members)}")
        self._supervisors[supervisor] = task
        task.add_done_callback(lambda _: self._on_supervised(supervisor))
        return {cell.name: cell.ref for cell in cells}

    def _on_supervised(self, supervisor: Supervisor) -> None:
        task = self._supervisors.pop(supervisor)
        for cell in supervisor.cells:
            self.forget(cell)  # once more: it may have ended before it was among its parent's dependents
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._report(error)

    def forget(self, cell: Cell) -> None:
        """The name of an actor that has ended is free; another one may have it already."""
        if self._cells.get(cell.name) is cell:
            del self._cells[cell.name]
            self._routes.remove(cell)
        if cell.parent is not None:
            cell.parent.dependents.pop(cell, None)

    def get(self, name: str) -> ActorRef:
        """The living actor of that name.

        Raises:
            KeyError: There is none.
        """
        return self._cells[name].ref

    # --- ending --------------------------------------------------------------------------------------------------

    async def stop(self, ref: ActorRef, *, drain: bool = True, grace: float | None = None) -> Terminated:
        """Have an actor take no more messages from now on, handle those it has, and end; wait for that.

        Args:
            drain: False overtakes the queue: only the message in hand is finished, the rest become dead letters.
            grace: Seconds after which it is killed; by default the system's.
        """
        return await self._end(ref._cell, kill=False, drain=drain, grace=grace)

    async def kill(self, ref: ActorRef, *, grace: float | None = None) -> Terminated:
        """Cancel what an actor does, and wait until it has ended. Its stopping() still runs.

        Args:
            grace: Seconds after which ``on_hang`` is called, if its thread does not return; by default the system's.
        """
        return await self._end(ref._cell, kill=True, grace=grace)

    async def _end(self, cell: Cell, *, kill: bool, drain: bool = True, grace: float | None = None) -> Terminated:
        if cell.main is not None and asyncio.current_task() is cell.main:
            raise DeadlockError(f"{cell.name} cannot wait for its own end: use self.stop()")
        grace = self.grace if grace is None else grace
        steps = [] if kill else [lambda: cell.request_stop(drain)]
        for step in [*steps, cell.request_kill, cell.cancel_stopping]:
            step()
            for supervisor in self._supervisors:
                supervisor.nudge()
            try:
                async with guard_timeout(grace):
                    return await asyncio.shield(cell.terminated)
            except TimeoutError:
                log.warning("%s has not ended within %g s", cell.name, grace)
            if cell.killed and cell.thread.calls:
                break  # no further cancel will reach the thread
        self._on_hang(f"{cell.name} was killed, and has not ended within {grace:g} s")
        return await asyncio.shield(cell.terminated)

    async def end_child(self, cell: Cell, *, kill: bool) -> None:
        """End a child actor, when its parent's incarnation ends."""
        await self._end(cell, kill=kill)

    # --- watching ------------------------------------------------------------------------------------------------

    def watch(self, ref: ActorRef, address: Address[Terminated]) -> None:
        """Put a Terminated into ``address``, whatever room it has, when the actor ends, or now if it has ended.

        A crash that is watched counts as handled.

        Raises:
            ActorDefinitionError: The inbox is keyed, and could not hold it beyond its capacity.
        """
        if address.inbox.key is not None:
            raise ActorDefinitionError(f"{address.inbox} is keyed: it cannot take Terminated")
        ref._cell.add_watcher(address)

    def _escalate(self, cell: Cell, error: Exception) -> None:
        """A crash that no restart will help: to those who watch it, else to the parent, else to the system's owner."""
        if cell.observed or cell.watchers:
            expected = isinstance(error, ActorppError)  # its message says it all; whoever watches has the rest
            log.error("%s crashed: %s", cell.name, error, exc_info=None if expected else error)
        elif cell.parent is not None and not cell.parent.terminated.done():
            cell.parent.crash(error)
        else:
            self._report(error)

    def _report(self, error: Exception) -> None:
        log.error("an actor of %s crashed, and nobody handles it", self.name, exc_info=error)
        self._failures.append(error)
        if self._owner is not None and not self._closing and not self._owner_cancelled:
            self._owner_cancelled = self._owner.cancel()

    # --- async with ----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._owner is not None:
            raise ActorDefinitionError(f"the system {self.name} was opened before")
        self._owner = asyncio.current_task()
        live_systems.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._owner_cancelled and self._owner is not None:
            self._owner.uncancel()  # our cancel has done its work; what follows is raised below
        try:
            await self._close(kill=error is not None or bool(self._failures))
        finally:
            live_systems.discard(self)
        if self._failures:
            if error is not None and not isinstance(error, asyncio.CancelledError):
                raise BaseExceptionGroup(f"actors of {self.name} crashed", [*self._failures, error])
            raise ExceptionGroup(f"actors of {self.name} crashed", self._failures)

    async def _close(self, kill: bool) -> None:
        """Stop all actors, the last spawned first, so that each still has those it was built upon."""
        self._closing = True
        try:
            roots = [cell for cell in self._cells.values() if cell.parent is None]
            if kill:
                await asyncio.gather(*(self._end(cell, kill=True) for cell in roots))
            else:
                for cell in reversed(roots):
                    await self._end(cell, kill=False)
            if self._supervisors:
                await asyncio.wait(self._supervisors.values())
        except asyncio.CancelledError:
            if kill:
                raise
            await self._close(kill=True)
            raise

    def cells(self) -> list[Cell]:
        """The running sides of all living actors, for reports."""
        return list(self._cells.values())
