"""The scheduler: requests and Outputs in, log entries out. Continuous batching over pipeline slots.

A plain state machine: no I/O, no clock, no tasks. The same calls in the same order give the same log, so a trace of
events replays to the same plan. The Coordinator actor around it owns time and the wire.

When an epoch is lost with a stage, ``restart`` begins the next one: what was in flight is dropped, and every admitted
request waits again, before all others, to be computed from its prompt and the ids delivered so far. Randomness depends
on seed and output position alone, so it goes on with the tokens that it would have had.

Waiting requests are admitted by priority, lower first, and in order of arrival where it is equal. The first of them is
never passed by, so that small ones cannot starve a large one; an admitted one keeps its place whatever comes after it,
so that urgent ones cannot starve the running.

Decode requests are spread over as many micro-batches as keep the stages busy while one is between two of its steps.
Each step takes the decode tokens of one slot first, then prefill chunks within the token budget.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator

from actorpp.coordinator.chunking.fit import StageSample
from actorpp.coordinator.chunking.learner import CostLearner
from actorpp.coordinator.chunking.policy import ChunkPolicy, ChunkRequest
from actorpp.coordinator.pages import PagePool
from actorpp.coordinator.request import ChunkTimes, EndReason, Phase, Request
from actorpp.coordinator.scheduler_config import SchedulerConfig
from actorpp.coordinator.slots import DecodeSlots
from actorpp.coordinator.suspects import Suspects
from actorpp.errors import (
    CrashingRequestError,
    InvalidRequestError,
    OverloadedError,
    ProtocolError,
    RequestError,
    StageCrashedError,
)
from actorpp.stages.messages import Admit, FromOutput, LogEntry, Logprobs, Output, Segment, Step

# Prompt tokens of one step, of all requests, whose log-probabilities are wanted: the last stage holds a row of logits
# for each, and its Output carries up to 21 ids and values for each.
MAX_PROMPT_LOGPROBS = 512


class Scheduler:
    """Decides every log entry, epoch by epoch.

    Args:
        policy: Sizes the chunks.
        costs: Learns what steps cost, and predicts it.
    """

    def __init__(
        self, config: SchedulerConfig, policy: ChunkPolicy, *, epoch: int, costs: CostLearner | None = None
    ) -> None:
        self.config = config
        self.policy = policy
        self.costs = costs
        self.epoch = epoch
        self.pool = PagePool(config.num_pages)
        self.waiting: list[Request] = []  # in order of admission
        self.running: dict[int, Request] = {}  # admitted, in order of admission, until the last segment is back
        self.in_flight: deque[Step] = deque()
        self.steps = 0
        self.finished = 0
        self.replays = 0  # of requests
        self.prompt_tokens = 0  # of admitted requests
        self.generated_tokens = 0
        self.stage_busy = [0.0] * config.num_stages  # compute seconds so far
        self.next_seq = 0
        self._retire: list[int] = []
        self.suspects = Suspects()
        self._slots = DecodeSlots(config.num_stages, config.num_slots, self.running)
        self._short_first = False

    # --- requests in -----------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Whether the request can be queued now.

        Raises:
            InvalidRequestError: It could never fit the KV cache.
            OverloadedError: The queue is full.
        """
        pages = self._pages_for(request)
        if pages > self.pool.num_pages:
            tokens = self.pool.num_pages * self.config.page_size
            raise InvalidRequestError(
                f"the request needs {pages * self.config.page_size} KV tokens (prompt, max_tokens and async depth), "
                f"the cache holds {tokens}: shorten it, or raise kv_tokens"
            )
        if len(self.waiting) >= self.config.max_queued_requests + self._free_places():
            limit = self.config.max_queued_requests
            raise OverloadedError(f"{len(self.waiting)} requests wait already; max_queued_requests is {limit}")

    def most_output(self, prompt_len: int) -> int:
        """Tokens that the KV cache has room for behind a prompt of so many; negative if not even that fits."""
        return self.pool.num_pages * self.config.page_size - self.config.async_depth - prompt_len

    def submit(self, request: Request) -> None:
        """Queue a request. Raises as ``check``."""
        self.check(request)
        # Behind its equals, and behind all that were admitted before: their order is that of admission.
        insort(self.waiting, request, key=lambda other: (not other.replays, 0 if other.replays else other.priority))

    def abort(self, request: Request) -> None:
        """End a request now, in whatever phase; nothing happens if it has ended."""
        self._end(request, "abort")

    def fail(self, request: Request, error: RequestError) -> None:
        """End a request with an error; nothing happens if it has ended."""
        self._end(request, error)

    def fail_all(self, error: RequestError) -> None:
        """End every request with the same error."""
        for request in self.requests():
            self._end(request, error)

    def abandon(self, error: RequestError) -> None:
        """Tell every client that its request has ended, and leave the books as they are: after a crash in them."""
        for request in self.requests():
            request.phase = Phase.ENDED
            if request.deadline is not None:
                request.deadline.cancel()
            request.sink.failed(error)

    def requests(self) -> list[Request]:
        """All requests that have not ended, in order of admission."""
        return [r for r in (*self.running.values(), *self.waiting) if r.phase is not Phase.ENDED]

    def restart(self, epoch: int, crash: StageCrashedError | None = None) -> None:
        """Drop the running epoch and begin another on empty stages. Nothing that was delivered changes or comes again.

        Pages are all free again: the requests in flight wait, in order of admission and before the others, and reserve
        them anew. Those that had ended, and had segments in flight, are gone.

        Args:
            crash: How a stage ended the last epoch, if it was by its own doing.
        """
        convict = None if crash is None else self.suspects.crashed([r for r in self.running.values() if r.in_flight])
        if crash is not None and convict is not None:
            text = f"{crash}: for the {convict.crashes}. time in a row with this request, now with no other"
            self._end(convict, CrashingRequestError(text, stage=crash.stage))
        self.suspects.alone = None
        lost = [request for request in self.running.values() if request.phase is not Phase.ENDED]
        for request in self.running.values():
            self.pool.give_back(request.pages)
        for request in lost:
            request.rewind()
        self.running.clear()
        self.waiting[:0] = lost
        self.waiting.sort(key=lambda request: not self.suspects.suspected(request))
        self.replays += len(lost)
        self.in_flight.clear()
        self._retire.clear()
        self.epoch, self.next_seq = epoch, 0

    # --- log out ---------------------------------------------------------------------------------------------------

    def next_entry(self) -> LogEntry | None:
        """The next entry of the log, or None when nothing can be issued before the next event."""
        if (admit := self._admit()) is not None:
            return admit
        if len(self.in_flight) >= self.config.window or self._waits_for_alone():
            return None
        slot, segments = self._decode_segments()
        self._add_prefill_segments(segments)
        if not segments:
            return None
        seq = self._take_seq()
        step = Step(
            epoch=self.epoch,
            seq=seq,
            slot=slot,
            segments=tuple(segments),
            retire=tuple(self._retire),
            watermark=self.in_flight[0].seq if self.in_flight else seq,
            feeds=self.config.async_depth > 0 and any(s.sample for s in segments),
        )
        self._retire.clear()
        self.in_flight.append(step)
        self.steps += 1
        return step

    def _admit(self) -> Admit | None:
        if not self.waiting or not self._free_places() or self.suspects.alone is not None:
            return None
        suspected = self.suspects.suspected(self.waiting[0])
        if suspected and self.in_flight:
            return None
        pages = self.pool.take(self._pages_for(self.waiting[0]))
        if pages is None:
            return None
        request = self.waiting.pop(0)
        request.pages = pages
        request.phase = Phase.PREFILL
        self.running[request.rid] = request
        if suspected:
            self.suspects.alone = request
        self.prompt_tokens += 0 if request.replays else request.prompt_len
        return Admit(
            epoch=self.epoch,
            seq=self._take_seq(),
            rid=request.rid,
            prompt_len=request.prompt_len,
            sampling=request.sampling,
            pages=pages,
            tokens=request.prefill_ids,
        )

    def _decode_segments(self) -> tuple[int, list[Segment]]:
        """Decode tokens of the slot that was served least recently among those with a request ready.

        Where some of a slot's requests wait for an Output that the others need not wait for, all wait, if that keeps no
        stage from work: else they would go in steps of their own for good.
        """
        ready: dict[int, list[Request]] = {}
        behind: set[int] = set()
        for request in self._computed():
            if request.slot is None or request.sampled >= request.max_tokens:
                continue
            if request.unprocessed > self.config.async_depth:
                behind.add(request.slot)
            elif request.source is None or self.steps - request.source_step >= self.config.num_stages:
                ready.setdefault(request.slot, []).append(request)
        if len(self.in_flight) >= self.config.num_stages and not self._prefilling():
            ready = {slot: requests for slot, requests in ready.items() if slot not in behind}
        slot = self._slots.take_turn(ready)
        segments: list[Segment] = []
        for index, request in enumerate(ready.get(slot, ())):
            token = request.source or request.output_ids[-1]
            start = request.prompt_len + request.sampled - 1
            segments.append(Segment(request.rid, start, 1, token, sample=True))
            self._sampled(request, index)
        return slot, segments

    def _add_prefill_segments(self, segments: list[Segment]) -> None:
        budget = self.config.max_num_batched_tokens - len(segments)
        index = len(segments)  # of the next sampling segment: all decode segments sample
        logprobs = MAX_PROMPT_LOGPROBS
        first = True
        order = self._prefill_order()
        queue = [*order, *self.waiting]
        queued_tokens = sum(request.remaining for request in queue)
        packed = 0  # prompt tokens in this step
        for request in order:
            whole = min(self.config.max_num_batched_tokens, self.config.max_prefill_tokens)
            room = min(budget, self.config.max_prefill_tokens)
            if request.sampling.prompt_logprobs is not None:
                whole, room = min(whole, MAX_PROMPT_LOGPROBS), min(room, logprobs)
            if not room:
                continue
            asked = ChunkRequest(
                rid=request.rid,
                prompt_len=request.issued + request.remaining,
                queued=len(queue) - 1,
                queued_tokens=queued_tokens - request.remaining,
                step_tokens=packed,
                steps_ahead=len(self.in_flight),
            )
            chunk = self.policy.next_chunk(asked, request.issued, request.remaining, room if first else whole)
            if not chunk or chunk > room:  # behind the first, a chunk goes in whole or waits: no splinters
                return
            first = False
            final = chunk == request.remaining
            segments.append(Segment(request.rid, request.issued, chunk, sample=final))
            request.chunk_times.append(self._predicted(request.issued, chunk, final))
            request.issued += chunk
            request.chunks.append(chunk)
            packed += chunk
            queued_tokens -= chunk
            if final:
                queue.remove(request)
            budget -= chunk
            logprobs -= chunk if request.sampling.prompt_logprobs is not None else 0
            if final:
                request.phase = Phase.DECODE
                request.slot = self._slots.emptiest()
                self._sampled(request, index)
                index += 1
            else:
                request.in_flight += 1

    def _prefill_order(self) -> list[Request]:
        """In order of admission, but every other step the shortest first: a short one waits two chunks at most."""
        order = self._prefilling()
        if len(order) > 1:
            self._short_first = not self._short_first
            if self._short_first:
                order.sort(key=lambda r: r.remaining)
        return order

    def _predicted(self, history: int, tokens: int, samples: bool) -> ChunkTimes:
        model = None if self.costs is None else self.costs.model
        known = model is not None and model.in_seconds
        return ChunkTimes(history, tokens, model.times(history, tokens, samples) if model and known else None)

    # --- outputs in ------------------------------------------------------------------------------------------------

    def on_output(self, output: Output) -> None:
        """Apply the Output of the oldest step in flight.

        Raises:
            ProtocolError: It is of another epoch or step, or has another number of ids or log-probabilities: the epoch
                is lost.
        """
        if output.epoch != self.epoch or not self.in_flight or output.seq != self.in_flight[0].seq:
            expected = self.in_flight[0].seq if self.in_flight else None
            raise ProtocolError(
                f"output of step {output.seq} in epoch {output.epoch}, expected {expected} in {self.epoch}"
            )
        step = self.in_flight.popleft()
        sampling = sum(s.sample for s in step.segments)
        if len(output.ids) != sampling:
            raise ProtocolError(f"output of step {step.seq} has {len(output.ids)} ids for {sampling} sampling segments")
        seconds = tuple(timing.end - timing.start for timing in output.timings)
        for stage, spent in enumerate(seconds):
            self.stage_busy[stage] += spent
        self._measured(step, seconds)
        self._slots.measured(output.timings, decode=all(segment.token is not None for segment in step.segments))
        ids = iter(output.ids)
        for segment in step.segments:
            self._segment_done(self.running[segment.rid], segment, output, ids)

    def _measured(self, step: Step, seconds: tuple[float, ...]) -> None:
        """Learn from the step if it was one prompt chunk, and note its times beside what was predicted."""
        alone = len(step.segments) == 1
        for segment in step.segments:
            if segment.token is None:
                times = self.running[segment.rid].chunk_times
                at = next(i for i in range(len(times) - 1, -1, -1) if times[i].history == segment.start)
                times[at] = times[at].measured(seconds, alone=alone)
                if alone and self.costs is not None:
                    self.costs.add(StageSample(segment.start, segment.length, segment.sample, seconds))

    def _segment_done(self, request: Request, segment: Segment, output: Output, ids: Iterator[int]) -> None:
        request.in_flight -= 1
        token = next(ids) if segment.sample else None
        logprobs, prompt_logprobs = _logprobs(request, segment, output)
        if (error := output.errors.get(request.rid)) is not None:
            self._end(request, RequestError(error))
        if request.phase is not Phase.ENDED:
            if segment.token is None:
                request.computed += segment.length
                if not request.output_ids:
                    request.sink.progress(request.computed, request.prompt_len)
            if prompt_logprobs is not None:
                self._deliver_prompt_logprobs(request, prompt_logprobs, segment.start)
            if token is not None:
                self._deliver(request, token, logprobs, output.seq)
            self.suspects.progressed(request)
        if request.phase is Phase.ENDED and not request.in_flight:
            self._release(request)

    def _deliver_prompt_logprobs(self, request: Request, logprobs: Logprobs, start: int) -> None:
        """Rows of the positions from ``start`` on; a replay computes again what was delivered before."""
        new = logprobs.after(request.prompt_rows - start)
        if new.rows:
            request.prompt_rows += new.rows
            request.sink.prompt_logprobs(new)

    def _deliver(self, request: Request, token: int, logprobs: Logprobs | None, seq: int) -> None:
        request.output_ids.append(token)
        self.generated_tokens += 1
        if request.source is not None and request.source.seq == seq:
            request.source = None
        request.sink.tokens((token,), logprobs)
        try:
            stops = request.stop_text is not None and request.stop_text.reaches_stop(token)
        except RequestError as error:
            self._end(request, error)
            return
        if stops or token in request.stop_ids:
            self._end(request, "stop")
        elif len(request.output_ids) >= request.max_tokens:
            self._end(request, "length")

    # --- ends ------------------------------------------------------------------------------------------------------

    def _end(self, request: Request, how: EndReason | RequestError) -> None:
        if request.phase is Phase.ENDED:
            return
        if request.phase is Phase.WAITING and request in self.waiting:  # it may still be on its way: an abort overtakes
            self.waiting.remove(request)
        request.phase = Phase.ENDED
        self.finished += 1
        self.suspects.ended(request)
        if request.deadline is not None:
            request.deadline.cancel()
        if request.slot is not None:
            request.slot = None
            self._slots.balance()
        if not request.in_flight:
            self._release(request)
        if isinstance(how, RequestError):
            request.sink.failed(how)
        else:
            request.sink.ended(how)

    def _release(self, request: Request) -> None:
        """No segment is on its way: nothing reads or writes the request's pages any more. Harmless when repeated."""
        if self.running.pop(request.rid, None) is not None:
            self.pool.give_back(request.pages)
            self._retire.append(request.rid)

    # --- small things ----------------------------------------------------------------------------------------------

    def _prefilling(self) -> list[Request]:
        """In order of admission."""
        return [request for request in self._computed() if request.phase is Phase.PREFILL]

    def _computed(self) -> Iterable[Request]:
        """The admitted requests that may be in the next step, in order of admission."""
        alone = self.suspects.alone
        return self.running.values() if alone is None else (alone,)

    def _waits_for_alone(self) -> bool:
        """Whether a suspect can be computed as soon as what is in flight is back."""
        if self.suspects.alone is not None or not self.waiting or not self.suspects.suspected(self.waiting[0]):
            return False
        return self._free_places() > 0 and self._pages_for(self.waiting[0]) <= self.pool.free_pages

    def _take_seq(self) -> int:
        self.next_seq += 1
        return self.next_seq - 1

    def _free_places(self) -> int:
        return self.config.max_running_requests - len(self.running)

    def _pages_for(self, request: Request) -> int:
        """Reserved at admission: a dead segment may write up to ``async_depth`` tokens past the end."""
        return -(-(request.prompt_len + request.max_tokens + self.config.async_depth) // self.config.page_size)

    def _sampled(self, request: Request, index: int) -> None:
        """A segment of ``request`` in the step being built samples, as number ``index`` of that step."""
        request.source = FromOutput(self.next_seq, index)
        request.source_step = self.steps  # seqs would not do: admissions have some too
        request.sampled += 1
        request.in_flight += 1


def _logprobs(request: Request, segment: Segment, output: Output) -> tuple[Logprobs | None, Logprobs | None]:
    """Of the sampled id, and of prompt tokens, as the request asked. Raises ProtocolError unless there are as many."""
    params = request.sampling
    wanted = 1 if segment.sample and params.logprobs is not None else 0
    of_prompt = len(segment.prompt_logprob_rows(request.prompt_len)) if params.prompt_logprobs is not None else 0
    for rows, all_rows in ((wanted, output.logprobs), (of_prompt, output.prompt_logprobs)):
        got = all_rows[request.rid].rows if request.rid in all_rows else 0
        if got != rows:
            raise ProtocolError(f"step {output.seq} gave {got} log-probabilities for request {request.rid}, not {rows}")
    return output.logprobs.get(request.rid), output.prompt_logprobs.get(request.rid)
