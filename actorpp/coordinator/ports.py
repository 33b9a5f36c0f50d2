"""Stages as child processes of the driver: one ROUTER to all of them, one child each, and spares if there are any."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from actorpp.coordinator.spares import Spares
from actorpp.coordinator.stage_process import StageEnd
from actorpp.errors import PeerUnreachableError, ProtocolError
from actorpp.stages.codecs import Sender, driver_to_stage, routing_id, spare_id, stage_to_driver
from actorpp.stages.messages import Admit, Become, DriverToStage, LogEntry, Shutdown, StageToDriver
from actorpp.stages.spec import StageSpec
from actorpp.stages.wiring import WiringSpec
from actorpp.transport.curve import CurveKeys
from actorpp.transport.oom import oom_kills
from actorpp.transport.process import ChildProcess
from actorpp.transport.sockets import Router
from actorpp.transport.wire import Frame

log = structlog.get_logger(__name__)

# A step's temporaries are large. glibc would map, zero and unmap each anew; so they are kept and used again: by all
# threads, as those of each epoch are new ones, and with an arena of its own each would keep as much once more.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 33), "MALLOC_ARENA_MAX": "1"}

# Weights and KV in huge pages where the kernel has them for who asks: a decode step reads every weight, and one core
# reads a quarter more a second from them. For glibc from 2.35 on; an older one passes over what it does not know.
HUGE_PAGES = "glibc.malloc.hugetlb=1"


def compute_environment(threads: int) -> dict[str, str]:
    """How a process that computes with so many threads treats its memory; what the user has tuned holds, too."""
    tunables = ":".join(filter(None, (HUGE_PAGES, os.environ.get("GLIBC_TUNABLES"))))  # the user's own come last
    return MALLOC | {
        "GLIBC_TUNABLES": tunables,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }


STAGE_COMMAND = (sys.executable, "-m", "actorpp.cli", "stage")

OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""What ends a process from outside. The kernel's own SIGKILL, where memory is short, is known by its count alone."""

OUTBOX = 2048  # messages per stage: the log's credit and a margin


class ProcessPort:
    """One stage process, under the routing id of this incarnation."""

    def __init__(self, child: ChildProcess, peer: bytes, send: Callable[[DriverToStage], None]) -> None:
        self.child = child
        self.peer = peer
        self.send = send
        self._oom_kills = oom_kills()

    async def exited(self) -> StageEnd:
        code = await self.child.wait()
        how = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
        crashed = -code not in OUTSIDE
        if -code == signal.SIGKILL and oom_kills() > self._oom_kills:  # as likely as not because of what it computed
            crashed, how = True, f"{how}; since it began, the kernel's out-of-memory killer has been at work"
        return StageEnd(f"its process {self.child.pid} {how}", crashed)

    async def kill(self) -> None:
        """End the process at once, a stopped one too."""
        self.child.kill()
        await self.child.wait()

    async def close(self, grace_s: float) -> None:
        """Ask the stage to end, and end it by force after the grace, or when this is cancelled."""
        if self.child.returncode is not None:
            return
        try:
            self.send(Shutdown())
        except PeerUnreachableError:
            self.child.kill()  # it has not even said hello: it has nothing to put away
        if await self.child.stop_within(grace_s) < 0:
            log.info("a stage was ended by force", pid=self.child.pid, after_s=grace_s)


