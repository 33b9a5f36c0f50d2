"""The ``planned`` policy, the default: every prompt is planned as a whole, on costs that are learned meanwhile.

It needs no profile: it begins with the model's operation counts, since the borders between chunks depend on ratios of
costs only, takes a saved profile where there is one, and plans what is left of a prompt again as measurements come in
or the queue changes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec

from actorpp.coordinator.chunking.cost import CostModel
from actorpp.coordinator.chunking.policy import ChunkRequest, PolicyContext, within
from actorpp.coordinator.chunking.search import best_chunks

ALIGN = 64  # chunks are multiples of it, and of the page: matrix products of odd heights are slower
_MAX_PLANS = 256  # kept at once; a prompt whose plan was dropped is planned again
_PLANS_PER_PROMPT = 16  # a prompt is planned again after each measurement, or each 16th part of its chunks if more


@dataclass
class _Plan:
    """What is left of one prompt."""

    chunks: list[int]  # next one last
    history: int  # where the next one begins
    measured: int  # measurements it is based on
    queue: int  # and the queue's length, in powers of two
    patience: int  # measurements until it is made again


class PlannedChunks:
    """Chunks with the smallest makespan for the prompt, or with prompts waiting, for all of them.

    A prompt with a queue behind it gets longer chunks: the pipeline is filled once for all of them, and each chunk has
    its fixed cost. A prompt behind another in the same step goes in when the step does not take longer than a chunk of
    an own plan for all waiting tokens.
    """

    def __init__(self, context: PolicyContext) -> None:
        self._costs = context.costs
        self._window = context.window
        self._page = context.page_size
        self._align = context.page_size * -(-ALIGN // context.page_size)
        self._largest = min(context.max_chunk, context.chunk_size)
        self._plans: dict[int, _Plan] = {}
        self._issued: deque[tuple[int, int]] = deque(maxlen=context.window)  # history and tokens of the newest chunks
        self._step_work = self._step_target = 0.0  # of the step in the making, and up to which more prompts go in

    def next_chunk(self, request: ChunkRequest, history_len: int, remaining: int, budget: int) -> int:
        plan = self._plans.get(request.rid)
        if plan is None or self._outdated(plan, request, history_len):
            plan = self._plan(request, history_len, remaining)
        chunk = within(min(plan.chunks[-1], remaining), budget, self._page)
        work = _work(self._costs.typical, history_len, chunk)
        if request.step_tokens:
            if self._step_work + work > self._step_target:
                return 0
            self._step_work += work
        else:
            self._step_work = work
            self._step_target = self._target(remaining, request) if chunk == remaining and request.queued else work
            if request.rid:
                self._issued.append((history_len, chunk))
        if chunk == remaining:
            self._plans.pop(request.rid, None)
        return chunk

    def _outdated(self, plan: _Plan, request: ChunkRequest, history: int) -> bool:
        if history != plan.history:  # the chunk was issued, or cut to a budget
            issued = plan.chunks.pop()
            if history != plan.history + issued or not plan.chunks:
                return True
            plan.history = history
        return self._costs.measured - plan.measured >= plan.patience or request.queued.bit_length() != plan.queue

    def _plan(self, request: ChunkRequest, history: int, remaining: int) -> _Plan:
        chunks = self._best(history, remaining, self._queue(request, history, remaining), request.steps_ahead)
        plan = _Plan(
            chunks=list(reversed(chunks)),
            history=history,
            measured=self._costs.measured,
            queue=request.queued.bit_length(),
            patience=max(1, len(chunks) // _PLANS_PER_PROMPT),
        )
        self._plans.pop(request.rid, None)
        self._plans[request.rid] = plan
        if len(self._plans) > _MAX_PLANS:
            del self._plans[next(iter(self._plans))]
        return plan

    def _queue(self, request: ChunkRequest, history: int, remaining: int) -> float:
        """The work that waits, in multiples of what is left of this prompt: that gets less, and its chunks must not
        get shorter for it, since the pipeline is kept full by those behind it."""
        if not request.queued:
            return 0.0
        model = self._costs.typical
        own, each = _work(model, history, remaining), _work(model, 0, request.queued_tokens // request.queued)
        return request.queued * (each / own if own else 1.0)

    def _best(self, history: int, remaining: int, queued: float, steps_ahead: int) -> tuple[int, ...]:
        model = self._costs.typical
        ahead = [model.times(*chunk) for chunk in self._issued][-steps_ahead:] if steps_ahead else []
        return best_chunks(
            model,
            history,
            remaining,
            window=self._window,
            align=self._align,
            largest=self._largest,
            queued=queued,
            ahead=ahead,
        )

    def _target(self, remaining: int, request: ChunkRequest) -> float:
        """Work of a step that ends a prompt: as in a plan for all that waits, as one prompt that takes as long."""
        waiting = remaining + request.queued_tokens
        share = 1 / (1 + request.queued)  # of all tokens before it that a token attends to, and a step reads
        model = self._costs.typical
        alike = CostModel(
            tuple(
                msgspec.structs.replace(stage, gamma=share * stage.gamma, a=share * stage.a) for stage in model.stages
            )
        )
        (first, *_) = best_chunks(alike, 0, waiting, window=self._window, align=self._align, largest=self._largest)
        return _work(alike, 0, first)


def _work(model: CostModel, history: int, tokens: int) -> float:
    """What a chunk costs all stages beside a step's fixed costs."""
    return sum(stage.time(history, tokens) - stage.c for stage in model.stages)
