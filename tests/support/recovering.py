"""A pipeline in virtual time that recovers: the shipped Coordinator, Recovery, StageGroup, StageProcesses and sessions.

Only what a stage process is made of is pretended: its start takes virtual seconds, it can be killed or stopped at any
moment, and its messages go over a network that delays and reorders.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import count

from actorpp.coordinator.chunking.fixed import FixedChunks
from actorpp.coordinator.lifecycle import CoordinatorLife
from actorpp.coordinator.recovery import Recovery, RecoveryLimits
from actorpp.coordinator.request import Request
from actorpp.coordinator.scheduler import Scheduler
from actorpp.coordinator.scheduler_config import SchedulerConfig
from actorpp.coordinator.stage_group import StageGroup
from actorpp.coordinator.stage_process import StageEnd
from actorpp.errors import TransportError
from actorpp.runtime import ActorRef, ActorSystem
from actorpp.stages.links import Links
from actorpp.stages.messages import (
    DriverToStage,
    Fence,
    Fenced,
    Hello,
    Loaded,
    LogEntry,
    Output,
    Ping,
    Pong,
    Ready,
    SamplingParams,
    StageError,
    StageToDriver,
    Step,
    Topology,
)
from actorpp.stages.spec import StageSpec
from actorpp.stages.switch import EpochSwitch
from actorpp.stages.trace import SpanRecorder
from actorpp.testing import FakeNetwork
from tests.support.pipeline import Answer, FakeTensors, SimulatedHost, SimulatedSession

LOAD_S = 2.0
CONNECT_S = 30.0


class SimulatedStage:
    """One incarnation of a stage: the driver's port to it, and what runs behind."""

    def __init__(self, ports: SimulatedPorts, spec: StageSpec, number: int, deliver: Callable[[StageToDriver], None]):
        self.ports, self.spec = ports, spec
        self.switch = EpochSwitch()
        self.ended: asyncio.Future[StageEnd] = asyncio.get_running_loop().create_future()
        self.session: ActorRef | None = None
        self.beginning: asyncio.Task[None] | None = None
        self.going = asyncio.Event()  # cleared by a stop
        self.going.set()
        name = f"{spec.stage}#{number}"
        self.name = name
        self.to_driver = ports.network.link(f"to driver {name}", deliver)
        self.from_driver = ports.network.link(f"from driver {name}", self.receive)
        self.host = self.make_host()
        self.computing = asyncio.Event()  # cleared by a stop or a hang
        self.computing.set()
        self.life = ports.start(self.load())

    async def load(self) -> None:
        self.say(Hello(self.spec.stage, 0, 1, self.name))
        await asyncio.sleep(LOAD_S)
        await self.going.wait()
        self.say(Loaded(1, 1, self.ports.pages))

    def say(self, message: StageToDriver) -> None:
        if not self.ended.done() and self.going.is_set():
            self.to_driver.send(message)

    # --- the driver's port -------------------------------------------------------------------------------------------

    def send(self, message: DriverToStage) -> None:
        if self.ended.done():
            raise TransportError("no such peer is connected")
        self.from_driver.send(message)

    async def exited(self) -> StageEnd:
        return await asyncio.shield(self.ended)

    async def kill(self) -> None:
        self.die("was killed by the driver")
        await self.end_session()

    # --- faults ------------------------------------------------------------------------------------------------------

    def die(self, how: str = "was ended by signal 9", *, crashed: bool = False) -> None:
        """At once: nothing more is heard of it, but for what it had sent."""
        if not self.ended.done():
            self.ended.set_result(StageEnd(how, crashed))
            self.life.cancel()
            self.switch.close()
            self.computing.set()  # whoever waits for it need not any more
            self.ports.start(self.end_session())

    def stop(self) -> None:
        """As by SIGSTOP: it is there, and does nothing."""
        self.going.clear()
        self.hang()

    def hang(self) -> None:
        """Its loop answers, but the next step's compute never ends."""
        self.computing.clear()

    # --- the stage ---------------------------------------------------------------------------------------------------

    def receive(self, message: DriverToStage) -> None:
        if self.ended.done() or not self.going.is_set():
            return
        match message:
            case Ping(nonce):
                self.say(Pong(nonce, asyncio.get_running_loop().time() + self.host.skew, self.host.computing_s))
            case Topology():
                self.beginning = self.ports.start(self.begin(message))
            case Fence(epoch):
                self.ports.start(self.fence(epoch))
            case _:
                self.switch.deliver(message)  # type: ignore[arg-type]

    async def begin(self, topology: Topology) -> None:
        links = await self.ports.meet(self, topology)
        if links is None:
            self.say(StageError(topology.epoch, "transport_error", "could not meet the others"))
            return
        session = await self.ports.system.spawn(
            partial(self.make_session, links, topology), name=f"session {self.name}, {topology.epoch}"
        )
        self.session = session
        self.switch.open(topology.epoch, session, lambda error: self.broken(topology.epoch, error))
        if self.ended.done():
            await self.end_session()
        self.say(Ready(topology.epoch))

    def make_host(self) -> SimulatedHost:
        host = SimulatedHost(self.spec.stage, self.spec.num_stages)
        host.skew = self.ports.skews.get(self.spec.stage, 0.0)
        return host

    def make_session(self, links: Links, topology: Topology) -> SimulatedSession:
        self.host = self.make_host()
        session = SimulatedSession(
            self.host,
            links,
            async_depth=self.spec.async_depth,
            window=topology.window,
            max_admits=self.spec.max_running_requests,
            spans=SpanRecorder(False),
        )
        session.gate = self.computing
        session.seconds = self.compute
        return session

    def compute(self, step: Step) -> float:
        """Begins a step. Returns the seconds that it takes."""
        self.ports.computing(self, step)
        return 0.1

    def broken(self, epoch: int, error: Exception, code: str = "transport_error") -> None:
        self.switch.close()
        self.say(StageError(epoch, code, str(error)))

    async def fence(self, epoch: int) -> None:
        if self.beginning is not None:
            self.beginning.cancel()
            await asyncio.wait([self.beginning])
            self.beginning = None
        await self.computing.wait()
        await self.end_session()
        self.say(Fenced(epoch))

    async def end_session(self) -> None:
        self.switch.close()
        session, self.session = self.session, None
        if session is not None:
            await self.ports.system.kill(session)


