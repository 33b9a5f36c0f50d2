"""Stages as child processes of the driver: one ROUTER to all of them, one child each."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from actorpp.errors import PeerUnreachableError, ProtocolError
from actorpp.stages.codecs import Sender, driver_to_stage, routing_id, stage_to_driver
from actorpp.stages.messages import Admit, DriverToStage, LogEntry, Shutdown, StageToDriver
from actorpp.stages.spec import StageSpec
from actorpp.stages.wiring import WiringSpec
from actorpp.transport.process import ChildProcess
from actorpp.transport.sockets import Router
from actorpp.transport.wire import Frame

log = structlog.get_logger(__name__)

# A step's temporaries are large. glibc would map, zero and unmap each anew; so they are kept and used again.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}

OUTBOX = 2048  # messages per stage: the log's credit and a margin


class ProcessPort:
    """One stage process."""

    def __init__(self, child: ChildProcess, send: Callable[[DriverToStage], None]) -> None:
        self.child = child
        self.send = send

    async def exited(self) -> str:
        code = await self.child.wait()
        return (
            f"its process {self.child.pid} was ended by signal {-code}"
            if code < 0
            else (f"its process {self.child.pid} exited with code {code}")
        )

    async def close(self, grace_s: float) -> None:
        """Ask the stage to end, and end it by force after the grace, or when this is cancelled."""
        if self.child.returncode is not None:
            return
        try:
            self.send(Shutdown())
        except PeerUnreachableError:
            self.child.kill()  # it has not even said hello: it has nothing to put away
        try:
            await asyncio.wait_for(self.child.wait(), grace_s)
        except TimeoutError:
            log.info("a stage did not end when asked", pid=self.child.pid, after_s=grace_s)
        finally:
            self.child.kill()
        await self.child.wait()


class ProcessPorts:
    """All stage processes of one pipeline, behind one ROUTER.

    Args:
        run_dir: Private directory for ipc sockets and file stores.
        wiring: Settings of every stage; the driver's endpoint is filled in here.
        on_error: Called when a stage sends what cannot be decoded.
    """

    def __init__(self, run_dir: Path, wiring: WiringSpec, on_error: Callable[[BaseException], None]) -> None:
        self._run_dir = run_dir
        self._header = Sender("driver")
        self._encoder, self._decoder = driver_to_stage(), stage_to_driver()
        self._ports: list[ProcessPort] = []
        self._deliver: dict[bytes, Callable[[StageToDriver], None]] = {}
        self._ids: list[bytes] = []
        self._router = Router(
            f"ipc://{run_dir}/driver",
            self._receive,
            lambda peer, frames, reason: log.warning("dead letter", to=peer.decode(), reason=reason),
            on_error=on_error,
            outbox=OUTBOX,
            limits=self._decoder.limits,
        )
        self._wiring = msgspec.structs.replace(wiring, driver=self._router.endpoint, run_dir=str(run_dir))

    async def launch(self, spec: StageSpec, deliver: Callable[[StageToDriver], None]) -> ProcessPort:
        """Start a stage's process; stages are started in order."""
        peer = routing_id(spec.stage, self._wiring.incarnation).encode()
        child = ChildProcess(
            [sys.executable, "-m", "actorpp.cli", "stage"],
            env={
                **spec.to_env(),
                **self._wiring.to_env(),
                **MALLOC,
                "OMP_NUM_THREADS": str(spec.threads),
                "MKL_NUM_THREADS": str(spec.threads),
            },
        )
        port = ProcessPort(child, lambda message: self._router.send(peer, self._encode(message)))
        self._ports.append(port)
        self._ids.append(peer)
        self._deliver[peer] = deliver
        return port

    def rendezvous(self, epoch: int) -> str:
        """A file store: on one host it needs no listener, and the driver no torch."""
        return f"file://{self._run_dir}/store-{epoch}"

    def write(self, entry: LogEntry) -> None:
        """Encoded once. Only the two ends get a prompt's ids."""
        frames = inner = self._encode(entry)
        if isinstance(entry, Admit) and len(self._ids) > 2:
            inner = self._encode(msgspec.structs.replace(entry, tokens=None))
        for stage, peer in enumerate(self._ids):
            self._router.send(peer, frames if stage in (0, len(self._ids) - 1) else inner)

    def any_ended(self) -> bool:
        return any(port.child.ended for port in self._ports)

    async def close(self, grace_s: float) -> None:
        """End all processes, at once with each other, then the sockets."""
        try:
            async with asyncio.TaskGroup() as group:
                for port in self._ports:
                    group.create_task(port.close(grace_s))
        finally:
            await self._router.close()

    def _encode(self, message: DriverToStage) -> list[Frame]:
        return self._encoder.encode(message, self._header)

    def _receive(self, peer: bytes, frames: list[bytes]) -> None:
        if peer not in self._deliver:
            raise ProtocolError(f"a message of {peer!r}, which is no stage of this pipeline")
        self._deliver[peer](self._decoder.decode(frames).message)
