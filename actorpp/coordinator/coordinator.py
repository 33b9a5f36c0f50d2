"""The Coordinator actor: it gives the scheduler its events and the pipeline its log, and watches the clock.

Every event is handled at once and ends in writing whatever the scheduler can now issue. Nothing a client does is waited
for: sinks return at once, and what they feed (detokenising, sockets) runs elsewhere.

It runs one epoch after the other. Where an epoch is lost it stops writing and says so; who brings the stages back
tells it with which epoch to go on. Meanwhile requests wait, and can be aborted or pass their deadlines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec
import structlog

from actorpp.coordinator.request import Phase, Request
from actorpp.coordinator.scheduler import Scheduler
from actorpp.errors import (
    AbortedError,
    ActorppError,
    CoordinatorFailedError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    RequestError,
    StageCrashedError,
    StageFailedError,
)
from actorpp.runtime import Actor, Inbox, Overflow, guard_later
from actorpp.stages.messages import LogEntry, Output

log = structlog.get_logger(__name__)


class Pipeline(Protocol):
    """Where the log goes."""

    def write(self, entry: LogEntry) -> None:
        """Send an entry to every stage, in order, never blocking.

        Raises:
            TransportError: A stage cannot be reached: the epoch is lost.
        """
        ...


class Submit(msgspec.Struct, frozen=True):
    """A new request. A refusal reaches its sink."""

    request: Request


class Abort(msgspec.Struct, frozen=True):
    """End a request, in whatever phase."""

    request: Request


class Suspend(msgspec.Struct, frozen=True):
    """The epoch is lost with a stage. Nothing more is written, and Outputs are ignored."""


class Resume(msgspec.Struct, frozen=True):
    """The stages wait for the log of this epoch; everything that was in flight is replayed in it.

    ``crash``: how a stage ended the last epoch that ran, if it was by its own doing.
    """

    epoch: int
    crash: StageCrashedError | None = None


class GiveUp(msgspec.Struct, frozen=True):
    """The pipeline will not come back: every request fails with this error, those still to come too."""

    error: RequestError


class Close(msgspec.Struct, frozen=True):
    """The engine is closing: every request ends, those in the mailbox too. Then stop the actor, draining it."""


CoordinatorMessage = Abort | Suspend | Resume | GiveUp | Close


class Coordinator(Actor):
    """Runs the pipeline.

    Args:
        scheduler: Decides.
        pipeline: Carries the log.
        watchdog_s: Seconds without an Output, while steps are in flight, after which the epoch has failed.
        on_failure: Called with an epoch that is lost, and why, unless a Suspend said so first.
    """

    control = Inbox[CoordinatorMessage](capacity=65536, priority=0)
    requests = Inbox[Submit](capacity=65536, overflow=Overflow.FAIL)
    outputs = Inbox[Output](capacity=1024, overflow=Overflow.FAIL)

    def __init__(
        self,
        scheduler: Scheduler,
        pipeline: Pipeline,
        *,
        watchdog_s: float,
        on_failure: Callable[[int, Exception], None],
    ) -> None:
        self.scheduler = scheduler
        self.pipeline = pipeline
        self.watchdog_s = watchdog_s
        self.on_failure = on_failure
        self.ended: RequestError | None = None  # what requests are told from now on
        self.suspended = True  # until the stages wait for the first epoch
        self.dead_letters = 0  # Outputs of lost epochs
        self.watchdog: asyncio.TimerHandle | None = None

    # --- events ------------------------------------------------------------------------------------------------------

    @control.handler
    def on_control(self, message: CoordinatorMessage) -> None:
        match message:
            case Abort(request):
                self.scheduler.abort(request)
                self.issue()
            case Suspend():
                self.suspend()
            case Resume(epoch, crash):
                self.resume(epoch, crash)
            case GiveUp(error):
                self.end_all(error)
            case Close():
                self.end_all(AbortedError("the engine is closing"))

    @requests.handler
    def on_submit(self, message: Submit) -> None:
        self.admit(message.request)
        if not self.requests:  # prompts that came together are planned as the queue that they are
            self.issue()

    @outputs.handler
    def on_output(self, output: Output) -> None:
        if self.suspended or self.ended is not None or output.epoch < self.scheduler.epoch:
            self.dead_letters += 1
            log.debug("an output of a lost epoch", epoch=output.epoch, seq=output.seq)
            return
        try:
            self.scheduler.on_output(output)
        except ActorppError as error:
            self.lose_epoch(error)
            return
        self.rewind_watchdog()
        self.issue()

    def deadline_passed(self, request: Request) -> None:
        self.scheduler.fail(request, DeadlineExceededError("the request's deadline has passed"))
        self.issue()

    # --- decisions ---------------------------------------------------------------------------------------------------

    def admit(self, request: Request) -> None:
        """Queue it, or refuse it."""
        if request.phase is Phase.ENDED:  # its abort has overtaken it
            return
        if self.ended is not None:
            self.scheduler.fail(request, self.ended)
            return
        try:
            self.scheduler.submit(request)
        except (InvalidRequestError, OverloadedError) as error:
            self.scheduler.fail(request, error)
            return
        except Exception as error:  # the crash of this actor: the request is in no book yet, and would get no answer
            self.scheduler.fail(request, CoordinatorFailedError(f"the coordinator crashed: {error!r}"))
            raise
        if request.deadline_at is not None:
            delay = max(0.0, request.deadline_at - self.now())
            request.deadline = guard_later(delay, self.deadline_passed, request)

    def issue(self) -> None:
        """Write everything that can be issued now."""
        idle = not self.scheduler.in_flight
        while not (self.suspended or self.ended) and (entry := self.scheduler.next_entry()) is not None:
            try:
                self.pipeline.write(entry)
            except ActorppError as error:
                self.lose_epoch(error)
        if idle:
            self.rewind_watchdog()

    def lose_epoch(self, error: Exception) -> None:
        log.warning("the epoch is lost", epoch=self.scheduler.epoch, error=str(error))
        self.suspend()
        self.on_failure(self.scheduler.epoch, error)

    def suspend(self) -> None:
        self.suspended = True
        self.rewind_watchdog()

    def resume(self, epoch: int, crash: StageCrashedError | None) -> None:
        if self.ended is None:
            self.scheduler.restart(epoch, crash)
            self.suspended = False
            self.issue()

    def end_all(self, error: RequestError) -> None:
        """Every request ends with this error, also those that are still to come."""
        self.ended = error
        self.scheduler.fail_all(error)
        self.rewind_watchdog()

    # --- clock -------------------------------------------------------------------------------------------------------

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def rewind_watchdog(self) -> None:
        """Progress is an Output; while nothing is in flight nothing is watched."""
        if self.watchdog is not None:
            self.watchdog.cancel()
            self.watchdog = None
        if self.scheduler.in_flight and not (self.suspended or self.ended):
            self.watchdog = guard_later(self.watchdog_s, self.stalled)

    def stalled(self) -> None:
        step = self.scheduler.in_flight[0]
        self.lose_epoch(
            StageFailedError(f"no output for {self.watchdog_s:g} s; step {step.seq} is the oldest in flight")
        )

    async def stopping(self) -> None:
        """Requests that are left after a crash are failed by who hears of it, with its cause."""
        if self.watchdog is not None:
            self.watchdog.cancel()