class SimulatedPorts:
    """Ports of stages that are pretended."""

    def __init__(self, system: ActorSystem, network: FakeNetwork, pages: int) -> None:
        self.system, self.network, self.pages = system, network, pages
        self.stages: dict[int, SimulatedStage] = {}
        self.skews: dict[int, float] = {}  # seconds that a stage's clock is ahead of the driver's
        self.outputs: list[Output] = []  # as the driver sees them
        self.log: list[LogEntry] = []
        self.computing: Callable[[SimulatedStage, Step], None] = lambda stage, step: None  # at each step's beginning
        self._numbers = count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._meetings: dict[int, dict[int, SimulatedStage]] = {}
        self._tensors: dict[tuple[int, int], FakeTensors] = {}
        self._all_there = asyncio.Event()

    def start(self, coro) -> asyncio.Task[None]:  # type: ignore[no-untyped-def]
        task = asyncio.create_task(coro)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()

    async def launch(self, spec: StageSpec, deliver: Callable[[StageToDriver], None]) -> SimulatedStage:
        stage = self.stages[spec.stage] = SimulatedStage(self, spec, next(self._numbers), deliver)
        return stage

    async def prepare(self) -> None:
        pass

    def rendezvous(self, epoch: int) -> str:
        return str(epoch)

    def write(self, entry: LogEntry) -> None:
        self.log.append(entry)
        for stage in self.stages.values():
            stage.send(entry)

    async def close(self, grace_s: float) -> None:
        for stage in self.stages.values():
            await stage.kill()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def meet(self, stage: SimulatedStage, topology: Topology) -> Links | None:
        """As a process group: all come, or nobody gets through."""
        epoch, spec = topology.epoch, stage.spec
        there = self._meetings.setdefault(epoch, {})
        there[spec.stage] = stage
        self._all_there.set()
        try:
            async with asyncio.timeout(CONNECT_S):
                while len(there) < spec.num_stages:
                    self._all_there.clear()
                    await self._all_there.wait()
        except TimeoutError:
            return None
        following = there[(spec.stage + 1) % spec.num_stages]
        send = self.network.link(f"headers {stage.name}, {epoch}", following.switch.deliver)
        return Links(
            prev=self._tensor_link(spec.stage - 1, epoch) if spec.stage else None,
            next=None if spec.is_last else self._tensor_link(spec.stage, epoch),
            send_proxy=send.send,
            send_output=stage.say,
            feed_first=send.send,
        )

    def _tensor_link(self, stage: int, epoch: int) -> FakeTensors:
        if (stage, epoch) not in self._tensors:
            self._tensors[stage, epoch] = FakeTensors(self.network, f"tensors {stage}, {epoch}")
        return self._tensors[stage, epoch]