class ProcessPorts:
    """All stage processes of one pipeline, behind one ROUTER.

    Args:
        run_dir: Private directory for ipc sockets and file stores.
        wiring: Settings of every stage; the driver's endpoint, and the run's own key, are filled in here.
        threads: Compute threads of each stage.
        warm_spares: Processes to keep ready, with everything imported.
        on_error: Called when a stage sends what cannot be decoded.
    """

    def __init__(
        self,
        run_dir: Path,
        wiring: WiringSpec,
        on_error: Callable[[BaseException], None],
        *,
        threads: int = 1,
        warm_spares: int = 0,
    ) -> None:
        self._run_dir = run_dir
        self._header = Sender("driver")
        self._encoder, self._decoder = driver_to_stage(), stage_to_driver()
        self._threads = threads
        self._ports: dict[int, ProcessPort] = {}
        self._incarnations: dict[int, int] = {}
        self._deliver: dict[bytes, Callable[[StageToDriver], None]] = {}
        self._gone: set[bytes] = set()  # routing ids that are used no more
        secret = None if wiring.control_host is None else CurveKeys.generate().secret.decode()
        wiring = msgspec.structs.replace(wiring, run_dir=str(run_dir), control_secret=secret)
        self._router = Router(
            wiring.endpoint("driver"),
            self._receive,
            lambda peer, frames, reason: log.info("dead letter", to=peer.decode(), reason=reason),
            on_error=on_error,
            outbox=OUTBOX,
            limits=self._decoder.limits,
            curve=wiring.curve_server,
        )
        self._wiring = msgspec.structs.replace(wiring, driver=self._router.endpoint)
        self._spares = Spares(warm_spares, self._start_spare)

    async def launch(self, spec: StageSpec, deliver: Callable[[StageToDriver], None]) -> ProcessPort:
        """Start a stage's process, or start it again after its end: a spare becomes it, or a new process."""
        if (old := self._ports.get(spec.stage)) is not None:
            self._forget(old)
        incarnation = self._incarnations[spec.stage] = self._incarnations.get(spec.stage, -1) + 1
        wiring = msgspec.structs.replace(self._wiring, incarnation=incarnation)
        peer = routing_id(spec.stage, incarnation).encode()
        child = self._turn_spare(Become(spec, wiring)) or self._start({**spec.to_env(), **wiring.to_env()})
        self._deliver[peer] = deliver
        self._example = spec  # spares import what it needs
        port = self._ports[spec.stage] = self._port(child, peer)
        return port

    def _turn_spare(self, role: Become) -> ChildProcess | None:
        """A spare's process that takes the role, if there is one."""
        while (spare := self._spares.take()) is not None:
            self._forget(spare)
            with suppress(PeerUnreachableError):  # it has just ended
                spare.send(role)
                return spare.child
        return None

    def _forget(self, port: ProcessPort) -> None:
        self._deliver.pop(port.peer, None)
        self._gone.add(port.peer)

    async def prepare(self) -> None:
        """Start the spares that are missing. They are waited for by nobody."""
        self._spares.fill()

    def rendezvous(self, epoch: int) -> str:
        """A file store: on one host it needs no listener, and the driver no torch."""
        return f"file://{self._run_dir}/store-{epoch}"

    def write(self, entry: LogEntry) -> None:
        """Encoded once. Only the two ends get a prompt's ids."""
        frames = inner = self._encode(entry)
        if isinstance(entry, Admit) and len(self._ports) > 2:
            inner = self._encode(msgspec.structs.replace(entry, tokens=None))
        for stage, port in self._ports.items():
            self._router.send(port.peer, frames if stage in (0, len(self._ports) - 1) else inner)

    async def close(self, grace_s: float) -> None:
        """End all processes, at once with each other, then the sockets."""
        try:
            async with asyncio.TaskGroup() as group:
                for port in (*self._ports.values(), *self._spares.close()):
                    group.create_task(port.close(grace_s))
        finally:
            await self._router.close()

    def _start(self, env: Mapping[str, str]) -> ChildProcess:
        return ChildProcess(STAGE_COMMAND, env={**env, **compute_environment(self._threads)})

    def _start_spare(self, number: int, ready: Callable[[], None]) -> ProcessPort:
        wiring = msgspec.structs.replace(self._wiring, incarnation=number, spare=True)
        peer = spare_id(number).encode()
        self._deliver[peer] = lambda hello: ready()
        return self._port(self._start({**self._example.to_env(), **wiring.to_env()}), peer)

    def _port(self, child: ChildProcess, peer: bytes) -> ProcessPort:
        return ProcessPort(child, peer, lambda message: self._router.send(peer, self._encode(message)))

    def _encode(self, message: DriverToStage) -> list[Frame]:
        return self._encoder.encode(message, self._header)

    def _receive(self, peer: bytes, frames: list[bytes]) -> None:
        message = self._decoder.decode(frames).message
        if peer in self._deliver:
            self._deliver[peer](message)
        elif peer in self._gone:  # what it had sent before its end
            log.info("dead letter of an ended process", peer=peer.decode(), kind=type(message).__name__)
        else:
            raise ProtocolError(f"a message of {peer!r}, which is no stage of this pipeline")
