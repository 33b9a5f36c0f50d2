"""StageProcess: the driver's actor for one stage, whether it runs as a child process or on this loop.

It knows how far its stage is (loaded, ready, fenced), asks it for things, and says when it is lost, or only its epoch.
It is one incarnation of the stage: its own end is the stage's. The log and the Outputs do not pass through it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple, Protocol, TypeVar, assert_never

from actorpp.errors import (
    ActorppError,
    ActorStoppedError,
    StageCrashedError,
    StageFailedError,
    StageLoadError,
    TransportError,
)
from actorpp.runtime import Actor, Inbox, Request, guard_sleep
from actorpp.stages.messages import (
    DriverToStage,
    Fence,
    Fenced,
    GetTrace,
    Hello,
    Loaded,
    LoadProgress,
    Output,
    Ping,
    Pong,
    Ready,
    StageCounters,
    StageError,
    StageToDriver,
    Topology,
    TraceSpans,
)

T = TypeVar("T")

HEARTBEAT_S = 1.0
ONE_CLOCK_S = 0.01  # clocks that need not differ by more are one: that of the host
CLOCK_SAMPLES = 64  # newest answers to pings: clocks of two hosts drift
LOADING_PATIENCE_S = 60.0  # the watchdog's at least while loading holds a stage's loop up


class StageEnd(NamedTuple):
    """How a stage ended, in words; and whether by its own doing, not because somebody ended it."""

    how: str
    crashed: bool


class StagePort(Protocol):
    """The driver's line to one stage."""

    def send(self, message: DriverToStage) -> None:
        """Never blocks. Raises TransportError when the stage cannot be reached."""
        ...

    async def exited(self) -> StageEnd:
        """Wait for the end of the stage's process."""
        ...

    async def kill(self) -> None:
        """End the stage at once, even a stopped one; returns when it is gone."""
        ...


class WaitLoaded(Request[Loaded], frozen=True):
    """Answered when the stage has its weights."""


class Begin(Request[Ready], frozen=True):
    """Begin an epoch; answered when the stage's session takes steps. Fails if the epoch is lost meanwhile."""

    topology: Topology


class EndEpoch(Request[Fenced], frozen=True):
    """End the epoch, or what has begun of it; answered when the stage's compute is idle."""

    epoch: int


class CollectTrace(Request[TraceSpans], frozen=True):
    """Answered with the spans since the last time."""


Asked = WaitLoaded | Begin | EndEpoch | CollectTrace
StageNews = Hello | LoadProgress | Loaded | Ready | Fenced | Pong | TraceSpans | StageError


