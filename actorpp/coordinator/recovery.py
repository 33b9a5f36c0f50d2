"""Recovery: brings up the stages, and brings them back when one of them, or an epoch, is lost.

The order: whatever is lost is killed and started again, the others end the epoch and say so with their compute idle
(they keep their weights), and once all have their weights the next epoch begins on new links. What is lost meanwhile is
one more round of the same. Requests are not its business: the Coordinator is suspended before and resumed after it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol

import structlog

from actorpp.coordinator.stage_group import StageGroup
from actorpp.errors import ActorppError, ConfigError, StageCrashedError, StageFailedError, StageLoadError
from actorpp.runtime import Actor, guard_timeout

log = structlog.get_logger(__name__)

EngineState = Literal["starting", "ready", "recovering", "failed"]

RESTART_WINDOW_S = 300.0
"""Seconds over which restarts are counted."""

SETTLE_S = 0.3
"""A stage that dies breaks its neighbours' links: for so long after their errors its end may be on its way."""


@dataclass(frozen=True)
class RecoveryLimits:
    """Attributes:
    max_restarts: Stages, or epochs of living stages, started again within RESTART_WINDOW_S; one more ends the engine.
    load_timeout_s: Seconds for started stages to have their weights.
    fence_timeout_s: Seconds for the others to end what they compute.
    """

    max_restarts: int
    load_timeout_s: float
    fence_timeout_s: float


class Requests(Protocol):
    """Who has the requests."""

    async def prepare(self, num_pages: int) -> tuple[int, int]:
        """Called once, when the stages have said how many KV pages they can hold. Returns the pages to reserve and the
        steps in flight."""
        ...

    def suspend(self) -> None:
        """The epoch is lost."""
        ...

    def resume(self, epoch: int, crash: StageCrashedError | None) -> None:
        """The stages wait for this epoch's log. ``crash``: what a stage ended the last one with, by its own doing."""
        ...

    @property
    def explained(self) -> int:
        """Requests so far that were found to crash their stage, and without which it works."""
        ...

    def give_up(self, error: StageFailedError) -> None:
        """The pipeline will not come back."""
        ...


