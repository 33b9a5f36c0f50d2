"""A pipeline in virtual time: the shipped Coordinator and StageSessions, stages that only pretend to compute.

A pretended layer mixes each token's value with all values before it in its request, so that a step out of order, a lost
or doubled token or a wrong page of history changes the sampled ids. ``expected_ids`` computes them directly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from zlib import crc32

from actorpp.coordinator.chunking.fixed import FixedChunks
from actorpp.coordinator.coordinator import Abort, Coordinator, GiveUp, Resume, Submit, Suspend
from actorpp.coordinator.request import EndReason, Request
from actorpp.coordinator.scheduler import Scheduler
from actorpp.coordinator.scheduler_config import SchedulerConfig
from actorpp.errors import RequestError, StageFailedError
from actorpp.runtime import ActorRef, ActorSystem
from actorpp.stages.links import Links
from actorpp.stages.messages import Admit, FromOutput, LogEntry, Logprobs, Output, SamplingParams, Step
from actorpp.stages.session import StageSession
from actorpp.stages.switch import EpochSwitch
from actorpp.stages.trace import SpanRecorder
from actorpp.testing import FakeNetwork

VOCAB = 1000
LAYERS = 12


def mix(layer: int, history: int, value: int) -> int:
    return crc32(b"%d %d %d" % (layer, history, value))


@cache
def expected_ids(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The ids that a pipeline of any number of stages must sample, one token at a time."""
    histories = [0] * LAYERS
    tokens = list(prompt)
    ids: list[int] = []
    at = 0
    while len(ids) < count:
        value = tokens[at]
        for layer in range(LAYERS):
            histories[layer] = value = mix(layer, histories[layer], value)
        at += 1
        if at >= len(prompt):
            ids.append(value % VOCAB)
            tokens.append(ids[-1])
    return tuple(ids)


@dataclass
class Hidden:
    """Stands for a tensor: one value per token."""

    values: list[int]
    dtype: str = "torch.float32"

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.values), 1)

    @property
    def nbytes(self) -> int:
        return 4 * len(self.values)


@dataclass
class Result:
    hidden: Hidden | None
    start: float
    end: float
    ids: tuple[int, ...]
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    on_host: bool = True


class SimulatedHost:
    """The compute of one stage."""

    def __init__(self, stage: int, num_stages: int) -> None:
        self.is_first = stage == 0
        self.is_last = stage == num_stages - 1
        per_stage = LAYERS // num_stages
        self.layers = range(stage * per_stage, LAYERS if self.is_last else (stage + 1) * per_stage)
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.histories: dict[int, dict[int, int]] = {}
        self.steps: list[Step] = []
        self.admitted: list[int] = []
        self.began: float | None = None
        self.skew = 0.0  # seconds that the stage's clock is ahead

    @property
    def computing_s(self) -> float:
        """Seconds that the step under way has taken so far."""
        return 0.0 if self.began is None else asyncio.get_running_loop().time() - self.began

    @property
    def applied(self) -> int:
        """Log entries."""
        return len(self.admitted) + len(self.steps)

    def admit(self, admit: Admit) -> None:
        assert admit.rid not in self.histories
        self.admitted.append(admit.rid)
        self.tokens[admit.rid] = list(memoryview(admit.tokens or b"").cast("i"))
        self.computed[admit.rid] = 0
        self.histories[admit.rid] = dict.fromkeys(self.layers, 0)

    def launch(self, step: Step, hidden: Hidden | None, outputs: Mapping[int, Output]) -> Result:
        for rid in step.retire:
            del self.histories[rid]
        self.steps.append(step)
        values = hidden.values if hidden is not None else self.embed(step, outputs)
        assert len(values) == step.num_tokens
        out: list[int] = []
        ids: list[int] = []
        for segment in step.segments:
            assert segment.start == self.computed[segment.rid], "a segment out of order"
            self.computed[segment.rid] += segment.length
            histories = self.histories[segment.rid]
            for value in values[len(out) : len(out) + segment.length]:
                for layer in self.layers:
                    histories[layer] = value = mix(layer, histories[layer], value)
                out.append(value)
            if segment.sample:
                ids.append(out[-1] % VOCAB)
        return Result(None if self.is_last else Hidden(out), 0.0, 0.0, tuple(ids) if self.is_last else ())

    def embed(self, step: Step, outputs: Mapping[int, Output]) -> list[int]:
        values: list[int] = []
        for segment in step.segments:
            match segment.token:
                case None:
                    values += self.tokens[segment.rid][segment.start : segment.start + segment.length]
                case FromOutput(seq, index):
                    values.append(outputs[seq].ids[index])
                case literal:
                    values.append(literal)
        return values

    def fetch(self, launched: Result) -> tuple[tuple[int, ...], dict[int, str]]:
        return launched.ids, {}


