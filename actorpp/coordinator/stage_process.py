"""StageProcess: the driver's actor for one stage, whether it runs as a child process or on this loop.

It knows how far its stage is (loaded, ready), asks it for things, and says when it is gone. The log and the Outputs do
not pass through it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol, TypeVar, assert_never

from actorpp.errors import StageFailedError, TransportError
from actorpp.runtime import Actor, Inbox, Request, guard_sleep
from actorpp.stages.messages import (
    DriverToStage,
    Fenced,
    GetTrace,
    Hello,
    Loaded,
    LoadProgress,
    Output,
    Ping,
    Pong,
    Ready,
    StageError,
    StageToDriver,
    Topology,
    TraceSpans,
)

T = TypeVar("T")

HEARTBEAT_S = 1.0


class StagePort(Protocol):
    """The driver's line to one stage."""

    def send(self, message: DriverToStage) -> None:
        """Never blocks. Raises TransportError when the stage cannot be reached."""
        ...

    async def exited(self) -> str:
        """Wait for the end of the stage's process, and say in words how it ended."""
        ...


class WaitLoaded(Request[Loaded], frozen=True):
    """Answered when the stage has its weights."""


class Begin(Request[Ready], frozen=True):
    """Begin an epoch; answered when the stage's session takes steps."""

    topology: Topology


class CollectTrace(Request[TraceSpans], frozen=True):
    """Answered with the spans since the last time."""


StageNews = Hello | LoadProgress | Loaded | Ready | Fenced | Pong | TraceSpans | StageError


class StageProcess(Actor):
    """Args:
    stage: Index of the stage.
    launch: Starts the stage, and gives what it says to the function it is called with.
    watchdog_s: Seconds without a sign of life of its loop after which the stage has failed.
    on_output: Called with each Output, at once.
    on_exit: Called with a StageFailedError when the stage has ended.
    on_error: Called with a StageFailedError when it reports an error, or gives no sign of life.
    on_hello: Called with the stage's first word.
    on_progress: Called with the stage, and how much of how much is loaded.
    """

    news = Inbox[StageNews](capacity=4096, priority=0)
    requests = Inbox[WaitLoaded | Begin | CollectTrace](capacity=16)

    def __init__(
        self,
        stage: int,
        launch: Callable[[Callable[[StageToDriver], None]], Awaitable[StagePort]],
        *,
        watchdog_s: float,
        on_output: Callable[[Output], None],
        on_exit: Callable[[Exception], None],
        on_error: Callable[[Exception], None],
        on_hello: Callable[[Hello], None],
        on_progress: Callable[[int, int, int], None],
    ) -> None:
        self.stage = stage
        self.launch = launch
        self.watchdog_s = watchdog_s
        self.on_output = on_output
        self.on_exit = on_exit
        self.on_error = on_error
        self.on_hello = on_hello
        self.on_progress = on_progress
        self.loaded: Loaded | None = None
        self.ready: Ready | None = None
        self.trace: dict[int, TraceSpans] = {}
        self.failure: StageFailedError | None = None
        self.alive_at = 0.0
        self.nonce = 0

    async def started(self) -> None:
        self.port = await self.launch(self.deliver)
        self.start(self.watch_exit(), name="watch exit")
        self.start(self.heartbeat(), name="heartbeat")

    def deliver(self, message: StageToDriver) -> None:
        """From the stage's socket. Outputs take the short way."""
        if isinstance(message, Output):
            self.on_output(message)
        else:
            self.ref[StageProcess.news].tell_nowait(message)

    async def watch_exit(self) -> None:
        self.fail(await self.port.exited(), self.on_exit)

    async def heartbeat(self) -> None:
        """The stage's loop must answer: a thread of ZeroMQ answers ZMTP's own heartbeat even when Python hangs."""
        loop = asyncio.get_running_loop()
        self.alive_at = loop.time()
        while self.failure is None:
            await guard_sleep(HEARTBEAT_S)
            if self.loaded is None:  # importing and loading hold the loop up; the start has a timeout of its own
                self.alive_at = loop.time()
            elif loop.time() - self.alive_at > self.watchdog_s:
                self.fail(f"its loop gave no sign of life for {self.watchdog_s:g} s", self.on_error)
            else:
                self.nonce += 1
                with suppress(TransportError):  # its exit tells why, or the next rounds find no sign of life
                    self.port.send(Ping(self.nonce))

    @news.handler
    def on_news(self, message: StageNews) -> None:
        self.alive_at = asyncio.get_running_loop().time()
        match message:
            case Hello():
                self.on_hello(message)
            case LoadProgress(done, total):
                self.on_progress(self.stage, done, total)
            case Loaded():
                self.loaded = message
            case Ready():
                self.ready = message
            case TraceSpans(nonce):
                self.trace[nonce] = message
            case StageError(_, _, text):
                self.fail(text, self.on_error)
            case Fenced() | Pong():
                pass
            case _:
                assert_never(message)
        self.notify()

    @requests.handler
    async def on_request(self, request: WaitLoaded | Begin | CollectTrace) -> Loaded | Ready | TraceSpans:
        match request:
            case WaitLoaded():
                return await self.wait_for(lambda: self.loaded)
            case Begin(topology):
                self.port.send(topology)
                return await self.wait_for(
                    lambda: self.ready if self.ready is not None and self.ready.epoch == topology.epoch else None
                )
            case CollectTrace():
                self.nonce += 1
                nonce = self.nonce
                self.port.send(GetTrace(nonce))
                return await self.wait_for(lambda: self.trace.pop(nonce, None))
        assert_never(request)

    async def wait_for(self, answer: Callable[[], T | None]) -> T:
        """Wait until the stage has answered. Raises StageFailedError when it has failed first."""
        found: list[T] = []

        def arrived() -> bool:
            if (value := answer()) is not None:
                found.append(value)
            return bool(found) or self.failure is not None

        await self.until(arrived)
        if found:
            return found[0]
        raise self.failure or StageFailedError(f"stage {self.stage} has failed", stage=self.stage)

    def fail(self, reason: str, report: Callable[[Exception], None]) -> None:
        error = StageFailedError(f"stage {self.stage}: {reason}", stage=self.stage)
        if self.failure is None:
            self.failure = error
            self.notify()
        report(error)
