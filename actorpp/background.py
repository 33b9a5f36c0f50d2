"""An engine on an event loop in a thread of its own, for callers that have no loop, or another one.

It runs coroutines for any thread and waits for their end. What they do is the caller's business.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from actorpp.config import EngineConfig
from actorpp.engine import Engine
from actorpp.errors import AbortedError
from actorpp.eventloop import new_event_loop
from actorpp.serving.api import OnStartup
from actorpp.serving.gateway import Gateway

T = TypeVar("T")

SIGNAL_CHECK_S = 0.2


class Gate:
    """Opened once by one thread, waited for by others.

    ``threading.Event`` and futures have a lock that a KeyboardInterrupt at the wrong instruction leaves taken, and then
    the opening thread would hang. A signal that comes just before a wait does not end it: hence the timeout.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        self.is_open = True
        self._lock.release()

    def wait(self) -> None:
        while not self.is_open:
            self._lock.acquire(timeout=SIGNAL_CHECK_S)


class EngineThread:
    """Started when it is made; ``close`` ends it, with every process of the engine.

    The thread is a daemon: a program that ends without ``close`` is not held up by it.

    Raises:
        ActorppError: What starting the engine raised.
    """

    gateway: Gateway

    def __init__(self, config: EngineConfig, model_name: str, on_startup: OnStartup | None = None) -> None:
        self._closing = False
        self._calls: set[asyncio.Task[Any]] = set()
        self._main: asyncio.Task[Any] | None = None
        self._started = Gate()
        self._error: BaseException | None = None
        self._loop = new_event_loop()
        self.engine = Engine(config, on_startup=on_startup)
        self._thread = threading.Thread(target=self._run, args=(model_name,), name="actorpp-engine", daemon=True)
        try:
            self._thread.start()
            self._started.wait()
            if self._error is not None:
                raise self._error
        except BaseException:  # Ctrl-C too
            self.close()
            raise

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run ``work()`` on the loop and return its result. Ctrl-C meanwhile cancels it and waits for its end.

        Raises:
            AbortedError: The thread was closed before ``work`` ended.
            RuntimeError: It was closed before this call.
        """
        if self._closing:
            raise RuntimeError("the engine is closed")
        done, tasks = Gate(), list[asyncio.Task[T]]()

        def start() -> None:
            task = self._loop.create_task(work())
            tasks.append(task)
            self._calls.add(task)
            task.add_done_callback(ended)

        def ended(task: asyncio.Task[T]) -> None:
            self._calls.discard(task)
            done.open()

        def cancel() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # interrupted before it was started
                done.open()

        try:
            self._loop.call_soon_threadsafe(start)
            done.wait()
        except BaseException:
            if not done.is_open:
                self._loop.call_soon_threadsafe(cancel)
                done.wait()
            raise
        try:
            return tasks[0].result()
        except asyncio.CancelledError:
            raise AbortedError("the engine was closed") from None

    def close(self) -> None:
        """End the engine and the thread. Calls that are under way are aborted. Safe to call again, from any thread."""
        self._closing = True
        with suppress(RuntimeError):  # the loop has been closed before
            self._loop.call_soon_threadsafe(self._cancel_main)
        started = self._thread.ident is not None
        if started and threading.current_thread() is not self._thread:  # garbage may be collected in any thread
            self._thread.join()

    def _cancel_main(self) -> None:
        main, self._main = self._main, None
        if main is not None:
            main.cancel()

    def _run(self, model_name: str) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve(model_name))
        except asyncio.CancelledError:
            pass  # this is how it is closed
        except BaseException as error:
            if self._started.is_open:
                raise
            self._error = error
            self._started.open()

    async def _serve(self, model_name: str) -> None:
        self._main = asyncio.current_task()
        if self._closing:
            return
        async with self.engine, Gateway(self.engine, model_name) as self.gateway:
            self._started.open()
            try:
                await asyncio.Event().wait()
            finally:
                for call in self._calls:
                    call.cancel()
                await asyncio.gather(*self._calls, return_exceptions=True)