class SimulatedSession(StageSession):
    """A session whose compute takes virtual seconds. ``gate`` closed holds it before the next step."""

    host: SimulatedHost
    seconds: Callable[[Step], float]
    gate: asyncio.Event

    async def launch(self, step: Step, hidden: object) -> Result:
        self.host.began = asyncio.get_running_loop().time()
        seconds = self.seconds(step)
        await self.gate.wait()
        start = asyncio.get_running_loop().time()
        await asyncio.sleep(seconds)
        result = self.host.launch(step, hidden, self.outputs_for(step))
        self.host.began = None
        skew = self.host.skew
        result.start, result.end = start + skew, asyncio.get_running_loop().time() + skew
        return result


class Transfer(asyncio.Future[Hidden]):
    posted_at = done_at = 0.0


class FakeTensors:
    """A tensor link like NCCL's: no tags, a send is done when the other side has posted and the data has landed."""

    def __init__(self, network: FakeNetwork, name: str) -> None:
        self.landed: list[tuple[Hidden, Transfer]] = []
        self.posted: list[tuple[tuple[int, ...], Transfer]] = []
        self.link = network.link(name, self.arrive)

    def post_send(self, link_index: int, tensor: Hidden) -> Transfer:
        work = Transfer()
        self.link.send((tensor, work))
        return work

    def post_recv(self, link_index: int, shape: tuple[int, ...], dtype: str, nbytes: int) -> Transfer:
        work = Transfer()
        self.posted.append((tuple(shape), work))
        self.match()
        return work

    def arrive(self, sent: tuple[Hidden, Transfer]) -> None:
        self.landed.append(sent)
        self.match()

    def match(self) -> None:
        while self.landed and self.posted:
            (tensor, sent), (shape, received) = self.landed.pop(0), self.posted.pop(0)
            assert tensor.shape == shape, "a tensor landed in another one's buffer"
            for work in (sent, received):
                if not work.cancelled():  # by its stage's death
                    work.set_result(tensor)


@dataclass
class Answer:
    """A sink that can be awaited."""

    ids: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    end: EndReason | RequestError | None = None
    ended_at: float = 0.0
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def progress(self, computed: int, total: int) -> None:
        self.computed.append(computed)

    def prompt_logprobs(self, logprobs: Logprobs) -> None:
        raise AssertionError("nobody asked")

    def tokens(self, ids: tuple[int, ...], logprobs: Logprobs | None = None) -> None:
        assert self.end is None
        self.ids.extend(ids)

    def ended(self, reason: EndReason) -> None:
        self.finish(reason)

    def failed(self, error: RequestError) -> None:
        self.finish(error)

    def finish(self, end: EndReason | RequestError) -> None:
        assert self.end is None, "two final answers"
        self.end = end
        self.ended_at = asyncio.get_running_loop().time()
        self.done.set()


