"""One epoch of one stage: the actor that applies the coordinator's log in order.

It decides nothing, owns no weights, and imports no torch: computing is the host's, moving bytes is the links'. The main
loop is ``run``; everything else feeds it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from itertools import count
from time import monotonic
from typing import Any, Protocol

import msgspec

from actorpp.errors import ProtocolError
from actorpp.runtime import Actor, Channel, Inbox, Overflow, Request
from actorpp.stages.links import RECEIVE_BUFFERS, SEND_BUFFERS, Links, Tensor, Work
from actorpp.stages.messages import (
    Admit,
    End,
    FromOutput,
    LogEntry,
    Logprobs,
    Output,
    Proxy,
    Span,
    StageTiming,
    Step,
)
from actorpp.stages.trace import SpanRecorder

LOG_CAPACITY = 1024
WINDOW_CAPACITY = 256


class Launched(Protocol):
    """A step as the host computed it. ``hidden`` goes to the next stage; the last stage has none."""

    @property
    def hidden(self) -> Tensor | None: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def on_host(self) -> bool:
        """Whether ``fetch`` returns at once: there is no device to wait for."""
        ...

    @property
    def logprobs(self) -> dict[int, Logprobs]:
        """As in Output, and like the next one right only after ``fetch``."""
        ...

    @property
    def prompt_logprobs(self) -> dict[int, Logprobs]: ...


class Host(Protocol):
    """What a session needs of the stage's weights and KV. ``launch`` and ``fetch`` may block; the rest may not.

    Tensors and launched steps are the host's own: a session only passes them on.
    """

    @property
    def is_first(self) -> bool: ...
    @property
    def is_last(self) -> bool: ...
    def admit(self, admit: Admit) -> None: ...
    def launch(self, step: Step, hidden: Any, outputs: Mapping[int, Output]) -> Launched: ...
    def fetch(self, launched: Any) -> tuple[tuple[int, ...], dict[int, str]]: ...


class SessionStats(msgspec.Struct, frozen=True):
    """Where a session stands: log entries applied, and what waits in its mailboxes and buffers."""

    applied: int
    log: int
    headers: int
    received: int
    unsent: int
    outputs: int


class GetSessionStats(Request[SessionStats], frozen=True, tag="get_session_stats"):
    """Asks for SessionStats."""


class StageSession(Actor):
    """Applies one epoch's log.

    Args:
        host: The stage's weights and KV.
        links: This epoch's links.
        async_depth: Sampled steps that may wait for their host copy.
        window: Steps in flight at most, by the coordinator's credit.
        max_admits: Requests admitted at most, likewise.
        spans: Where spans go.

    It cannot be spawned (ActorDefinitionError) with a mailbox that does not hold what the coordinator's credit allows.
    """

    control = Inbox[GetSessionStats](capacity=64, priority=0)
    log = Inbox[LogEntry](capacity=LOG_CAPACITY, overflow=Overflow.FAIL, key=lambda entry: entry.seq)
    proxy = Inbox[Proxy](capacity=WINDOW_CAPACITY, overflow=Overflow.FAIL)
    output = Inbox[Output](capacity=WINDOW_CAPACITY, overflow=Overflow.FAIL)

    def __init__(
        self, host: Host, links: Links, *, async_depth: int, window: int, max_admits: int, spans: SpanRecorder
    ) -> None:
        self.host = host
        self.links = links
        self.spans = spans
        self.window = window
        self.max_admits = max_admits
        self.headers: deque[Proxy] = deque()  # no receive posted yet: all receive buffers are in use
        self.receiving: dict[int, tuple[Proxy, Work[Tensor]]] = {}  # by seq, in link order
        self.next_header = 0
        self.unsent: deque[tuple[Proxy, Work[object]]] = deque()  # oldest first
        self.sent = 0
        self.fed: dict[int, Output] = {}  # stage 0: ids from the last stage that a later segment may name
        self.launched: Channel[tuple[Step, Launched, tuple[StageTiming, ...]]] = Channel(async_depth + 1)
        self.applied = 0

    async def started(self) -> None:
        """Refuse to run where the coordinator's credit could overflow a mailbox."""
        StageSession.log.require_capacity(self.window + self.max_admits, self.log.capacity)
        StageSession.proxy.require_capacity(self.window, self.proxy.capacity)
        StageSession.output.require_capacity(self.window, self.output.capacity)

    # --- mailboxes ---------------------------------------------------------------------------------------------------

    @control.handler
    def on_control(self, message: GetSessionStats) -> SessionStats:
        return SessionStats(
            applied=self.applied,
            log=len(self.log),
            headers=len(self.headers),
            received=len(self.receiving),
            unsent=len(self.unsent),
            outputs=len(self.fed),
        )

    @proxy.handler
    def on_proxy(self, header: Proxy) -> None:
        """A header is in hand: post its receive as soon as a buffer is free, in link order."""
        if header.link_index != self.next_header:
            raise ProtocolError(f"header {header.link_index} on the link, expected {self.next_header}")
        self.next_header += 1
        self.headers.append(header)
        self.post_receives()

    @output.handler
    def on_output(self, output: Output) -> None:
        if len(self.fed) >= WINDOW_CAPACITY:
            raise ProtocolError(f"{len(self.fed)} outputs wait on the first stage, over the window of {self.window}")
        self.fed[output.seq] = output
        self.notify()

    # --- main task ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        emitter = self.start(self.emit(), name="emit") if self.host.is_last else None
        for seq in count():
            match await self.log.take(seq):
                case Admit() as admit:
                    self.host.admit(admit)
                case Step() as step:
                    hidden, timings = await self.input_of(step)
                    launched = await self.launch(step, hidden)
                    await self.pass_on(step, launched, timings)
                case End():
                    break
            self.applied = seq + 1
        while self.unsent:
            await self.commit_send()
        if emitter is not None:
            self.launched.close()
            await emitter

    async def input_of(self, step: Step) -> tuple[Tensor | None, tuple[StageTiming, ...]]:
        """Wait for what the step computes on: the landed hidden states, or on the first stage the ids it names."""
        waited = monotonic()
        if self.links.prev is None:
            for old in [seq for seq in self.fed if seq < step.watermark]:
                del self.fed[old]
            await self.until(lambda: all(seq in self.fed for seq in named_seqs(step)))
            self.spans.add(Span("wait", step.epoch, step.seq, waited, monotonic()))
            return None, ()
        await self.until(lambda: step.seq in self.receiving)
        header, work = self.receiving[step.seq]
        hidden = await work
        self.spans.add(Span("wait", step.epoch, step.seq, waited, monotonic()))
        lane = header.link_index % RECEIVE_BUFFERS
        self.spans.add(Span("receive", step.epoch, step.seq, work.posted_at, work.done_at, lane))
        del self.receiving[step.seq]
        self.post_receives()
        return hidden, header.timings

    def post_receives(self) -> None:
        """Post receives for headers in hand while buffers are free; what has landed holds its buffer until computed."""
        while self.headers and len(self.receiving) < RECEIVE_BUFFERS:
            if self.links.prev is None:
                raise ProtocolError("the first stage has no predecessor to receive hidden states from")
            header = self.headers.popleft()
            work = self.links.prev.post_recv(header.link_index, header.shape, header.dtype, header.nbytes)
            self.receiving[header.seq] = (header, work)
        self.notify()

    async def launch(self, step: Step, hidden: Tensor | None) -> Launched:
        """Compute the step in the session's thread."""
        return await self.offload(self.host.launch, step, hidden, self.outputs_for(step))

    def outputs_for(self, step: Step) -> dict[int, Output]:
        """Outputs whose ids are inputs of this step: on the first stage only, the others get hidden states."""
        return {seq: self.fed[seq] for seq in named_seqs(step)} if self.links.prev is None else {}

    async def fetch(self, launched: Launched) -> tuple[tuple[int, ...], dict[int, str]]:
        """The sampled ids, on the host. Where they are there already no thread is needed."""
        if launched.on_host:
            return self.host.fetch(launched)
        return await asyncio.to_thread(self.host.fetch, launched)

    async def pass_on(self, step: Step, launched: Launched, timings: tuple[StageTiming, ...]) -> None:
        """Hand the result to the next stage, or to the emitter on the last one. Waits while all buffers are in use."""
        self.spans.add(Span("compute", step.epoch, step.seq, launched.start, launched.end, segments=step.segments))
        timings = (*timings, StageTiming(launched.start, launched.end))
        if self.links.next is None or launched.hidden is None:
            await self.launched.put((step, launched, timings))
            return
        if len(self.unsent) >= SEND_BUFFERS:  # commit the oldest send before its buffer is used again
            await self.commit_send()
        hidden = launched.hidden
        header = Proxy(
            epoch=step.epoch,
            seq=step.seq,
            link_index=self.sent,
            shape=tuple(hidden.shape),
            dtype=str(hidden.dtype).removeprefix("torch."),
            nbytes=hidden.nbytes,
            timings=timings,
        )
        self.links.send_proxy(header)
        self.unsent.append((header, self.links.next.post_send(self.sent, hidden)))
        self.sent += 1

    async def commit_send(self) -> None:
        header, work = self.unsent[0]
        await work
        self.unsent.popleft()
        lane = header.link_index % SEND_BUFFERS
        self.spans.add(Span("send", header.epoch, header.seq, work.posted_at, work.done_at, lane))

    async def emit(self) -> None:
        """Behind the running step: wait for the host copy of the sampled ids, and tell who needs them."""
        async for step, launched, timings in self.launched:
            began = monotonic()
            ids, errors = await self.fetch(launched)
            self.spans.add(Span("sample", step.epoch, step.seq, began, monotonic()))
            fed = Output(epoch=step.epoch, seq=step.seq, ids=ids, timings=timings, errors=errors)
            if step.feeds:  # before all else: the first stage may stand still for it
                self.links.feed_first(fed)
            logprobs, prompt_logprobs = launched.logprobs, launched.prompt_logprobs
            self.links.send_output(msgspec.structs.replace(fed, logprobs=logprobs, prompt_logprobs=prompt_logprobs))


def named_seqs(step: Step) -> set[int]:
    """Steps whose sampled ids are inputs of this one."""
    return {segment.token.seq for segment in step.segments if isinstance(segment.token, FromOutput)}
