"""All stages of one pipeline, as the driver sees them: start, epochs, the log's way out, traces, end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from actorpp.coordinator.stage_process import Begin, CollectTrace, StagePort, StageProcess, WaitLoaded
from actorpp.runtime import ActorRef, ActorSystem, Request
from actorpp.stages.messages import Hello, Loaded, LogEntry, Output, StageToDriver, Topology, TraceSpans
from actorpp.stages.spec import StageSpec

R = TypeVar("R")


class Ports(Protocol):
    """Where stages run, and how the driver reaches them."""

    async def launch(self, spec: StageSpec, deliver: Callable[[StageToDriver], None]) -> StagePort:
        """Start a stage; ``deliver`` gets what it says."""
        ...

    def write(self, entry: LogEntry) -> None:
        """Send an entry of the log to every stage, in order, never blocking. Raises TransportError."""
        ...

    def rendezvous(self, epoch: int) -> str:
        """Where the ranks of an epoch's tensor transport meet."""
        ...

    def any_ended(self) -> bool:
        """Whether a stage has ended, even if its end has not been reported yet."""
        ...

    async def close(self, grace_s: float) -> None:
        """End every stage: by asking, and after the grace by force."""
        ...


class StageGroup:
    """One pipeline.

    Args:
        specs: One for each stage, in order.
        ports: Where they run.
        system: Home of the StageProcess actors.
        on_output: Called with each Output of the last stage.
        on_failure: Called with what ended a stage; possibly once for each.
        on_progress: Called with how much is loaded of how much, over all stages.
    """

    def __init__(
        self,
        specs: Sequence[StageSpec],
        ports: Ports,
        system: ActorSystem,
        *,
        watchdog_s: float,
        on_output: Callable[[Output], None],
        on_failure: Callable[[Exception], None],
        on_progress: Callable[[int, int], None],
    ) -> None:
        self.specs = specs
        self.loaded: list[Loaded] = []
        self.pids: list[int] = [0] * len(specs)
        self._ports = ports
        self._system = system
        self._watchdog_s = watchdog_s
        self._on_output = on_output
        self._on_failure = on_failure
        self._on_progress = on_progress
        self._inlets = [""] * len(specs)
        self._load_progress = [(0, 1)] * len(specs)
        self._processes: list[ActorRef] = []

    async def load(self) -> None:
        """Start all stages and wait until each has its weights. Raises StageFailedError."""
        for spec in self.specs:
            process = await self._system.spawn(partial(self._process, spec), name=f"stage-{spec.stage}")
            self._processes.append(process)
        self.loaded = await self._ask_all(WaitLoaded())

    def _process(self, spec: StageSpec) -> StageProcess:
        return StageProcess(
            spec.stage,
            lambda deliver: self._ports.launch(spec, deliver),
            watchdog_s=self._watchdog_s,
            on_output=self._on_output,
            on_exit=self._on_failure,
            on_error=self._error,
            on_hello=self._hello,
            on_progress=self._progress,
        )

    def num_pages(self) -> int:
        """KV pages that every stage can hold."""
        return min(loaded.max_pages for loaded in self.loaded)

    async def begin(self, epoch: int, num_pages: int, window: int) -> None:
        """Begin an epoch on all stages; returns when every session takes steps. Raises StageFailedError."""
        topology = Topology(
            epoch=epoch,
            num_pages=num_pages,
            window=window,
            inlets=tuple(self._inlets),
            rendezvous=self._ports.rendezvous(epoch),
        )
        await self._ask_all(Begin(topology))

    def write(self, entry: LogEntry) -> None:
        """Send an entry of the log to every stage, in order, never blocking. Raises TransportError."""
        self._ports.write(entry)

    async def trace(self) -> list[TraceSpans]:
        """What every stage did since the last time, if the stages record it. Raises StageFailedError."""
        return await self._ask_all(CollectTrace())

    async def close(self, grace_s: float) -> None:
        """End every stage; afterwards none of its processes is left."""
        await self._ports.close(grace_s)
        for process in self._processes:
            await self._system.kill(process)

    async def _ask_all(self, request: Request[R]) -> list[R]:
        """Every stage's answer; the first stage to fail ends the waiting for the others."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(process[StageProcess.requests].ask(request)) for process in self._processes]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def _error(self, error: Exception) -> None:
        """A stage that dies breaks its neighbours' links: their errors are not the cause, and its end is on its way."""
        if not self._ports.any_ended():
            self._on_failure(error)

    def _hello(self, hello: Hello) -> None:
        self._inlets[hello.stage] = hello.inlet
        self.pids[hello.stage] = hello.pid

    def _progress(self, stage: int, done: int, total: int) -> None:
        self._load_progress[stage] = (done, total)
        self._on_progress(sum(d for d, _ in self._load_progress), sum(t for _, t in self._load_progress))
