"""Virtual time: run asyncio code with a clock that jumps to the next timer instead of waiting for it.

The loop is the stock one with another selector and another clock. It does no real I/O: a socket or a subprocess would
be waited for while time flies. Threads are fine: time stands still while one is out.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, cast

from actorpp.errors import DeadlockError
from actorpp.runtime.system import live_systems
from actorpp.runtime.waits import wait_graph
from actorpp.testing.leaks import LeakError, leftover_tasks

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def run(main: Callable[[], Coroutine[Any, Any, T]], *, seed: int = 0) -> T:
    """Run ``main()`` on a new virtual-time loop, from time 0, and return its result. Call it from plain functions.

    Args:
        main: Coroutine function without arguments.
        seed: Of ``rng()``, for delays, reorderings and drops; the run is otherwise deterministic.

    Raises:
        DeadlockError: Nothing can happen any more, but for guard timers. It carries the wait-for graph.
        LeakError: ``main()`` returned and left tasks behind.
        ExceptionGroup: Errors that would only have been logged, such as one raised by a timer's callback.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(seed)) as runner:
        loop = cast(VirtualTimeLoop, runner.get_loop())
        try:
            try:
                result = runner.run(main())
            finally:
                loop.raise_unhandled()
            if left := leftover_tasks(loop):
                raise LeakError(f"left behind: {', '.join(left)}")
            return result
        finally:
            loop.closing = True
            while tasks := asyncio.all_tasks(loop):  # after an error: let the systems end their actors
                for task in tasks:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(tasks))


def rng() -> random.Random:
    """The seeded generator of the run() that this code is in."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualTimeLoop):
        raise RuntimeError("rng() needs actorpp.testing.run()")
    return loop.random


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time() starts at 0 and moves only when nothing else can happen."""

    def __init__(self, seed: int = 0) -> None:
        self._now = 0.0
        self._guards: weakref.WeakSet[asyncio.TimerHandle] = weakref.WeakSet()
        self._threads_out = 0
        self.random = random.Random(seed)
        self.closing = False
        self._unhandled: list[Exception] = []
        super().__init__(_Selector(self))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """An error that nobody awaits: keep it for the end of run()."""
        super().call_exception_handler(context)
        if isinstance(error := context.get("exception"), Exception):
            self._unhandled.append(error)

    def raise_unhandled(self) -> None:
        """Raise the errors that nobody handled, if there are any."""
        if self._unhandled:
            raise ExceptionGroup("nobody handled these errors", self._unhandled)

    def mark_guard(self, handle: asyncio.TimerHandle) -> None:
        """A deadline or watchdog: it does not count as something that can still happen."""
        self._guards.add(handle)

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """As usual, and time stands still until the function has returned."""
        future = super().run_in_executor(executor, func, *args)
        self._threads_out += 1
        future.add_done_callback(self._thread_is_back)
        return future

    def _thread_is_back(self, future: asyncio.Future[Any]) -> None:
        self._threads_out -= 1

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """As usual; it waits for a thread, with real time."""
        self._threads_out += 1
        try:
            await super().shutdown_default_executor()
        finally:
            self._threads_out -= 1

    def pass_time(self) -> bool:
        """Nothing is ready: go to the next timer. Returns whether to wait for a thread instead.

        Raises:
            DeadlockError: There is no timer, or only guards.
        """
        if self._threads_out:
            return True
        timers = [handle for handle in self._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]
        if all(handle in self._guards for handle in timers) and not (self.closing and timers):
            raise _deadlock(self)
        self._now = max(self._now, min(handle.when() for handle in timers))
        return False


def _deadlock(loop: VirtualTimeLoop) -> DeadlockError:
    cells = [cell for system in live_systems for cell in system.cells() if cell.loop is loop]
    graph = wait_graph(sorted(cells, key=lambda cell: cell.name))
    tasks = sorted(task.get_name() for task in asyncio.all_tasks(loop))
    text = f"nothing can happen any more at {loop.time():g} s\n{graph}\nunfinished tasks: {', '.join(tasks)}"
    return DeadlockError(text, graph=graph)


class _Selector(selectors.DefaultSelector):
    """Polls; where the stock loop would sleep, the virtual loop decides."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and (timeout is None or timeout > 0) and self._loop.pass_time():
            events = super().select(None)
        return events
