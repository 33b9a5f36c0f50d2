"""The actor that lives as long as a stage process: it loads the weights, and begins and ends the epochs around them.

An epoch is a StageSession with links of its own. What arrives for a session goes to it through the EpochSwitch, not
through this actor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Protocol

import structlog

from actorpp.errors import ActorppError
from actorpp.runtime import Actor, ActorRef, Inbox
from actorpp.stages.host import StageHost
from actorpp.stages.links import Links
from actorpp.stages.messages import (
    Fence,
    Fenced,
    GetTrace,
    Loaded,
    LoadProgress,
    Ping,
    Pong,
    Ready,
    StageCounters,
    StageError,
    StageToDriver,
    Topology,
    TraceSpans,
)
from actorpp.stages.selfcheck import check_model_type
from actorpp.stages.session import StageSession
from actorpp.stages.switch import EpochSwitch
from actorpp.stages.trace import SpanRecorder

log = structlog.get_logger(__name__)

# A fence waits for the step that is being computed, however long it takes: the driver ends the process if it loses
# patience.
COMPUTE_GRACE_S = 3600.0


class Wiring(Protocol):
    """How one stage is connected to the driver and its neighbours.

    Attributes:
        sent_bytes: Of tensors, whose transfer to the next stage has ended, in all epochs.
    """

    sent_bytes: int

    def to_driver(self, message: StageToDriver) -> None:
        """Send, never blocking."""
        ...

    async def connect(self, topology: Topology, on_failure: Callable[[ActorppError], None]) -> Links:
        """The links of a new epoch. ``on_failure`` is called at most once, when they break."""
        ...

    async def disconnect(self) -> None:
        """Close the links of the epoch, if there are any."""
        ...


class StageNode(Actor):
    """Owns one StageHost.

    Args:
        host: Not yet loaded.
        wiring: The way out.
        switch: The way in for sessions.
    """

    control = Inbox[Ping | GetTrace](capacity=64, priority=0)
    epochs = Inbox[Topology | Fence](capacity=16)

    def __init__(self, host: StageHost, wiring: Wiring, switch: EpochSwitch, spans: SpanRecorder) -> None:
        self.host = host
        self.wiring = wiring
        self.switch = switch
        self.spans = spans
        self.session: ActorRef | None = None
        self.epoch: int | None = None
        self.beginning: asyncio.Task[None] | None = None

    async def started(self) -> None:
        self.start(self.load(), name="load")

    async def load(self) -> None:
        loop = asyncio.get_running_loop()

        def progress(phase: str, done: int, total: int) -> None:
            loop.call_soon_threadsafe(self.wiring.to_driver, LoadProgress(done, total))

        try:
            await self.offload(check_model_type, self.host.spec)
            await self.offload(self.host.load, progress)
            max_pages = self.host.max_pages(
                kv_tokens=self.host.spec.kv_tokens, mem_fraction_static=self.host.spec.mem_fraction_static
            )
        except ActorppError as error:  # the model's or the machine's fault, not this actor's
            self.wiring.to_driver(StageError(None, error.code, error.message))
            return
        self.wiring.to_driver(
            Loaded(
                weight_bytes=self.host.loaded_bytes,
                page_bytes=self.host.kv_bytes_per_page,
                max_pages=max_pages,
            )
        )

    @control.handler
    def on_control(self, message: Ping | GetTrace) -> None:
        match message:
            case Ping(nonce):
                counters = StageCounters(
                    dead_letters=self.switch.dead_letters,
                    sent_bytes=self.wiring.sent_bytes,
                    mailboxes={} if self.session is None else self.session.depths,
                )
                self.wiring.to_driver(Pong(nonce, monotonic(), self.host.computing_s, counters))
            case GetTrace(nonce):
                spans, dropped = self.spans.take()
                self.wiring.to_driver(TraceSpans(nonce, spans, dropped))

    @epochs.handler
    async def on_epoch(self, message: Topology | Fence) -> None:
        match message:
            case Topology():
                await self.end_epoch()
                self.epoch = message.epoch
                # A task: the other stages may never come, and a fence must get through.
                self.beginning = self.start(self.try_begin(message), name="begin")
            case Fence(epoch):
                if self.epoch is not None and self.epoch <= epoch:
                    await self.end_epoch()
                self.wiring.to_driver(Fenced(epoch))

    async def try_begin(self, topology: Topology) -> None:
        try:
            await self.begin(topology)
        except ActorppError as error:  # the others', or the network's: the driver tries again
            self.epoch_failed(topology.epoch, error)

    async def begin(self, topology: Topology) -> None:
        """A fresh session on empty request state; weights and arena stay."""
        if self.host.arena.num_pages != topology.num_pages:
            await self.offload(self.host.allocate, topology.num_pages)
        failed = partial(self.epoch_failed, topology.epoch)
        links = await self.wiring.connect(topology, failed)
        session = await self.spawn(
            lambda: StageSession(
                self.host,
                links,
                async_depth=self.host.spec.async_depth,
                window=topology.window,
                max_admits=self.host.spec.max_running_requests,
                spans=self.spans,
            ),
            name=f"session-{self.host.spec.stage}-{topology.epoch}",
        )
        self.session = session
        self.switch.open(topology.epoch, session, failed)
        self.start(self.report_end_of(session, topology.epoch), name="watch session")
        self.wiring.to_driver(Ready(topology.epoch))

    async def end_epoch(self) -> None:
        """Returns with the compute idle and nothing of the epoch left."""
        self.switch.close()
        self.epoch = None
        if self.beginning is not None:
            self.beginning.cancel()
            await asyncio.wait([self.beginning])
            self.beginning = None
        session, self.session = self.session, None
        if session is not None:
            await self.system.kill(session, grace=COMPUTE_GRACE_S)
            await self.offload(self.host.reset)
        await self.wiring.disconnect()

    async def stopping(self) -> None:
        await self.wiring.disconnect()

    async def report_end_of(self, session: ActorRef, epoch: int) -> None:
        end = await session.join()
        if end.error is not None:
            self.epoch_failed(epoch, end.error)

    def epoch_failed(self, epoch: int, error: Exception) -> None:
        """The driver decides what follows; this stage takes no more of the epoch's envelopes."""
        if epoch != self.epoch:  # it was ended, and another one may have begun
            return
        self.switch.close()
        code = error.code if isinstance(error, ActorppError) else "internal"
        expected = isinstance(error, ActorppError)  # a neighbour's end, as a rule
        log.warning("the epoch failed", epoch=epoch, error=str(error), exc_info=None if expected else error)
        self.wiring.to_driver(StageError(epoch, code, f"{type(error).__name__}: {error}"))