class SimulatedPipeline:
    """Coordinator and sessions on a fake network. Open it inside ``actorpp.testing.run``.

    A lost epoch fails every request, unless ``next_epoch`` is called for it.
    """

    def __init__(
        self,
        system: ActorSystem,
        network: FakeNetwork,
        *,
        stages: int,
        depth: int = 1,
        lookahead: int = 1,
        chunk: int = 64,
        pages: int = 1000,
        running: int = 16,
        queued: int = 256,
        watchdog_s: float = 1e6,
        seconds: Callable[[int, Step], float] = lambda stage, step: 0.1,
    ) -> None:
        self.system = system
        self.network = network
        self.stages = stages
        self.seconds = seconds
        self.watchdog_s = watchdog_s
        self.failures: list[Exception] = []
        self.epoch = 0
        self.down = False  # no epoch runs
        self.gates = [asyncio.Event() for _ in range(stages)]
        config = SchedulerConfig(
            num_stages=stages,
            async_depth=depth,
            lookahead=lookahead,
            num_pages=pages,
            page_size=16,
            max_num_batched_tokens=chunk + running,
            max_prefill_tokens=chunk + running,
            max_running_requests=running,
            max_queued_requests=queued,
        )
        self.scheduler = Scheduler(config, FixedChunks(chunk, align=16), epoch=1)
        self.sessions: list[ActorRef] = []
        self.log: list[LogEntry] = []
        self.arrived = [0] * stages  # log entries at each stage's switch, of the epoch that ran
        self.applied = [0] * stages  # of these in lost epochs, those that were taken from the mailbox and applied
        self.stale = 0  # entries of epoch 0 that became dead letters there
        self.requests: dict[Request, Answer] = {}

    async def open(self) -> None:
        """Spawn every session and the coordinator."""
        self.switches = [EpochSwitch() for _ in range(self.stages)]
        self.outputs = self.network.link("outputs", lambda output: self.deliver_output(output))
        self.log_links = [self.network.link(f"log {i}", partial(self.deliver_log, i)) for i in range(self.stages)]
        await self.begin()
        self.coordinator = await self.system.spawn(
            lambda: Coordinator(self.scheduler, self, watchdog_s=self.watchdog_s, on_failure=self.failed),
            name="coordinator",
        )
        self.resume()

    def resume(self) -> None:
        self.coordinator[Coordinator.control].tell_nowait(Resume(self.epoch))

    async def begin(self) -> None:
        """Spawn the sessions of the next epoch, on empty stages and new links."""
        self.epoch += 1
        self.down = False
        self.hosts = [SimulatedHost(stage, self.stages) for stage in range(self.stages)]
        self.sessions.clear()
        tensors = [FakeTensors(self.network, f"tensors {i}, {self.epoch}") for i in range(self.stages - 1)]
        feed = self.network.link(f"feed {self.epoch}", self.switches[0].deliver)
        for stage in range(self.stages):
            following = self.switches[(stage + 1) % self.stages]
            to_next = self.network.link(f"headers {stage}, {self.epoch}", following.deliver)
            links = Links(
                prev=tensors[stage - 1] if stage else None,
                next=tensors[stage] if stage < self.stages - 1 else None,
                send_proxy=to_next.send,
                send_output=self.outputs.send,
                feed_first=feed.send,
            )
            self.gates[stage].set()
            session = await self.system.spawn(partial(self.session, stage, links), name=f"stage-{stage}")
            self.switches[stage].open(self.epoch, session, self.failures.append)
            self.sessions.append(session)

    async def next_epoch(self, downtime_s: float) -> None:
        """The running epoch is lost, and another one stands after a while."""
        self.coordinator[Coordinator.control].tell_nowait(Suspend())
        self.down = True
        for switch in self.switches:
            switch.close()
        for stage, session in enumerate(self.sessions):
            await self.system.kill(session)
            self.applied[stage] += self.hosts[stage].applied
        await asyncio.sleep(downtime_s)
        await self.begin()
        self.resume()

    def failed(self, epoch: int, error: Exception) -> None:
        self.failures.append(error)
        self.coordinator[Coordinator.control].tell_nowait(GiveUp(StageFailedError(str(error))))

    def session(self, stage: int, links: Links) -> SimulatedSession:
        config = self.scheduler.config
        session = SimulatedSession(
            self.hosts[stage],
            links,
            async_depth=config.async_depth,
            window=config.window,
            max_admits=config.max_running_requests,
            spans=SpanRecorder(False),
        )
        session.gate = self.gates[stage]
        session.seconds = lambda step: self.seconds(stage, step)
        return session

    def deliver_output(self, output: Output) -> None:
        self.coordinator[Coordinator.outputs].tell_nowait(output)

    def deliver_log(self, stage: int, entry: LogEntry) -> None:
        switch = self.switches[stage]
        before = switch.dead_letters
        switch.deliver(entry)
        refused = switch.dead_letters - before
        if entry.epoch == self.epoch and not self.down:
            self.arrived[stage] += 1
        else:
            assert refused == 1
            self.stale += entry.epoch == 0

    def write(self, entry: LogEntry) -> None:
        self.log.append(entry)
        for link in self.log_links:
            link.send(entry)

    def submit(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        stop: frozenset[int] = frozenset(),
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> Answer:
        answer = Answer()
        request = Request(
            rid=len(self.requests) + 1,
            prompt=b"".join(token.to_bytes(4, "little") for token in prompt),
            prompt_len=len(prompt),
            max_tokens=max_tokens,
            sampling=SamplingParams(),
            stop_ids=stop,
            sink=answer,
            priority=priority,
            deadline_at=None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s,
        )
        self.requests[request] = answer
        self.coordinator[Coordinator.requests].tell_nowait(Submit(request))
        return answer

    def abort(self, answer: Answer) -> None:
        request = next(r for r, a in self.requests.items() if a is answer)
        self.coordinator[Coordinator.control].tell_nowait(Abort(request))

    async def finish(self) -> None:
        """Wait until every request has ended and every step is back."""
        for answer in self.requests.values():
            await answer.done.wait()
        while self.scheduler.in_flight:  # noqa: ASYNC110 - virtual time: the sleep costs nothing
            await asyncio.sleep(0.1)
