"""Cell: the running side of one actor, the same across restarts.

It owns the mailboxes, the main task, the child tasks and timers of the current incarnation, and brings incarnations up
and down. Calling handlers is the Dispatcher's business; whether to restart, the Supervisor's decision.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from actorpp.errors import (
    ActorDefinitionError,
    ActorError,
    ActorRestartedError,
    ActorStoppedError,
    AskTimeoutError,
)
from actorpp.runtime.address import ActorRef
from actorpp.runtime.asks import Ask
from actorpp.runtime.deadlines import Deadlines
from actorpp.runtime.dispatcher import Dispatcher
from actorpp.runtime.inbox import CONTROL, Inbox
from actorpp.runtime.mailbox import Mailbox
from actorpp.runtime.messages import Terminated
from actorpp.runtime.tasks import OwnThread, interruptible
from actorpp.runtime.waits import current_cell

if TYPE_CHECKING:
    from actorpp.runtime.actor import Actor
    from actorpp.runtime.address import Address
    from actorpp.runtime.system import ActorSystem
    from actorpp.runtime.timers import Timer

log = logging.getLogger("actorpp.runtime")


class Cell:
    """One actor. ``ended`` is called, by incarnation number, each time a main task has ended."""

    def __init__(
        self,
        system: ActorSystem,
        name: str,
        factory: Callable[[], Actor],
        capacity: Mapping[Inbox[Any], int],
        parent: Cell | None,
    ) -> None:
        self.system = system
        self.loop = asyncio.get_running_loop()
        self.name = name
        self.parent = parent
        self.ref = ActorRef(self)
        self.context = contextvars.copy_context()
        self.context.run(current_cell.set, self)
        self.terminated: asyncio.Future[Terminated] = self.loop.create_future()
        self.watchers: list[Address[Terminated]] = []
        self.observed = 0
        self.restarts = 0
        self.incarnation = 0
        self.ended: Callable[[Cell, int], None] = lambda cell, incarnation: None

        self._factory = factory
        first = factory()
        self._first: Actor | None = first  # its class says which mailboxes there are
        self._cls = type(first)
        self.mailboxes: dict[Inbox[Any], Mailbox[Any]] = {
            inbox: Mailbox(self, inbox, capacity.get(inbox, inbox.capacity)) for inbox in self._cls.inboxes().values()
        }
        foreign = set(capacity) - set(self.mailboxes)
        if foreign:
            raise ActorDefinitionError(f"{name} has no inbox {foreign.pop()}")
        self.dispatcher = Dispatcher(self, list(self.mailboxes.values()))
        self.thread = OwnThread(name)

        self.main: asyncio.Task[None] | None = None
        self.ready: asyncio.Future[None] = self.loop.create_future()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.timers: set[Timer] = set()
        self.dependents: dict[Cell, None] = {}  # living children, in the order of their spawning
        self.errors: list[Exception] = []
        self.interruption: Exception | None = None
        self.waiters: dict[asyncio.Future[None], object] = {}
        self.other_waits: dict[asyncio.Future[Any], str] = {}
        self.deadlines: dict[float, Deadlines] = {}
        self.stopping = False
        self.killed = False
        self._taken_down = False
        self._ending = False  # run() is over; children and stopping() have their time

    # --- one incarnation -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin an incarnation. ``ready`` ends when started() has returned; ``ended`` is called when it is over."""
        self.incarnation += 1
        self.ready = self.loop.create_future()
        self.errors = []
        self._taken_down = self._ending = False
        self.main = self.loop.create_task(self._live(), name=self.name, context=self.context)
        self.main.add_done_callback(self._on_main_done)

    async def _live(self) -> None:
        actor = None
        try:
            actor = self._make_actor()
            actor._cell = self
            self.dispatcher.bind(actor)
            await interruptible(self._work(actor), self._take_interruption)
        except asyncio.CancelledError:
            if not (self.errors or self.stopping or self._taken_down):
                self.killed = True  # cancelled from outside, as at the end of asyncio.run
        except Exception as error:
            self.errors.append(_as_exception(error))
        self._ending = True
        if self.stopping and not (self.killed or self.errors):
            self.close()
            self.dispatcher.drain_atomic()
        self.dispatcher.serving = False
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)  # a cancel that came as run() ended must not hit what follows
        self._uncancel()
        await self._end_dependents()
        try:
            if actor is not None:
                await actor.stopping()
        except asyncio.CancelledError:
            self._uncancel()  # killed past its grace
        except Exception as error:
            self.errors.append(_as_exception(error))

    def _make_actor(self) -> Actor:
        actor, self._first = self._first or self._factory(), None
        if type(actor) is not self._cls:
            raise ActorDefinitionError(f"the factory of {self.name} made a {type(actor)}, before a {self._cls}")
        return actor

    async def _work(self, actor: Actor) -> None:
        await actor.started()
        self.dispatcher.open()
        if not self.ready.done():
            self.ready.set_result(None)
        await actor.run()

    async def _end_dependents(self) -> None:
        for timer in list(self.timers):
            timer.cancel()
        kill = self.killed or self._taken_down or bool(self.errors)
        for task in self.tasks:
            task.cancel()
        for cell in reversed(self.dependents):
            self.start_task(self.system.end_child(cell, kill=kill), f"end of {cell.name}")
        self.dependents.clear()
        while self.tasks:
            try:
                await asyncio.wait(self.tasks)
            except asyncio.CancelledError:  # killed meanwhile; what we wait for is being ended already
                self._uncancel()

    def _uncancel(self) -> None:
        if self.main is not None:
            while self.main.cancelling():
                self.main.uncancel()

    def _on_main_done(self, main: asyncio.Task[None]) -> None:
        if not main.cancelled() and (error := main.exception()) is not None:
            self.errors.append(_as_exception(error))
        self.interruption = None
        self.ended(self, self.incarnation)
        if not self.ready.done():
            self.ready.cancel()

    @property
    def down(self) -> bool:
        """Whether no incarnation is running."""
        return self.main is None or self.main.done()

    def error(self) -> Exception | None:
        """What the incarnation crashed with; several errors as an ExceptionGroup."""
        if len(self.errors) > 1:
            return ExceptionGroup(f"{self.name} crashed", self.errors)
        return self.errors[0] if self.errors else None

    def flush(self, restarting: bool) -> None:
        """Make dead letters of all queued messages, and fail all asks that have no reply yet."""
        cause = self.error()

        def error() -> ActorError:
            failure = (
                ActorRestartedError(f"{self.name} was restarted before it replied")
                if restarting
                else ActorStoppedError(f"{self.name} has stopped")
            )
            failure.__cause__ = cause
            return failure

        self.dispatcher.fail_asks(error)
        for box in self.mailboxes.values():
            box.flush("restarted" if restarting else "stopped", error)

    def finish(self) -> None:
        """The actor has ended for good."""
        if self.terminated.done():
            return
        self.close()
        self.flush(restarting=False)
        self.thread.close()
        self.dispatcher.unbind()
        del self._factory, self._first  # references to the actor may live on; what it held need not
        error = self.error()
        reason = "crashed" if error else "killed" if self.killed else "stopped" if self.stopping else "finished"
        self.system.forget(self)
        notice = Terminated(self.ref, reason, error)  # type: ignore[arg-type]  # mypy widens the literals to str
        self.terminated.set_result(notice)
        for address in self.watchers:
            address._box.force(notice)

    def add_watcher(self, address: Address[Terminated]) -> None:
        if self.terminated.done():
            address._box.force(self.terminated.result())
        else:
            self.watchers.append(address)

    # --- ending it -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Take no more messages of any kind."""
        for box in self.mailboxes.values():
            box.closed = True

    def request_stop(self, drain: bool) -> None:
        """Take no more data; handle what is queued, unless ``drain`` is false, and end. Control goes on until then."""
        self.stopping = True
        for box in self.mailboxes.values():
            if box.inbox.priority != CONTROL:
                box.closed = True
                if not drain:
                    box.flush("stopped", lambda: ActorStoppedError(f"{self.name} has stopped"))
        self.wake()

    def request_kill(self) -> None:
        """End now: the main task and the child tasks are cancelled."""
        self.killed = self.stopping = True
        self.close()
        if self.main is not None and not self._ending:
            self.main.cancel()

    def cancel_stopping(self) -> None:
        """Cancel once more: a killed actor's stopping() takes too long."""
        if self.main is not None:
            self.main.cancel()

    def take_down(self) -> None:
        """End this incarnation as for a kill, but not the actor."""
        self._taken_down = True
        if self.main is not None and not self._ending:
            self.main.cancel()

    def crash(self, error: BaseException) -> None:
        """Something of this actor failed: end the incarnation with this error."""
        self.errors.append(_as_exception(error))
        self.dispatcher.serving = False
        if self.main is not None and not self._ending:
            self.main.cancel()

    def interrupt(self, error: Exception) -> None:
        if self.main is not None and not self._ending:
            self.interruption = error
            self.main.cancel()

    def _take_interruption(self) -> Exception | None:
        """The error that a cancel of the main task stands for, unless it is a cancel after all."""
        if self.killed or self.errors or self._taken_down or self.main is None:
            return None
        error, self.interruption = self.interruption, None
        if error is not None:
            self.main.uncancel()
        return error

    # --- waiting -------------------------------------------------------------------------------------------------

    async def wait(self, what: object) -> None:
        """Until something arrives or notify() is called. A stopping actor gets nothing new: its task ends here."""
        if self.stopping and not self.dispatcher.scheduled:
            raise asyncio.CancelledError(f"{self.name} is stopping")
        future: asyncio.Future[None] = self.loop.create_future()
        self.waiters[future] = what
        try:
            await future
        finally:
            self.waiters.pop(future, None)

    def wake(self) -> None:
        waiters, self.waiters = self.waiters, {}
        for future in waiters:
            if not future.done():
                future.set_result(None)

    def waits(self) -> Iterator[str]:
        """What its tasks wait for."""
        yield from map(_describe, self.waiters.values())
        yield from self.other_waits.values()

    def pending_asks(self) -> Iterator[tuple[Ask, Mailbox[Any]]]:
        """Asks it has not answered: in hand, deferred, queued, and waiting for room."""
        entries = list(self.dispatcher.unanswered())
        entries += [(item, box) for box in self.mailboxes.values() for item in box.pending() if isinstance(item, Ask)]
        return (entry for entry in entries if not entry[0].done())

    def new_deadlines(self, seconds: float) -> Deadlines:
        """For asks to this actor with a timeout of ``seconds``."""
        deadlines = self.deadlines[seconds] = Deadlines(seconds, self._expire, self.deadlines.pop)
        return deadlines

    def _expire(self, ask: Ask, seconds: float) -> None:
        name = type(ask.message).__name__
        ask.fail(AskTimeoutError(f"{self.name} did not answer {name} within {seconds:g} s"))

    # --- child tasks, deadlines ----------------------------------------------------------------------------

    def start_task(self, coro: Coroutine[Any, Any, Any], name: object) -> asyncio.Task[Any]:
        task = self.loop.create_task(coro, name=f"{self.name}/{name}", context=self.context)
        self.tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if self.dispatcher.defers(task):
            return  # a handler returned it as its reply to come, and settles it
        if not task.cancelled() and (error := task.exception()) is not None:
            self.crash(error)


def _as_exception(error: BaseException) -> Exception:
    """Errors are kept as Exceptions; the rare others (SystemExit in a task) are wrapped."""
    if isinstance(error, Exception):
        return error
    wrapped = ActorError(f"{error!r} ended a task")
    wrapped.__cause__ = error
    return wrapped


def _describe(what: object) -> str:
    """What a task waits for: a phrase, or a predicate named by its place in the source."""
    code = getattr(what, "__code__", None)
    if code is None:
        return str(what)
    return f"a condition ({code.co_qualname}, {code.co_filename.rpartition('/')[2]}:{code.co_firstlineno})"
