"""What a stage process runs, once ``actorpp.stages.entry`` has made it ready.

It connects to the driver, says hello, loads, and serves epochs until the driver tells it to end, dies, or it fails.
A spare waits with everything imported until the driver says which stage it becomes.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import structlog

from actorpp.errors import ActorppError, ProtocolError
from actorpp.eventloop import new_event_loop
from actorpp.runtime import ActorRef, ActorSystem
from actorpp.stages.codecs import Sender, driver_to_stage, routing_id, spare_id, stage_to_driver, stage_to_stage
from actorpp.stages.host import StageHost
from actorpp.stages.links import Links
from actorpp.stages.messages import (
    Admit,
    Become,
    End,
    Fence,
    GetTrace,
    Hello,
    Ping,
    Shutdown,
    StageError,
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
from actorpp.stages.wiring import WiringSpec
from actorpp.transport.gloo import connect_gloo
from actorpp.transport.nccl import connect_nccl
from actorpp.transport.sockets import Dealer, Router, close_context
from actorpp.transport.tensors import TensorLink

log = structlog.get_logger(__name__)


class ProcessWiring:
    """Wiring of a stage process: ZeroMQ for messages, a process group for tensors.

    Args:
        on_driver: Called with each message of the driver.
        on_peer: Called with each message of a neighbour.
        on_error: Called with what makes the process useless: the driver sent what cannot be decoded.
    """

    def __init__(
        self,
        spec: StageSpec,
        wiring: WiringSpec,
        host: StageHost,
        *,
        on_driver: Callable[[object], None],
        on_peer: Callable[[StageToStage], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self.spec = spec
        self.wiring = wiring
        self.host = host
        self.on_driver = on_driver
        self.on_peer = on_peer
        self.name = routing_id(spec.stage, wiring.incarnation)
        self._header = Sender(self.name)
        self._from_driver, self._to_driver = driver_to_stage(), stage_to_driver()
        self._peers = stage_to_stage()
        self._tensors: TensorLink | None = None
        self.sent_bytes = 0
        self._neighbours: list[Dealer] = []
        self.inlet = Router(
            wiring.endpoint(f"inlet-{spec.stage}-{wiring.incarnation}"),
            lambda peer, frames: on_peer(self._peers.decode(frames).message),
            lambda peer, frames, reason: log.error("dead letter", to=peer, reason=reason),
            on_error=on_error,
            limits=self._peers.limits,
            curve=wiring.curve_server,
        )
        self.driver = Dealer(
            wiring.driver,
            self.name.encode(),
            lambda frames: on_driver(self._from_driver.decode(frames).message),
            lambda frames, reason: log.error("dead letter", to="driver", reason=reason),
            on_error=on_error,
            limits=self._from_driver.limits,
            curve=wiring.curve_client,
            outbox=1024,
        )

    def to_driver(self, message: StageToDriver) -> None:
        self.driver.send(self._to_driver.encode(message, self._header))

    async def connect(self, topology: Topology, on_failure: Callable[[ActorppError], None]) -> Links:
        """Meet the other ranks, and open the headers' way to the next stage (from the last one: to the first)."""
        spec = self.spec
        tensors = None
        if spec.num_stages > 1:
            tensors = self._tensors = await self._meet(topology, on_failure)
        following = self._dealer(topology, (spec.stage + 1) % spec.num_stages)

        def to_following(message: StageToStage) -> None:
            following.send(self._peers.encode(message, self._header))

        return Links(
            prev=TensorInlet(tensors) if tensors is not None and not spec.is_first else None,
            next=TensorOutlet(tensors, self._sent) if tensors is not None and not spec.is_last else None,
            send_proxy=to_following,
            send_output=self.to_driver,
            feed_first=to_following,
        )

    async def _meet(self, topology: Topology, on_failure: Callable[[ActorppError], None]) -> TensorLink:
        nccl = self.wiring.tensor_transport == "nccl"
        connect = connect_nccl if nccl else partial(connect_gloo, host=self.wiring.interface)
        return await connect(
            topology.rendezvous,
            topology.epoch,
            self.spec.stage,
            self.spec.num_stages,
            on_failure=on_failure,
            device=self.host.device,
            compute_stream=self.host.forward_stream,
            deadline_s=self.wiring.deadline_s,
        )

    def _dealer(self, topology: Topology, stage: int) -> Dealer:
        dealer = Dealer(
            topology.inlets[stage],
            f"{self.name}@{topology.epoch}".encode(),
            lambda frames: log.error("an inlet sent something back"),
            lambda frames, reason: log.error("dead letter", to=f"stage {stage}", reason=reason),
            limits=self._peers.limits,
            curve=self.wiring.curve_client,
        )
        self._neighbours.append(dealer)
        return dealer

    def _sent(self, nbytes: int) -> None:
        self.sent_bytes += nbytes

    async def disconnect(self) -> None:
        while self._neighbours:
            await self._neighbours.pop().close()
        if self._tensors is not None:
            tensors, self._tensors = self._tensors, None
            await tensors.close()
            del tensors
            gc.collect()  # errors, tasks and links of the epoch refer to each other, and may hold tensors

    async def close(self) -> None:
        await self.disconnect()
        await self.inlet.close()
        await self.driver.close(flush_s=1.0)