class RecoveringPipeline:
    """An engine without models. Open it inside ``actorpp.testing.run``."""

    def __init__(
        self,
        system: ActorSystem,
        network: FakeNetwork,
        *,
        stages: int,
        depth: int = 1,
        chunk: int = 64,
        pages: int = 200,
        running: int = 4,
        max_restarts: int = 1000,
        watchdog_s: float = 20.0,
    ) -> None:
        self.system, self.stages = system, stages
        self.depth, self.chunk, self.running = depth, chunk, running
        self.failure: Exception | None = None
        self.answers: list[Answer] = []
        self.ports = SimulatedPorts(system, network, pages)
        specs = [
            StageSpec(
                stage=stage,
                num_stages=stages,
                lo=stage,
                hi=stage + 1,
                model_path="",
                async_depth=depth,
                max_running_requests=running,
            )
            for stage in range(stages)
        ]
        self.group = StageGroup(
            specs,
            self.ports,
            system,
            watchdog_s=watchdog_s,
            on_output=self.deliver,
            on_lost=lambda stage, error: self.recovery.stage_lost(stage, error),
            on_epoch_lost=lambda epoch, error: self.recovery.epoch_lost(epoch, error),
            on_progress=lambda done, total: None,
        )
        self.requests = CoordinatorLife(
            system,
            self.group,
            self.make_scheduler,
            watchdog_s=watchdog_s,
            on_epoch_lost=lambda epoch, error: self.recovery.epoch_lost(epoch, error),
            on_failed=self.failed,
        )
        self.recovery = Recovery(self.group, RecoveryLimits(max_restarts, 60.0, watchdog_s), self.requests)

    def make_scheduler(self, pages: int) -> Scheduler:
        batched = self.chunk + self.running
        config = SchedulerConfig(self.stages, self.depth, 1, pages, 16, batched, batched, self.running, 256)
        return Scheduler(config, FixedChunks(self.chunk, align=16), epoch=0)

    def deliver(self, output: Output) -> None:
        self.ports.outputs.append(output)
        self.requests.deliver(output)

    def failed(self, error: Exception) -> None:
        self.failure = error

    async def open(self) -> None:
        self.actor = await self.system.spawn(lambda: self.recovery, name="recovery")

    async def close(self) -> None:
        await self.system.kill(self.actor)
        await self.requests.close()
        await self.group.close(1.0)

    def submit(self, prompt: tuple[int, ...], max_tokens: int) -> Answer:
        answer = Answer()
        self.answers.append(answer)
        request = Request(
            rid=len(self.answers),
            prompt=b"".join(token.to_bytes(4, "little") for token in prompt),
            prompt_len=len(prompt),
            max_tokens=max_tokens,
            sampling=SamplingParams(),
            stop_ids=frozenset(),
            sink=answer,
        )
        self.requests.submit(request)
        return answer
