"""The Coordinator's life inside an engine: made when the stages' sizes are known, suspended and resumed, closed.

If it crashes, every request it had, or was still to see, ends with the cause. It decides nothing about requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import structlog

from actorpp.coordinator.coordinator import (
    Abort,
    Close,
    Coordinator,
    CoordinatorMessage,
    GiveUp,
    Pipeline,
    Resume,
    Submit,
    Suspend,
)
from actorpp.coordinator.request import Request
from actorpp.coordinator.scheduler import Scheduler
from actorpp.errors import AbortedError, ActorStoppedError, CoordinatorFailedError, StageCrashedError, StageFailedError
from actorpp.runtime import ActorRef, ActorSystem, DeadLetter
from actorpp.stages.messages import Output

log = structlog.get_logger(__name__)

NAME = "coordinator"


class CoordinatorLife:
    """Has the requests of one engine.

    Args:
        system: Home of the actor.
        pipeline: Carries the log.
        make_scheduler: Called once with the KV pages that every stage can hold.
        watchdog_s: As for the Coordinator.
        on_epoch_lost: Called with an epoch that the Coordinator cannot go on with.
        on_failed: Called once with what ended the engine, and when every request has been told.
    """

    scheduler: Scheduler

    def __init__(
        self,
        system: ActorSystem,
        pipeline: Pipeline,
        make_scheduler: Callable[[int], Scheduler],
        *,
        watchdog_s: float,
        on_epoch_lost: Callable[[int, Exception], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        self._system = system
        self._pipeline = pipeline
        self._make_scheduler = make_scheduler
        self._watchdog_s = watchdog_s
        self._on_epoch_lost = on_epoch_lost
        self._on_failed = on_failed
        self._actor: ActorRef | None = None
        self._watching: asyncio.Task[None] | None = None

    # --- what recovery asks for --------------------------------------------------------------------------------------

    async def prepare(self, num_pages: int) -> tuple[int, int]:
        """Spawn the Coordinator, suspended. Returns the KV pages to reserve, and the steps in flight at most."""
        scheduler = self.scheduler = self._make_scheduler(num_pages)
        self._system.dead_letters.observe(self._dead_letter)
        actor = self._actor = await self._system.spawn(
            lambda: Coordinator(scheduler, self._pipeline, watchdog_s=self._watchdog_s, on_failure=self._on_epoch_lost),
            name=NAME,
        )
        self._watching = asyncio.create_task(self.watch(actor), name="watch coordinator")
        return scheduler.config.num_pages, scheduler.config.window

    def suspend(self) -> None:
        """The epoch is lost: requests wait."""
        self._tell(Suspend())

    def resume(self, epoch: int, crash: StageCrashedError | None) -> None:
        """The stages wait for this epoch's log. ``crash``: what a stage ended the last one with, by its own doing."""
        self._tell(Resume(epoch, crash))

    @property
    def explained(self) -> int:
        """Requests so far that were found to crash their stage, and without which it works."""
        return self.scheduler.suspects.explained if self._actor is not None else 0

    def give_up(self, error: StageFailedError) -> None:
        """The stages will not come back: every request fails, and is told which of them it was."""
        self._tell(GiveUp(StageFailedError(f"a stage failed: {error}", stage=error.stage)))
        self._on_failed(error)

    # --- requests and outputs ----------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Hand a request over. It gets its answer whatever happens. Raises as ``Scheduler.check``."""
        self.scheduler.check(request)
        if self._actor is not None:
            with suppress(ActorStoppedError):  # it has just crashed: the dead letter is answered
                self._actor[Coordinator.requests].tell_nowait(Submit(request))

    def abort(self, request: Request) -> None:
        """Ask for a request's end, in whatever phase."""
        self._tell(Abort(request))

    def deliver(self, output: Output) -> None:
        """From the last stage. One that comes when the Coordinator is ending is a dead letter."""
        if self._actor is not None:
            with suppress(ActorStoppedError):
                self._actor[Coordinator.outputs].tell_nowait(output)

    # --- ends --------------------------------------------------------------------------------------------------------

    async def watch(self, actor: ActorRef) -> None:
        """Until this actor ends; its crash ends the engine."""
        end = await actor.join()
        if end.error is not None:
            log.error("an actor of the driver crashed", name=actor.name, exc_info=end.error)
            error = CoordinatorFailedError(f"the {actor.name} crashed: {type(end.error).__name__}: {end.error}")
            error.__cause__ = end.error
            self._tell(GiveUp(error))  # where the Coordinator lives on: for requests on their way to it
            if self._actor is not None:
                self.scheduler.abandon(error)
            self._on_failed(error)

    async def close(self) -> None:
        """Every request ends, those that have just been handed over too."""
        if self._watching is not None:
            self._watching.cancel()
        if self._actor is not None:
            self._tell(Close())
            await self._system.stop(self._actor)
            self._system.dead_letters.forget(self._dead_letter)
            self.scheduler.fail_all(AbortedError("the engine is closing"))

    def _tell(self, message: CoordinatorMessage) -> None:
        if self._actor is not None:
            with suppress(ActorStoppedError):  # it is ending, and every request with it
                self._actor[Coordinator.control].tell_nowait(message)

    def _dead_letter(self, letter: DeadLetter) -> None:
        """A request that the Coordinator did not live to see."""
        if letter.actor == NAME and isinstance(letter.message, Submit):
            self.scheduler.fail(letter.message.request, CoordinatorFailedError("the coordinator ended before it"))