class StageProcess(Actor):
    """Args:
    stage: Index of the stage.
    launch: Starts the stage, and gives what it says to the function it is called with.
    watchdog_s: Seconds without a sign of life of its loop after which the stage has failed.
    on_output: Called with each Output, at once.
    on_lost: Called once with a StageFailedError: it has ended, reports that it cannot go on, or gives no sign of life.
    on_epoch_lost: Called with the epoch and a StageFailedError when the stage cannot go on with it.
    on_hello: Called with the stage's first word.
    on_counters: Called with each heartbeat's counters.
    on_progress: Called with the stage, and how much of how much is loaded.
    on_clock: Called with how many seconds the stage's clock is ahead of this loop's, whenever that is measured.
    """

    news = Inbox[StageNews](capacity=4096, priority=0)
    requests = Inbox[Asked](capacity=16)

    def __init__(
        self,
        stage: int,
        launch: Callable[[Callable[[StageToDriver], None]], Awaitable[StagePort]],
        *,
        watchdog_s: float,
        on_output: Callable[[Output], None],
        on_lost: Callable[[StageFailedError], None],
        on_epoch_lost: Callable[[int, StageFailedError], None],
        on_hello: Callable[[Hello], None],
        on_counters: Callable[[StageCounters], None],
        on_progress: Callable[[int, int, int], None],
        on_clock: Callable[[float], None],
    ) -> None:
        self.stage = stage
        self.launch = launch
        self.port: StagePort | None = None
        self.watchdog_s = watchdog_s
        self.on_output = on_output
        self.on_lost = on_lost
        self.on_epoch_lost = on_epoch_lost
        self.on_hello = on_hello
        self.on_counters = on_counters
        self.on_progress = on_progress
        self.on_clock = on_clock
        self.greeted = False
        self.loaded: Loaded | None = None
        self.ready: Ready | None = None
        self.fenced: Fenced | None = None
        self.lost_epoch: tuple[int, StageFailedError] | None = None  # the last one that it could not go on with
        self.trace: dict[int, TraceSpans] = {}
        self.failure: StageFailedError | None = None
        self.alive_at = 0.0
        self.nonce = 0
        self.pinged_at = 0.0
        self.clocks: deque[tuple[float, float]] = deque(maxlen=CLOCK_SAMPLES)  # round trip, and how far it is ahead

    async def started(self) -> None:
        self.port = port = await self.launch(self.deliver)
        self.start(self.watch_exit(port), name="watch exit")
        self.start(self.heartbeat(), name="heartbeat")

    def deliver(self, message: StageToDriver) -> None:
        """From the stage's socket. Outputs take the short way."""
        if isinstance(message, Output):
            self.on_output(message)
        else:
            with suppress(ActorStoppedError):  # the stage is being ended; the message is counted as a dead letter
                self.ref[StageProcess.news].tell_nowait(message)

    async def watch_exit(self, port: StagePort) -> None:
        end = await port.exited()
        kind = StageCrashedError if end.crashed else StageFailedError
        self.fail(kind(f"stage {self.stage}: {end.how}", stage=self.stage))

    async def stopping(self) -> None:
        """The stage ends with its actor."""
        if self.port is not None:
            await self.port.kill()

    @property
    def patience(self) -> float:
        """Seconds without a sign of life, or with one step, that are too many: one heartbeat later is the watchdog's
        time, and by then it must have been noticed."""
        return max(self.watchdog_s - HEARTBEAT_S, self.watchdog_s / 2)

    async def heartbeat(self) -> None:
        """The stage's loop must answer: a thread of ZeroMQ answers ZMTP's own heartbeat even when Python hangs."""
        loop = asyncio.get_running_loop()
        self.alive_at = loop.time()
        while self.failure is None:
            await guard_sleep(HEARTBEAT_S)
            patience = self.patience if self.loaded is not None else max(self.patience, LOADING_PATIENCE_S)
            if not self.greeted:  # it imports, and has no loop yet: the start has a timeout of its own
                self.alive_at = loop.time()  # no ping either: its socket may be there before the actor that answers
            elif loop.time() - self.alive_at > patience:
                silent = f"stage {self.stage}: its loop gave no sign of life for {patience:g} s"
                self.fail(StageFailedError(silent, stage=self.stage))
            else:
                self.ping()

    def ping(self) -> None:
        self.nonce += 1
        self.pinged_at = asyncio.get_running_loop().time()
        self.send(Ping(self.nonce))

    @news.handler
    def on_news(self, message: StageNews) -> None:
        self.alive_at = asyncio.get_running_loop().time()
        match message:
            case Hello():
                self.greeted = True
                self.on_hello(message)
            case LoadProgress(done, total):
                self.on_progress(self.stage, done, total)
            case Loaded():
                self.loaded = message
            case Ready():
                self.ready = message
                self.ping()  # before the first step its loop is quick to say what its clock is
            case TraceSpans(nonce):
                self.trace[nonce] = message
            case StageError(epoch, code, text):
                self.on_stage_error(epoch, code, f"stage {self.stage}: {text}")
            case Fenced():
                self.fenced = message
            case Pong():
                self.on_pong(message)
            case _:
                assert_never(message)
        self.notify()

    def on_pong(self, pong: Pong) -> None:
        """Its loop lives; its compute may hang, and its clock be another one."""
        self.on_counters(pong.counters)
        if pong.nonce == self.nonce:
            now = asyncio.get_running_loop().time()
            self.clocks.append((now - self.pinged_at, pong.clock - (now + self.pinged_at) / 2))
            self.on_clock(self.clock_ahead)
        if pong.computing_s > self.patience:
            slow = f"stage {self.stage}: one step has taken {pong.computing_s:.3g} s"
            self.fail(StageCrashedError(slow, stage=self.stage))

    @property
    def clock_ahead(self) -> float:
        """Seconds that the stage's clock is ahead of this loop's, by its quickest answer to a ping (Cristian 1989), of
        which half the round trip may be wrong. 0 where it may be the same clock, as it is on one host."""
        trip, ahead = min(self.clocks, default=(0.0, 0.0))
        return ahead if abs(ahead) > trip / 2 + ONE_CLOCK_S else 0.0

    def on_stage_error(self, epoch: int | None, code: str, text: str) -> None:
        kind = StageCrashedError if code == ActorppError.code else StageFailedError
        if epoch is None:
            self.fail((StageLoadError if self.loaded is None else kind)(text, stage=self.stage))
        else:
            self.lost_epoch = (epoch, kind(text, stage=self.stage))
            self.on_epoch_lost(*self.lost_epoch)

    @requests.handler
    def on_request(self, request: Asked) -> asyncio.Task[Loaded | Ready | Fenced | TraceSpans]:
        """Answered when the stage has: what it is asked for next does not wait for that."""
        return self.start(self.answer(request), name=type(request).__name__)

    async def answer(self, request: Asked) -> Loaded | Ready | Fenced | TraceSpans:
        """Raises StageFailedError when the stage is lost, or the epoch that was to begin."""
        match request:
            case WaitLoaded():
                return await self.wait_for(lambda: self.loaded)
            case Begin(topology):
                self.send(topology)
                return await self.wait_for(lambda: self.begun(topology.epoch))
            case EndEpoch(epoch):
                if self.loaded is None:  # it has begun nothing
                    return Fenced(epoch)
                self.send(Fence(epoch))
                return await self.wait_for(lambda: self.fenced if self.fenced == Fenced(epoch) else None)
            case CollectTrace():
                self.nonce += 1
                nonce = self.nonce
                self.send(GetTrace(nonce))
                return await self.wait_for(lambda: self.trace.pop(nonce, None))
        assert_never(request)

    def begun(self, epoch: int) -> Ready | None:
        if self.lost_epoch is not None and self.lost_epoch[0] == epoch:
            raise self.lost_epoch[1]
        return self.ready if self.ready == Ready(epoch) else None

    def send(self, message: DriverToStage) -> None:
        with suppress(TransportError):  # it is gone: its exit says so, and ends the wait for the answer
            if self.port is not None:
                self.port.send(message)

    async def wait_for(self, answer: Callable[[], T | None]) -> T:
        """Wait until the stage has answered. Raises StageFailedError when it is lost first."""
        found: list[T] = []

        def arrived() -> bool:
            if (value := answer()) is not None:
                found.append(value)
            return bool(found) or self.failure is not None

        await self.until(arrived)
        if found:
            return found[0]
        raise self.failure or StageFailedError(f"stage {self.stage} has failed", stage=self.stage)

    def fail(self, error: StageFailedError) -> None:
        if self.failure is None:
            self.failure = error
            self.notify()
            self.on_lost(error)
