"""A pipeline stand-in for the scheduler: steps come back as Outputs whose ids are a function of the position."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from actorpp.coordinator.chunking.fixed import FixedChunks
from actorpp.coordinator.request import EndReason, Request
from actorpp.coordinator.scheduler import Scheduler
from actorpp.coordinator.scheduler_config import SchedulerConfig
from actorpp.errors import RequestError
from actorpp.stages.messages import Admit, Logprobs, Output, SamplingParams, StageTiming, Step


@dataclass
class Recorder:
    """A sink that keeps what it is told and checks the order of it."""

    computed: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    rows: int = 0  # log-probabilities of output tokens
    prompt_rows: int = 0  # and of prompt tokens
    end: EndReason | RequestError | None = None

    def progress(self, computed: int, total: int) -> None:
        assert self.end is None
        assert computed <= total
        self.computed.append(computed)

    def prompt_logprobs(self, logprobs: Logprobs) -> None:
        assert self.end is None
        self.prompt_rows += logprobs.rows

    def tokens(self, ids: tuple[int, ...], logprobs: Logprobs | None = None) -> None:
        assert self.end is None
        self.ids.extend(ids)
        self.rows += 0 if logprobs is None else logprobs.rows

    def ended(self, reason: EndReason) -> None:
        assert self.end is None
        self.end = reason

    def failed(self, error: RequestError) -> None:
        assert self.end is None
        self.end = error


def token_at(rid: int, position: int) -> int:
    return 1000 * rid + position


def some_logprobs(rows: int) -> Logprobs:
    return Logprobs(top=0, ids=b"\0" * 4 * rows, values=b"\0" * 4 * rows, ranks=b"\0" * 4 * rows)


def scheduler(
    *,
    stages: int = 2,
    depth: int = 1,
    lookahead: int = 1,
    pages: int = 1000,
    page_size: int = 16,
    chunk: int = 64,
    batched: int | None = None,
    running: int = 16,
    queued: int = 64,
) -> Scheduler:
    batched = batched or chunk + running
    config = SchedulerConfig(
        num_stages=stages,
        async_depth=depth,
        lookahead=lookahead,
        num_pages=pages,
        page_size=page_size,
        max_num_batched_tokens=batched,
        max_prefill_tokens=batched,
        max_running_requests=running,
        max_queued_requests=queued,
    )
    return Scheduler(config, FixedChunks(chunk, align=page_size), epoch=1)


def request(
    rid: int, prompt_len: int, max_tokens: int = 4, stop: frozenset[int] = frozenset(), **sampling: Any
) -> Request:
    return Request(
        rid=rid,
        prompt=b"\0\0\0\0" * prompt_len,
        prompt_len=prompt_len,
        max_tokens=max_tokens,
        sampling=SamplingParams(**sampling),
        stop_ids=stop,
        sink=Recorder(),
    )


def recorder(request: Request) -> Recorder:
    assert isinstance(request.sink, Recorder)
    return request.sink


class Pipe:
    """Takes what the scheduler issues; ``answer`` gives back the Output of the oldest step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.log: list[Admit | Step] = []
        self.pending: deque[Step] = deque()

    def pump(self) -> list[Step]:
        """Everything that can be issued now."""
        steps = []
        while (entry := self.scheduler.next_entry()) is not None:
            self.log.append(entry)
            if isinstance(entry, Step):
                steps.append(entry)
                self.pending.append(entry)
        return steps

    def answer(self) -> Step:
        step = self.pending.popleft()
        ids = tuple(token_at(s.rid, s.start + s.length) for s in step.segments if s.sample)
        timings = tuple(StageTiming(0.0, 1.0) for _ in range(self.scheduler.config.num_stages))
        output = Output(epoch=step.epoch, seq=step.seq, ids=ids, timings=timings)
        output = msgspec.structs.replace(output, **self.logprobs(step))
        self.scheduler.on_output(output)
        return step

    def logprobs(self, step: Step) -> dict[str, dict[int, Logprobs]]:
        """What the requests of the step asked for."""
        sampled, prompt = {}, {}
        for segment in step.segments:
            request = self.scheduler.running[segment.rid]
            rows = segment.prompt_logprob_rows(request.prompt_len)
            if request.sampling.logprobs is not None and segment.sample:
                sampled[segment.rid] = some_logprobs(1)
            if request.sampling.prompt_logprobs is not None and rows:
                prompt[segment.rid] = some_logprobs(len(rows))
        return {"logprobs": sampled, "prompt_logprobs": prompt}

    def restart(self) -> None:
        """The epoch is lost with everything in flight."""
        self.pending.clear()
        self.scheduler.restart(self.scheduler.epoch + 1)

    def drain(self) -> None:
        self.pump()
        while self.pending:
            self.answer()
            self.pump()