class Recovery(Actor):
    """Spawning it starts the stages, and returns with the first epoch running; afterwards it watches over them.

    Spawning raises StageLoadError when a stage cannot load, StageFailedError when one is lost too often, and
    ConfigError when the stages' sizes do not go with an option.

    Attributes:
        state, epoch: Of the pipeline.
        recovered: How often it has been brought back.
        seconds: How long that took the last time.
    """

    def __init__(self, group: StageGroup, limits: RecoveryLimits, requests: Requests) -> None:
        self.group = group
        self.limits = limits
        self.requests = requests
        self.state: EngineState = "starting"
        self.epoch = 0  # the newest that has begun, or was tried
        self.lost_epoch = -1  # the newest known to be lost
        self.lost: dict[int, StageFailedError] = {}  # stages to restart
        self.cause = StageFailedError("the epoch is lost")
        self.serving = 0  # the epoch that runs, or ran last
        self.fresh: set[int] = set()  # stages started since
        self.crash: StageCrashedError | None = None  # of a stage that served it
        self.explained = 0
        self.raised: set[int] = set()  # stages whose session has crashed in this life of theirs
        self.sizes: tuple[int, int] | None = None
        self.restart_times: deque[float] = deque()
        self.recovered = 0
        self.seconds: float | None = None

    # --- what is lost ------------------------------------------------------------------------------------------------

    def stage_lost(self, stage: int, error: StageFailedError) -> None:
        """A stage has ended, gives no sign of life, or cannot go on."""
        if isinstance(error, StageCrashedError) and stage not in self.fresh:
            self.crash = error
        if stage not in self.lost:
            self.lost[stage] = self.cause = error
            self.notify()

    def epoch_lost(self, epoch: int, error: Exception) -> None:
        """A stage or the coordinator cannot go on with this epoch; that of an older one is no news."""
        if isinstance(error, StageCrashedError) and epoch == self.serving and error.stage is not None:
            self.crash = error
            if error.stage in self.raised:  # again: its process, or what that has of a device, may be what is broken
                self.stage_lost(error.stage, error)
            self.raised.add(error.stage)
        if epoch > self.lost_epoch and epoch >= self.epoch:
            self.lost_epoch = epoch
            self.cause = error if isinstance(error, StageFailedError) else StageFailedError(str(error))
            self.notify()

    def is_lost(self) -> bool:
        return bool(self.lost) or self.lost_epoch >= self.epoch

    # --- main task ---------------------------------------------------------------------------------------------------

    async def started(self) -> None:
        self.fresh.update(range(len(self.group.specs)))
        await self.group.start()
        await self.establish()
        await self.begin_serving()

    async def run(self) -> None:
        while self.state != "failed":
            await self.until(self.is_lost)
            await self.recover()

    async def recover(self) -> None:
        """From a loss to the next epoch, or to the end of the engine."""
        clock = asyncio.get_running_loop().time
        began = clock()
        self.state = "recovering"
        self.requests.suspend()
        log.warning("recovering", epoch=self.epoch, cause=str(self.cause))
        try:
            await self.establish()
        except StageFailedError as error:
            self.state = "failed"
            self.requests.give_up(error)
            return
        self.recovered += 1
        self.seconds = clock() - began
        log.warning("recovered", epoch=self.epoch, seconds=round(self.seconds, 2))
        await self.begin_serving()

    async def begin_serving(self) -> None:
        self.state, self.serving = "ready", self.epoch
        crash, self.crash = self.crash, None
        self.fresh.clear()
        self.requests.resume(self.epoch, crash)
        try:
            await self.group.prepare()
        except (ActorppError, OSError) as error:  # the next restart takes longer, and that is all
            log.warning("no spare could be started", error=str(error))

    async def establish(self) -> None:
        """Rounds until an epoch runs on all stages. Raises StageFailedError when there have been too many."""
        while True:
            if self.is_lost():
                await self.clear_away()
            if not self.lost:
                try:
                    await self.begin_epoch()
                except ConfigError:  # it would be the same after every restart
                    raise
                except ActorppError as error:
                    self.epoch_lost(self.epoch, error)
            if not self.is_lost():
                return
            if self.state == "starting" and isinstance(self.cause, StageLoadError):
                raise self.cause

    async def clear_away(self) -> None:
        """Restart what is lost, and have the others end the epoch."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await self.until(lambda: bool(self.lost))
        lost, self.lost = self.lost, {}
        self.count_restarts(max(1, len(lost)))
        self.fresh.update(lost)
        self.raised.difference_update(lost)
        await self.group.start(lost)
        living = [stage for stage in range(len(self.group.specs)) if stage not in lost]
        for stage in await self.group.fence(self.epoch, living, self.limits.fence_timeout_s):
            self.stage_lost(stage, StageFailedError(f"stage {stage} did not end its epoch", stage=stage))

    async def begin_epoch(self) -> None:
        """The next one, once all that were started have their weights. Raises ActorppError when it does not run."""
        try:
            async with guard_timeout(self.limits.load_timeout_s):
                await self.group.wait_loaded()
        except TimeoutError:
            for stage in self.fresh:
                self.stage_lost(stage, StageFailedError(f"stage {stage} did not load in time", stage=stage))
            raise self.cause from None
        if self.sizes is None:
            self.sizes = await self.requests.prepare(self.group.num_pages())
        self.epoch += 1
        await self.group.begin(self.epoch, *self.sizes)

    def count_restarts(self, count: int) -> None:
        """Raises StageFailedError, with the cause of the last, when there are more than are allowed.

        Those before a request was convicted of them are explained, and count no more.
        """
        if self.requests.explained > self.explained:
            self.explained = self.requests.explained
            self.restart_times.clear()
        now = asyncio.get_running_loop().time()
        while self.restart_times and self.restart_times[0] <= now - RESTART_WINDOW_S:
            self.restart_times.popleft()
        before = len(self.restart_times)
        if before + count > self.limits.max_restarts:
            after = f" (after {before} restarts within {RESTART_WINDOW_S:g} s)" if before else ""
            raise StageFailedError(f"{self.cause}{after}", stage=self.cause.stage)
        self.restart_times.extend([now] * count)
