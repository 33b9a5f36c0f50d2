"""Requests by their client's id, so that a client that lost an answer can ask for it again.

Everything kept is bounded: unfinished requests by number, finished ones by number, by bytes and by age. A request that
nobody waits for or polls is aborted after a while. Knows no sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import copy
from typing import Any

import msgspec
import structlog

from actorpp.errors import AbortedError, ActorppError, InvalidRequestError, OverloadedError
from actorpp.serving.api import Progress
from actorpp.serving.completion import Completion, CompletionResult, Delta
from actorpp.serving.gateway import Gateway
from actorpp.serving.logprobs import TokenLogprob
from actorpp.serving.request import CompletionRequest

JobId = str | int

_log = structlog.get_logger(__name__)


class JobLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of what is kept. Over ``max_unfinished`` a request is refused; the other bounds drop the oldest.

    Attributes:
        max_unfinished: Requests that have not ended.
        max_finished, max_finished_bytes, finished_ttl_s: Ended requests, their output, and seconds since they ended.
        abandoned_s: Seconds without anyone waiting or polling after which an unfinished request is aborted.
    """

    max_unfinished: int = 1024
    max_finished: int = 1024
    max_finished_bytes: int = 64 * 1024 * 1024
    finished_ttl_s: float = 600.0
    abandoned_s: float = 120.0


