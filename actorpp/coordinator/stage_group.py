"""All stages of one pipeline, as the driver sees them: start, restart, epochs, the log's way out, traces, end.

When to restart one, and with which epoch to go on, is decided in ``recovery.py``.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from msgspec.structs import replace

from actorpp.coordinator.stage_process import Begin, CollectTrace, EndEpoch, StagePort, StageProcess, WaitLoaded
from actorpp.errors import ActorppError, ActorStoppedError, StageFailedError
from actorpp.runtime import ActorRef, ActorSystem, Request, guard_timeout
from actorpp.stages.messages import (
    Hello,
    Loaded,
    LogEntry,
    Output,
    Span,
    StageCounters,
    StageTiming,
    StageToDriver,
    Topology,
    TraceSpans,
)
from actorpp.stages.spec import StageSpec

R = TypeVar("R")
Timed = TypeVar("Timed", Span, StageTiming)


class Ports(Protocol):
    """Where stages run, and how the driver reaches them."""

    async def launch(self, spec: StageSpec, deliver: Callable[[StageToDriver], None]) -> StagePort:
        """Start a stage, or start it again after its end; ``deliver`` gets what it says from now on."""
        ...

    async def prepare(self) -> None:
        """Do now what makes a later restart quicker."""
        ...

    def write(self, entry: LogEntry) -> None:
        """Send an entry of the log to every stage, in order, never blocking. Raises TransportError."""
        ...

    def rendezvous(self, epoch: int) -> str:
        """Where the ranks of an epoch's tensor transport meet."""
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
        watchdog_s: Seconds without a sign of life after which a stage is lost.
        on_output: Called with each Output of the last stage.
        on_lost: Called with a stage that is lost, and why.
        on_epoch_lost: Called with an epoch that a stage cannot go on with, and why; possibly by several stages.
        on_progress: Called with how much is loaded of how much, over all stages.

    Attributes:
        loaded, pids: By stage, of its present incarnation.
        restarts: By stage.
        counters: By stage, as of its last heartbeat; totals over all incarnations.
    """

    def __init__(
        self,
        specs: Sequence[StageSpec],
        ports: Ports,
        system: ActorSystem,
        *,
        watchdog_s: float,
        on_output: Callable[[Output], None],
        on_lost: Callable[[int, StageFailedError], None],
        on_epoch_lost: Callable[[int, StageFailedError], None],
        on_progress: Callable[[int, int], None],
    ) -> None:
        self.specs = specs
        self.loaded: list[Loaded] = []
        self.pids: list[int] = [0] * len(specs)
        self.restarts: list[int] = [0] * len(specs)
        self.counters = [StageCounters()] * len(specs)
        self._counted_before = [StageCounters()] * len(specs)  # by the incarnations that have ended
        self._ports = ports
        self._system = system
        self._watchdog_s = watchdog_s
        self._on_output = on_output
        self._on_lost = on_lost
        self._on_epoch_lost = on_epoch_lost
        self._on_progress = on_progress
        self._inlets = [""] * len(specs)
        self._load_progress = [(0, 1)] * len(specs)
        self._ahead = [0.0] * len(specs)  # of the driver's clock
        self._processes: dict[int, ActorRef] = {}

    async def start(self, stages: Iterable[int] | None = None) -> None:
        """Start these stages, by default all; one that runs, or has run, is ended first. Does not wait for weights."""
        for stage in range(len(self.specs)) if stages is None else stages:
            if (process := self._processes.get(stage)) is not None:
                await self._system.kill(process)
                self.restarts[stage] += 1
                self._counted_before[stage] = self.counters[stage]
            self._load_progress[stage] = (0, 1)
            self._ahead[stage] = 0.0
            make = partial(self._process, self.specs[stage])
            try:
                self._processes[stage] = await self._system.spawn(make, name=f"stage-{stage}")
            except (ActorppError, OSError) as error:  # the system has no process or descriptor for it
                self._on_lost(stage, StageFailedError(f"stage {stage}: {error}"))

    def _process(self, spec: StageSpec) -> StageProcess:
        return StageProcess(
            spec.stage,
            lambda deliver: self._ports.launch(spec, deliver),
            watchdog_s=self._watchdog_s,
            on_output=self._output,
            on_lost=partial(self._on_lost, spec.stage),
            on_epoch_lost=self._on_epoch_lost,
            on_hello=partial(self._hello, spec.stage),
            on_counters=partial(self._counted, spec.stage),
            on_progress=self._progress,
            on_clock=partial(operator.setitem, self._ahead, spec.stage),
        )

    async def wait_loaded(self) -> None:
        """Until every stage has its weights. Raises StageFailedError."""
        self.loaded = await self._ask_all(WaitLoaded())

    async def prepare(self) -> None:
        """Start the spares that are missing, if there are to be any."""
        await self._ports.prepare()

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

    async def fence(self, epoch: int, stages: Iterable[int], timeout_s: float) -> list[int]:
        """End the epoch on these stages, and return those that were lost or did not acknowledge in time."""

        async def end(stage: int) -> bool:
            try:
                async with guard_timeout(timeout_s):
                    await self._processes[stage][StageProcess.requests].ask(EndEpoch(epoch))
            except (StageFailedError, TimeoutError):
                return False
            return True

        asked = list(stages)
        answers = await asyncio.gather(*map(end, asked))
        return [stage for stage, idle in zip(asked, answers, strict=True) if not idle]

    def write(self, entry: LogEntry) -> None:
        """Send an entry of the log to every stage, in order, never blocking. Raises TransportError."""
        self._ports.write(entry)

    async def trace(self) -> list[TraceSpans]:
        """What every stage did since the last time, on the driver's clock, if the stages record it.

        Raises StageFailedError.
        """
        answers = await self._ask_all(CollectTrace())
        return [
            replace(answer, spans=tuple(moved(span, -ahead) for span in answer.spans)) if ahead else answer
            for answer, ahead in zip(answers, self._ahead, strict=True)
        ]

    async def close(self, grace_s: float) -> None:
        """End every stage; afterwards none of its processes is left."""
        await self._ports.close(grace_s)
        for process in self._processes.values():
            await self._system.kill(process)

    async def _ask_all(self, request: Request[R]) -> list[R]:
        """Every stage's answer; the first stage to fail ends the waiting for the others."""
        processes = [self._processes[stage] for stage in range(len(self.specs))]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(process[StageProcess.requests].ask(request)) for process in processes]
        except ExceptionGroup as errors:
            error = errors.exceptions[0]
            if isinstance(error, ActorStoppedError):  # its next incarnation is not there yet
                raise StageFailedError("a stage is being restarted") from None
            raise error from None
        return [task.result() for task in tasks]

    def _output(self, output: Output) -> None:
        if any(self._ahead):
            timings = zip(output.timings, self._ahead, strict=False)
            output = replace(output, timings=tuple(moved(timing, -ahead) for timing, ahead in timings))
        self._on_output(output)

    def _hello(self, stage: int, hello: Hello) -> None:
        self._inlets[stage] = hello.inlet
        self.pids[stage] = hello.pid

    def _counted(self, stage: int, counters: StageCounters) -> None:
        before = self._counted_before[stage]
        self.counters[stage] = StageCounters(
            before.dead_letters + counters.dead_letters, before.sent_bytes + counters.sent_bytes, counters.mailboxes
        )

    def _progress(self, stage: int, done: int, total: int) -> None:
        self._load_progress[stage] = (done, total)
        self._on_progress(sum(d for d, _ in self._load_progress), sum(t for _, t in self._load_progress))


def moved(timed: Timed, seconds: float) -> Timed:
    """The same, so much later."""
    return replace(timed, start=timed.start + seconds, end=timed.end + seconds)