async def wait_for_role(wiring: WiringSpec) -> Become | None:
    """As a spare: until the driver says which stage this process becomes, or None when it is not needed any more."""
    name = spare_id(wiring.incarnation)
    role: asyncio.Future[Become | None] = asyncio.get_running_loop().create_future()
    from_driver, to_driver = driver_to_stage(), stage_to_driver()

    def receive(frames: list[bytes]) -> None:
        message = from_driver.decode(frames).message
        if not role.done():
            role.set_result(message if isinstance(message, Become) else None)

    driver = Dealer(
        wiring.driver,
        name.encode(),
        receive,
        lambda frames, reason: log.error("dead letter", to="driver", reason=reason),
        limits=from_driver.limits,
        curve=wiring.curve_client,
    )
    driver.send(to_driver.encode(Hello(None, wiring.incarnation, os.getpid(), ""), Sender(name)))
    try:
        return await role
    finally:
        await driver.close()


async def serve(spec: StageSpec, wiring: WiringSpec) -> int:
    """Serve epochs until told to end. Returns the exit code: 0 after Shutdown, 1 after an error that was reported."""
    host = StageHost(spec)
    switch = EpochSwitch()
    ending: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def end(code: int) -> None:
        if not ending.done():
            ending.set_result(code)

    def lost(error: BaseException) -> None:
        log.error("a message could not be handled", error=repr(error))
        code = error.code if isinstance(error, ActorppError) else "internal"
        connection.to_driver(StageError(None, code, f"{type(error).__name__}: {error}"))
        end(1)

    def from_driver(message: object) -> None:
        if ending.done():
            return
        match message:
            case Admit() | Step() | End():
                switch.deliver(message)
            case Topology() | Fence():
                node[StageNode.epochs].tell_nowait(message)
            case Ping() | GetTrace():
                node[StageNode.control].tell_nowait(message)
            case Become():
                lost(ProtocolError(f"this process is stage {spec.stage} already"))
            case Shutdown():
                end(0)

    connection = ProcessWiring(spec, wiring, host, on_driver=from_driver, on_peer=switch.deliver, on_error=lost)
    async with ActorSystem(connection.name, kept_letters=0) as system:  # nobody looks, and they would hold prompts
        node = await system.spawn(lambda: StageNode(host, connection, switch, SpanRecorder(wiring.trace)), name="node")
        connection.to_driver(Hello(spec.stage, wiring.incarnation, os.getpid(), connection.inlet.endpoint))
        watching = asyncio.create_task(report_end_of(node, lost))
        code = await ending
        watching.cancel()
        await system.kill(node)
        await connection.close()
    return code


async def report_end_of(node: ActorRef, lost: Callable[[BaseException], None]) -> None:
    end = await node.join()
    lost(end.error or ActorppError(f"the stage's actor {end.reason}"))


async def live(spec: StageSpec, wiring: WiringSpec) -> int:
    """As a stage, or as a spare and then as a stage. Returns the exit code, as ``serve``."""
    if not wiring.spare:
        return await serve(spec, wiring)
    role = await wait_for_role(wiring)
    return 0 if role is None else await serve(role.spec, role.wiring)


def run(spec: StageSpec, wiring: WiringSpec) -> NoReturn:
    """Serve, and end the process with exit code 0 after Shutdown, and 1 after an error."""
    gc.freeze()  # what was imported is never garbage: so looking for it at each epoch's end takes little
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        code = runner.run(live(spec, wiring))
    close_context()
    sys.stderr.flush()
    os._exit(code)  # everything is put away; the interpreter would take seconds to free torch's modules one by one
