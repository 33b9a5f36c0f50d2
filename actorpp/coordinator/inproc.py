"""Stages on the driver's own loop: the same actors, with function calls for sockets. For embedding, tests, and several
stages on one GPU. This module imports torch.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from actorpp.coordinator.stage_process import StageEnd
from actorpp.errors import ActorppError, ActorStoppedError, TransportError
from actorpp.runtime import ActorRef, ActorSystem
from actorpp.stages.host import StageHost
from actorpp.stages.links import Links
from actorpp.stages.messages import (
    Admit,
    Become,
    DriverToStage,
    End,
    Fence,
    GetTrace,
    Hello,
    LogEntry,
    Ping,
    Shutdown,
    StageToDriver,
    StageToStage,
    Step,
    Topology,
)
from actorpp.stages.node import StageNode
from actorpp.stages.spec import StageSpec
from actorpp.stages.switch import EpochSwitch
from actorpp.stages.tensor_io import TensorInlet, TensorOutlet
from actorpp.stages.trace import SpanRecorder
from actorpp.transport.inproc import InprocLink, inproc_links


class InprocPort:
    """One stage on this loop: the driver's line to it, and its wiring to the others."""

    def __init__(self, ports: InprocPorts, spec: StageSpec, deliver: Callable[[StageToDriver], None]) -> None:
        self._ports = ports
        self._deliver = deliver
        self.spec = spec
        self.switch = EpochSwitch()
        self.host = StageHost(spec)
        self.node: ActorRef | None = None
        self._links: InprocLink | None = None
        self.sent_bytes = 0

    # --- the driver's line -------------------------------------------------------------------------------------------

    def send(self, message: DriverToStage) -> None:
        """Deliver at once. Raises TransportError when the stage is not there."""
        try:
            self._pass_on(message)
        except ActorStoppedError:
            raise TransportError(f"stage {self.spec.stage} is not running") from None

    def _pass_on(self, message: DriverToStage) -> None:
        if self.node is None or not self.node.alive:
            raise TransportError(f"stage {self.spec.stage} is not running")
        match message:
            case Admit() | Step() | End():
                self.switch.deliver(message)
            case Topology() | Fence():
                self.node[StageNode.epochs].tell_nowait(message)
            case Ping() | GetTrace():
                self.node[StageNode.control].tell_nowait(message)
            case Become() | Shutdown():
                raise TransportError("a stage on the driver's loop is not a process")

    async def exited(self) -> StageEnd:
        if self.node is None:
            return StageEnd("never started", crashed=False)
        end = await self.node.join()
        how = f"its actor {end.reason}" + (f": {end.error!r}" if end.error else "")
        return StageEnd(how, crashed=end.error is not None)

    async def kill(self) -> None:
        """End the stage, once its thread returns."""
        if self.node is not None:
            await self._ports.system.kill(self.node)

    # --- the stage's wiring ------------------------------------------------------------------------------------------

    def to_driver(self, message: StageToDriver) -> None:
        """On the loop's next turn: a stage never runs inside the driver's call, nor the driver inside a stage's."""
        asyncio.get_running_loop().call_soon(self._deliver, message)

    async def connect(self, topology: Topology, on_failure: Callable[[ActorppError], None]) -> Links:
        spec = self.spec
        link = self._links = self._ports.links(topology.epoch)[spec.stage]
        following = self._ports.stages[(spec.stage + 1) % spec.num_stages]

        def to_following(message: StageToStage) -> None:
            asyncio.get_running_loop().call_soon(following.switch.deliver, message)

        return Links(
            prev=None if spec.is_first else TensorInlet(link),
            next=None if spec.is_last else TensorOutlet(link, self._sent),
            send_proxy=to_following,
            send_output=self.to_driver,
            feed_first=to_following,
        )

    def _sent(self, nbytes: int) -> None:
        self.sent_bytes += nbytes

    async def disconnect(self) -> None:
        if self._links is not None:
            await self._links.close()
            self._links = None


class InprocPorts:
    """All stages of one pipeline on this loop."""

    def __init__(self, system: ActorSystem, *, trace: bool) -> None:
        self.stages: dict[int, InprocPort] = {}
        self.system = system
        self._trace = trace
        self._links: dict[int, list[InprocLink]] = {}

    async def launch(self, spec: StageSpec, deliver: Callable[[StageToDriver], None]) -> InprocPort:
        """Start a stage, or start it again."""
        port = self.stages[spec.stage] = InprocPort(self, spec, deliver)
        port.node = await self.system.spawn(
            lambda: StageNode(port.host, port, port.switch, SpanRecorder(self._trace)), name=f"node-{spec.stage}"
        )
        port.to_driver(Hello(spec.stage, 0, os.getpid(), f"inproc-{spec.stage}"))
        return port

    def links(self, epoch: int) -> list[InprocLink]:
        """The tensor links of an epoch, made when its first stage asks."""
        if epoch not in self._links:
            self._links = {epoch: inproc_links(len(self.stages))}
        return self._links[epoch]

    def rendezvous(self, epoch: int) -> str:
        return ""

    def write(self, entry: LogEntry) -> None:
        for stage in self.stages.values():
            stage.send(entry)

    async def prepare(self) -> None:
        """There are no spares on this loop."""

    async def close(self, grace_s: float) -> None:
        for stage in self.stages.values():
            await stage.kill()
