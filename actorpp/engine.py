"""The engine: one pipeline of stages and its coordinator, from a configuration to answers.

``async with Engine(config) as engine`` starts the stages, and leaves no process, socket or file behind. Requests go in
as token ids and come back as events; text is the gateway's business. The driver process imports no torch, unless the
stages run in it (``transport="inproc"``).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from hashlib import blake2b
from itertools import count
from pathlib import Path
from types import TracebackType

import msgspec
import structlog

from actorpp.analysis.chrome import write_trace
from actorpp.analysis.trace import Trace
from actorpp.assembly import choose_context_length, make_scheduler, stage_ports, stage_specs
from actorpp.config import EngineConfig
from actorpp.coordinator.chunking.choose import find_policy
from actorpp.coordinator.chunking.cost import CostModel
from actorpp.coordinator.chunking.plan import ChunkPlan
from actorpp.coordinator.lifecycle import CoordinatorLife
from actorpp.coordinator.recovery import Recovery, RecoveryLimits
from actorpp.coordinator.request import Request, StopText
from actorpp.coordinator.scheduler import Scheduler
from actorpp.coordinator.stage_group import StageGroup
from actorpp.errors import ConfigError, CoordinatorFailedError, ProfilingError, StageFailedError
from actorpp.planning import Planning
from actorpp.profiling import keep_profile, measure_profile
from actorpp.runtime import ActorSystem
from actorpp.serving.activity import Activity
from actorpp.serving.api import (
    ActorStats,
    EngineStats,
    GenerationParams,
    OnStartup,
    PrefillStats,
    StageStats,
    StartupProgress,
)
from actorpp.serving.handle import Handle
from actorpp.serving.request import check_fits
from actorpp.stages.checkpoint import resolve
from actorpp.stages.messages import Output

log = structlog.get_logger(__name__)

MAX_TRACED_REQUESTS = 100_000

UNITS = {"download": "bytes", "extract": "bytes", "convert": "parts", "load": "stages", "profile": "tokens"}


class Engine:
    """One model, split over stages, answering requests.

    Args:
        config: What to run.
        on_startup: Told how far the start has come.
        trace: Record what every stage does, for ``write_trace``.
        system: Home of the engine's actors, beside a program's own; by default a system of the engine's.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_startup: OnStartup | None = None,
        trace: bool = False,
        system: ActorSystem | None = None,
    ) -> None:
        self.config = config
        self._home = system
        self.num_stages = config.stages
        self._on_startup = on_startup or (lambda progress: None)
        self._trace = trace
        self._traced: list[Handle] = []
        self._rids = count(1)
        self._located = False
        self.activity = Activity(config.stages)
        self._clock = time.monotonic  # uvloop's own is of whole milliseconds, and stands still within a callback

    # --- start and end -----------------------------------------------------------------------------------------------

    async def locate(self) -> None:
        """Find the model and read its configuration; entering the engine does it, if it was not done before.

        From then on ``checkpoint`` and ``context_length`` are known: a gateway can refuse what cannot work before the
        stages load their weights.

        Raises:
            ConfigError, ModelNotFoundError, UnsupportedModelError, CheckpointError: The message says what was wrong.
        """
        if self._located:
            return
        config = self.config
        find_policy(config.policy_name)  # before a model is downloaded
        self.checkpoint = await resolve(
            config.model, device=config.device_type, load_format=config.load_format, progress=self._progress
        )
        self.context_length = choose_context_length(config, self.checkpoint)
        self._located = True

    async def __aenter__(self) -> Engine:
        """Find the model, start the stages, and begin the first epoch.

        Raises:
            ConfigError, ModelNotFoundError, UnsupportedModelError, CheckpointError: As ``locate``.
            StageFailedError: A stage did not come up.
        """
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _start(self, stack: AsyncExitStack) -> None:
        config, loop = self.config, asyncio.get_running_loop()
        self._started_at = self._progress_at = self._clock()
        self._failure: asyncio.Future[Exception] = loop.create_future()
        await self.locate()
        specs = stage_specs(config, self.checkpoint, self.context_length)
        self.planning = Planning(config, self.checkpoint, self.context_length, [(spec.lo, spec.hi) for spec in specs])
        # Made before any stage is started: it may be a class of the user's that cannot be.
        policy = self.planning.policy("fixed" if self.planning.needs_profile else None)
        system = self._home
        if system is None:
            system = await stack.enter_async_context(ActorSystem("driver"))
        self._system = system
        stages = self._stages = StageGroup(
            specs,
            stage_ports(config, system, stack, self._undecodable, trace=self._trace),
            self._system,
            watchdog_s=config.watchdog_timeout,
            on_output=self._on_output,
            on_lost=lambda stage, error: recovery.stage_lost(stage, error),
            on_epoch_lost=lambda epoch, error: recovery.epoch_lost(epoch, error),
            on_progress=lambda done, total: self._progress("load", done, total),
        )
        requests = self._requests = CoordinatorLife(
            self._system,
            stages,
            partial(make_scheduler, config, self.planning, policy),
            watchdog_s=config.watchdog_timeout,
            on_epoch_lost=lambda epoch, error: recovery.epoch_lost(epoch, error),
            on_failed=self._failed,
        )
        limits = RecoveryLimits(
            max_restarts=config.max_restarts,
            load_timeout_s=config.startup_timeout,
            fence_timeout_s=config.watchdog_timeout,
        )
        recovery = self._recovery = Recovery(stages, limits, requests)
        stack.push_async_callback(stages.close, config.shutdown_timeout)
        stack.push_async_callback(requests.close)
        try:
            async with asyncio.timeout(config.startup_timeout):
                actor = await self._system.spawn(lambda: recovery, name="recovery")
        except TimeoutError:
            raise StageFailedError(f"the stages were not ready after {config.startup_timeout:g} s") from None
        stack.push_async_callback(self._system.kill, actor)
        watching = asyncio.create_task(requests.watch(actor), name="watch recovery")
        stack.callback(watching.cancel)
        stack.callback(self._failed, StageFailedError("the engine is closing"))
        if self.planning.needs_profile:
            await self.take_profile()

    async def take_profile(self) -> None:
        """Measure a profile of the idle pipeline, follow it, and save it.

        What goes wrong is a warning in the log: without a profile the chunks of ``sglang`` have one size.
        """
        try:
            self.planning.profile = await measure_profile(
                self, on_progress=lambda done, total: self._progress("profile", done, total)
            )
            await asyncio.to_thread(keep_profile, self, self.planning.profile)
        except (ProfilingError, OSError) as error:
            log.warning("a profile was not taken or not saved", reason=str(error))
        self.scheduler.policy = self.planning.policy()

    @property
    def scheduler(self) -> Scheduler:
        """Of this engine, for figures and experiments."""
        return self._requests.scheduler

    def plan(self, prompt_tokens: int) -> ChunkPlan:
        """What the chunk policy would do with a prompt of so many tokens that finds the pipeline empty.

        Its times are None until something was measured: by a saved profile, or by prompts that this engine computed.

        Raises:
            ContextLengthExceededError: The context has no room for the prompt and one token.
            InvalidRequestError: Fewer than one token.
        """
        return self.planning.plan(self.scheduler.policy, prompt_tokens)

    # --- requests ----------------------------------------------------------------------------------------------------

    def submit(self, prompt_ids: Sequence[int], params: GenerationParams, stop_text: StopText | None = None) -> Handle:
        """Ask for a completion.

        Args:
            stop_text: Looks for stop strings in the output.

        Raises:
            InvalidRequestError, ContextLengthExceededError: As from ``check_fits``, or it needs more than the KV cache
                ever holds.
            OverloadedError: The queue is full.
            StageFailedError, CoordinatorFailedError: The pipeline has failed for good.
        """
        if self._failure.done():
            cause = self._failure.result()
            kind = CoordinatorFailedError if isinstance(cause, CoordinatorFailedError) else StageFailedError
            raise kind(f"the pipeline has failed: {cause}", stage=getattr(cause, "stage", None))
        check_fits(prompt_ids, params, self.checkpoint.vocab_size, self.context_length)
        room = min(self.context_length - len(prompt_ids), self.scheduler.most_output(len(prompt_ids)))
        seed = params.seed
        if seed is None:
            seed = self.config.seed if self.config.seed is not None else secrets.randbits(62)
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self.checkpoint.eos_token_ids)}
        end_ids = tuple(sorted(stop_ids)) if params.sampling.min_tokens else ()
        handle = Handle(
            next(self._rids),
            prompt_len=len(prompt_ids),
            clock=self._clock,
            stage_busy=self._busy,
            abort=self._requests.abort,
            activity=self.activity,
        )
        request = handle.request = Request(
            rid=int(handle.id),
            prompt=array("i", prompt_ids).tobytes(),
            prompt_len=len(prompt_ids),
            max_tokens=params.max_tokens or max(1, room),
            sampling=msgspec.structs.replace(params.sampling, seed=output_seed(seed, params.index), end_ids=end_ids),
            stop_ids=frozenset(stop_ids),
            stop_text=stop_text,
            priority=params.priority,
            sink=handle,
            deadline_at=None if params.deadline_s is None else asyncio.get_running_loop().time() + params.deadline_s,
        )
        self._requests.submit(request)
        if self._trace and len(self._traced) < MAX_TRACED_REQUESTS:
            self._traced.append(handle)
        if self._idle:
            self._progress_at = self._clock()
            self.activity.rest_ends()
        return handle

    @property
    def _idle(self) -> bool:
        return not self.scheduler.running and not self.scheduler.waiting

    def _busy(self) -> list[float]:
        return self.scheduler.stage_busy

    # --- what the stages say, and the end ----------------------------------------------------------------------------

    def _on_output(self, output: Output) -> None:
        self._progress_at = self._clock()
        step = next((step for step in self.scheduler.in_flight if step.seq == output.seq), None)
        if step is not None and output.epoch == self.scheduler.epoch:
            self.activity.step_done(step, output.timings, self.cost_model())
        self._requests.deliver(output)

    def _failed(self, error: Exception) -> None:
        """The first cause is the engine's."""
        if not self._failure.done():
            self._failure.set_result(error)

    def _undecodable(self, error: BaseException) -> None:
        """A stage process that sends what is no message cannot be trusted with anything."""
        self._recovery.epoch_lost(self._recovery.epoch, StageFailedError(f"a stage sent what cannot be read: {error}"))

    async def failed(self) -> None:
        """Wait until the engine fails as a whole, then raise the cause."""
        raise await asyncio.shield(self._failure)

    # --- what people see ---------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """The engine at this moment."""
        scheduler, now = self.scheduler, self._clock()
        uptime = now - self._started_at
        group = self._stages
        columns = (group.specs, group.pids, group.loaded, group.restarts, group.counters, scheduler.stage_busy)
        return EngineStats(
            state="failed" if self._failure.done() else self._recovery.state,
            uptime_s=uptime,
            requests_running=len(scheduler.running),
            requests_waiting=len(scheduler.waiting),
            requests_finished=scheduler.finished,
            prompt_tokens=scheduler.prompt_tokens,
            generated_tokens=scheduler.generated_tokens,
            steps=scheduler.steps,
            steps_in_flight=len(scheduler.in_flight),
            window=scheduler.config.window,
            pages_used=scheduler.pool.used_pages,
            pages_total=scheduler.pool.num_pages,
            page_size=scheduler.config.page_size,
            epoch=self._recovery.epoch,
            recoveries=self._recovery.recovered,
            recovery_s=self._recovery.seconds,
            replays=scheduler.replays,
            stages=tuple(
                StageStats(
                    layers=(spec.lo, spec.hi),
                    pid=pid,
                    busy=min(1.0, busy / uptime),
                    weight_bytes=loaded.weight_bytes,
                    kv_bytes=loaded.page_bytes * scheduler.config.num_pages,
                    restarts=restarts,
                    sent_bytes=counters.sent_bytes,
                    dead_letters=counters.dead_letters,
                    mailboxes=counters.mailboxes,
                )
                for spec, pid, loaded, restarts, counters, busy in zip(*columns, strict=True)
            ),
            stalled_s=0.0 if self._idle else now - self._progress_at,
        )

    def cost_model(self) -> CostModel:
        """What is known of the stages' times."""
        return self.planning.costs.model

    def prefills(self) -> list[PrefillStats]:
        """Requests whose prompts are being computed, in order of admission."""
        return [
            request.sink.prefill()
            for request in self.scheduler.running.values()
            if request.computed < request.prompt_len and isinstance(request.sink, Handle)
        ]

    def actors(self) -> list[ActorStats]:
        """The actors of the driver, the engine's among them."""
        return [ActorStats(cell.name, cell.restarts, cell.ref.depths) for cell in self._system.cells()]

    async def trace(self) -> Trace:
        """What every stage did, and for which requests, since the last call; it is forgotten here.

        Raises:
            ConfigError: The engine records no trace.
            StageFailedError: A stage is gone, and its spans with it.
        """
        if not self._trace:
            raise ConfigError("the engine was started without trace=True", param="trace")
        answers = await self._stages.trace()
        requests = tuple(handle.traced() for handle in self._traced)
        self._traced = [handle for handle, at in zip(self._traced, requests, strict=True) if at.ended is None]
        return Trace(
            about={
                "model": self.config.model or self.checkpoint.path.name,
                "dtype": self.config.dtype,
                "device": self.config.device_type,
                "layers": [[spec.lo, spec.hi] for spec in self._stages.specs],
                "threads_per_stage": self.config.threads(),
                "window": self.scheduler.config.window,
                "chunk_policy": self.planning.limits.chunk_policy,
                "chunk_size": self.planning.limits.chunked_prefill_size,
            },
            stages=tuple(answer.spans for answer in answers),
            requests=requests,
            dropped=sum(answer.dropped for answer in answers),
        )

    async def write_trace(self, path: Path) -> None:
        """Write what ``trace`` gives as Chrome trace JSON, for chrome://tracing, Perfetto or ``actorpp report``.

        Raises:
            ConfigError: The engine records no trace, or the file cannot be written.
            StageFailedError: A stage is gone, and its spans with it.
        """
        await asyncio.to_thread(write_trace, await self.trace(), path)

    def _progress(self, phase: str, done: int, total: int) -> None:
        unit = UNITS[phase]
        self._on_startup(msgspec.convert({"phase": phase, "done": done, "total": total, "unit": unit}, StartupProgress))


def output_seed(seed: int, index: int) -> int:
    """The seed of one of several outputs, a pure function of the request's and the output's number. The first's is the
    request's own: it is what the request would have got alone."""
    if index == 0:
        return seed
    return int.from_bytes(blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little") >> 1