class Job:
    """One request: its output so far and how it ended. Changed by its own task only."""

    def __init__(self, id: JobId, fingerprint: bytes, n: int) -> None:
        self.id = id
        self.fingerprint = fingerprint
        self.n = n  # outputs
        self.deltas: list[Delta] = []
        self.progress = Progress(0, 0)
        self.prompt_tokens: int | None = None  # once the engine has taken it
        self.result: CompletionResult | None = None
        self.error: ActorppError | None = None
        self.watchers = 0
        self.touched = asyncio.get_running_loop().time()  # last watched
        self.ended_at = 0.0
        self.nbytes = 0  # about what its output occupies, once it has ended
        self._completion: Completion | None = None  # until it has ended: it holds the prompt
        self._aborted = False
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self.result is not None or self.error is not None

    @property
    def accepted(self) -> bool:
        """Whether the engine took it."""
        return self.prompt_tokens is not None

    def abort(self) -> None:
        """Ask for the end, also before the engine has it."""
        self._aborted = True
        if self._completion is not None:
            self._completion.abort()

    def cause(self) -> ActorppError:
        """What it ended with instead of a result, to be raised. A copy: who is told adds frames, which have this."""
        return AbortedError("the request was aborted") if self.error is None else copy(self.error)

    async def follow(self, gateway: Gateway, request: CompletionRequest, deadline_s: float | None) -> None:
        """Run the request to its end; how it ended is in ``result`` or ``error``."""
        try:
            self._completion = await gateway.complete(request, deadline_s)
            self.prompt_tokens = self._completion.prompt_tokens
            if self._aborted:
                self._completion.abort()
            self.changed()
            async for event in self._completion:
                match event:
                    case Progress():
                        self.progress = event
                        self.changed()
                    case Delta():
                        self.deltas.append(event)
                        self.changed()
                    case CompletionResult():
                        self.result = event
        except ActorppError as error:
            self.error = error.with_traceback(None)  # whose frames hold the prompt
        except Exception as error:  # a fault of ours ends this request alone
            _log.exception("request failed", id=self.id)
            self.error = ActorppError(f"internal error: {type(error).__name__}")
        finally:
            if self._completion is not None:
                self._completion.abort()
                self._completion = None
            self.nbytes = sum(_nbytes(delta) for delta in self.deltas)
            if self.result is not None and self.result.prompt_logprobs is not None:
                self.nbytes += sum(_nbytes_of(row) for row in self.result.prompt_logprobs if row is not None)
            self.ended_at = asyncio.get_running_loop().time()
            self.changed()

    def changed(self) -> None:
        """Wake everyone who waits; they look for themselves at what changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool] = lambda: False, *, watched: bool = True) -> None:
        """Wait until the condition holds, or it has ended. ``watched``: somebody wants it, it is not abandoned."""
        self.watchers += watched
        try:
            while not (self.ended or condition()):
                await self._changed.wait()
        finally:
            self.watchers -= watched
            if watched:
                self.touched = asyncio.get_running_loop().time()


def _nbytes(delta: Delta) -> int:
    return 64 + 8 * len(delta.ids) + 4 * len(delta.text) + sum(_nbytes_of(row) for row in delta.logprobs)


def _nbytes_of(row: TokenLogprob) -> int:
    return 128 + 120 * len(row.top)


class Jobs:
    """All requests of one server. An async context manager: leaving it aborts what is unfinished."""

    def __init__(self, gateway: Gateway, limits: JobLimits) -> None:
        self._gateway = gateway
        self._limits = limits
        self._unfinished: dict[JobId, Job] = {}
        self._finished: dict[JobId, Job] = {}  # in the order in which they ended
        self._finished_bytes = 0
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Jobs:
        await self._group.__aenter__()
        self._sweeper = self._group.create_task(self._sweep())
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        self._sweeper.cancel()
        for job in self._unfinished.values():
            job.abort()
        await self._group.__aexit__(*exc_info)

    def __len__(self) -> int:
        return len(self._unfinished) + len(self._finished)

    def start(self, id: JobId, fingerprint: bytes, request: CompletionRequest, deadline_s: float | None) -> Job:
        """The job of this id: the one that is there, or a new one when there is none or it may be tried again.

        Args:
            fingerprint: Tells whether an id that is used again asks for the same.

        Raises:
            InvalidRequestError: The id belongs to a different request.
            OverloadedError: Too many are unfinished.
        """
        job = self._unfinished.get(id) or self._finished.get(id)
        if job is not None and not (job.error is not None and job.error.retryable):
            if job.fingerprint != fingerprint:
                raise InvalidRequestError(f"id {id!r} belongs to a different request", param="id")
            return job
        if len(self._unfinished) >= self._limits.max_unfinished:
            raise OverloadedError(f"{self._limits.max_unfinished} requests are unfinished")
        self._forget(id)
        job = self._unfinished[id] = Job(id, fingerprint, request.n)
        self._group.create_task(self._run(job, request, deadline_s))
        return job

    def get(self, id: JobId) -> Job:
        """The job of this id. Raises InvalidRequestError when there is none, or none any more."""
        job = self._unfinished.get(id) or self._finished.get(id)
        if job is None:
            raise InvalidRequestError(f"no request {id!r}: never seen, or forgotten", param="request")
        return job

    async def _run(self, job: Job, request: CompletionRequest, deadline_s: float | None) -> None:
        await job.follow(self._gateway, request, deadline_s)
        del self._unfinished[job.id]
        if job.accepted:  # else nothing has run: the id is free for another try
            self._finished[job.id] = job
            self._finished_bytes += job.nbytes
            self._drop_finished()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(self._limits.finished_ttl_s, self._limits.abandoned_s) / 4)
            now = asyncio.get_running_loop().time()
            for job in self._unfinished.values():
                if not job.watchers and now - job.touched > self._limits.abandoned_s:
                    _log.warning("request abandoned by its client", id=job.id)
                    job.abort()
            self._drop_finished()

    def _drop_finished(self) -> None:
        now = asyncio.get_running_loop().time()
        limits = self._limits
        for job in list(self._finished.values()):
            if (
                len(self._finished) <= limits.max_finished
                and self._finished_bytes <= limits.max_finished_bytes
                and now - job.ended_at <= limits.finished_ttl_s
            ):
                return
            self._forget(job.id)

    def _forget(self, id: JobId) -> None:
        job = self._finished.pop(id, None)
        if job is not None:
            self._finished_bytes -= job.nbytes
