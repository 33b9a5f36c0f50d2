"""One submitted request between two sides: the coordinator's sink, and the client's iterator of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from copy import copy

from actorpp.analysis.trace import TracedRequest
from actorpp.coordinator.request import ChunkTimes, EndReason, Request
from actorpp.errors import RequestError
from actorpp.serving.activity import Activity, RequestRecord
from actorpp.serving.api import Event, Finished, PrefillStats, Progress, PromptLogprobs, RequestMetrics, Tokens
from actorpp.serving.logprobs import TokenLogprob, decode_logprobs
from actorpp.stages.messages import Logprobs


class Handle:
    """Merges events that the consumer has not taken yet: a slow one holds its own ids and nothing else.

    Args:
        rid: The request's number in the engine.
        prompt_len: Tokens of the prompt.
        clock: Seconds, as of the stages' spans.
        stage_busy: Compute seconds of each stage so far.
        abort: Asks the coordinator for the end.
        activity: Told of first tokens, of the time between tokens, and of the end.

    Attributes:
        request: What the coordinator has of it, which refers to this too; let go at the end, and with it the prompt.
    """

    def __init__(
        self,
        rid: int,
        *,
        prompt_len: int,
        clock: Callable[[], float],
        stage_busy: Callable[[], list[float]],
        abort: Callable[[Request], None],
        activity: Activity,
    ) -> None:
        self.id = str(rid)
        self.request: Request | None = None  # set by the engine, before the coordinator hears of it
        self._prompt_len = prompt_len
        self._chunk_times: list[ChunkTimes] = []  # of the request, once it has ended
        self._clock = clock
        self._stage_busy = stage_busy
        self._abort = abort
        self._activity = activity
        self._submitted_at = clock()
        self._busy_before = list(stage_busy())
        self._first_token_at: float | None = None
        self._last_token_at = 0.0
        self._ended_at: float | None = None
        self._generated = 0
        self._progress: Progress | None = None
        self._pace_from: tuple[float, int] | None = None  # when how much of the prompt was computed
        self._newest = (self._submitted_at, 0)
        self._ids: list[int] = []
        self._logprobs: list[Logprobs] = []  # of the same ids, if they were asked for
        self._prompt_logprobs: list[Logprobs] = []
        self._end: Finished | RequestError | None = None
        self._news = asyncio.Event()

    def abort(self) -> None:
        """Ask for the end; safe at any time and any number of times."""
        if self._end is None and self.request is not None:
            self._abort(self.request)

    def traced(self) -> TracedRequest:
        """Its line in a trace, so far."""
        return TracedRequest(
            rid=int(self.id),
            prompt_tokens=self._prompt_len,
            output_tokens=self._generated,
            submitted=self._submitted_at,
            first_token=self._first_token_at,
            ended=self._ended_at,
            chunks=tuple(self._chunk_times if self.request is None else self.request.chunk_times),
        )

    # --- the coordinator's side --------------------------------------------------------------------------------------

    def progress(self, computed: int, total: int) -> None:
        now = self._clock()
        if self._pace_from is None:
            self._pace_from = (now, computed)
        self._newest = (now, computed)
        self._progress = Progress(computed, total)
        self._news.set()

    def prompt_logprobs(self, logprobs: Logprobs) -> None:
        self._prompt_logprobs.append(logprobs)
        self._news.set()

    def tokens(self, ids: tuple[int, ...], logprobs: Logprobs | None = None) -> None:
        now = self._clock()
        if self._first_token_at is None:
            self._first_token_at = now
            self._activity.first_token(now - self._submitted_at)
        else:
            self._activity.token_gap(now - self._last_token_at)
        self._last_token_at = now
        self._generated += len(ids)
        self._ids.extend(ids)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        self._news.set()

    def ended(self, reason: EndReason) -> None:
        self._over(Finished(reason, self._metrics()), reason)

    def failed(self, error: RequestError) -> None:
        self._over(error, error.code)

    def _over(self, end: Finished | RequestError, outcome: str) -> None:
        self._ended_at = self._clock()
        self._end = end
        self._activity.ended(self._record(outcome))
        if self.request is not None:
            self._chunk_times = self.request.chunk_times
            self.request = None
        self._news.set()

    # --- the client's side -------------------------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yields what there is, and last Finished; a request that failed raises its RequestError instead."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._progress is not None:
                progress, self._progress = self._progress, None
                yield progress
            if self._prompt_logprobs:
                prompt, self._prompt_logprobs = self._prompt_logprobs, []
                yield PromptLogprobs(_decoded(prompt))
            if self._ids:
                ids, self._ids = tuple(self._ids), []
                logprobs, self._logprobs = self._logprobs, []
                yield Tokens(ids, _decoded(logprobs))
            if self._ids or self._prompt_logprobs or self._progress is not None:
                self._news.set()  # more came while the consumer had control
            elif isinstance(self._end, Finished):
                yield self._end
                return
            elif self._end is not None:
                # A copy: it gets the frames of who hears of it, and these refer to this.
                raise copy(self._end) from self._end.__cause__

    def prefill(self) -> PrefillStats:
        """How far the prompt is."""
        total = self._prompt_len
        at, computed = self._newest
        remaining = None
        if self._pace_from is not None and computed > self._pace_from[1]:
            began, before = self._pace_from
            remaining = (total - computed) * (at - began) / (computed - before)
        return PrefillStats(self.id, computed, total, self._clock() - self._submitted_at, remaining)

    def _record(self, outcome: str) -> RequestRecord:
        metrics = self._end.metrics if isinstance(self._end, Finished) else None
        return RequestRecord(outcome, metrics is None, self._prompt_len, self._generated, metrics)

    def _metrics(self) -> RequestMetrics:
        e2e = max(self._clock() - self._submitted_at, 1e-9)
        ttft = tpot = rate = None
        if self._first_token_at is not None:
            ttft = self._first_token_at - self._submitted_at
            rate = self._prompt_len / max(self._first_token_at - self._submitted_at, 1e-9)
            if self._generated > 1:
                tpot = (self._last_token_at - self._first_token_at) / (self._generated - 1)
        busy = zip(self._busy_before, self._stage_busy(), strict=True)
        return RequestMetrics(
            ttft_s=ttft,
            e2e_s=e2e,
            prefill_tok_s=rate,
            tpot_s=tpot,
            chunks=tuple(self.request.chunks) if self.request is not None else (),
            chunk_times=tuple(self.request.chunk_times) if self.request is not None else (),
            stage_busy=tuple(min(1.0, (after - before) / e2e) for before, after in busy),
        )


def _decoded(logprobs: list[Logprobs]) -> tuple[TokenLogprob, ...]:
    return tuple(row for rows in logprobs for row in decode_logprobs(rows))
