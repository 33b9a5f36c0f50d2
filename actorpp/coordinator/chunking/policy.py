"""What a chunk policy is: it says how many tokens of a prompt the next chunk takes. One small class each.

A policy sees one request, what else waits, and a budget. It does not choose which request goes next, and it keeps no
account of pages or slots: the scheduler does. What it answers may depend on what it was asked and on what the cost
learner has seen, in their order, and on nothing else (no clock, no chance): then the same events give the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from actorpp.coordinator.chunking.learner import CostLearner
from actorpp.coordinator.chunking.profile import Profile


@dataclass(frozen=True)
class ChunkRequest:
    """The request that gets the next chunk, and what else waits. Tokens are prompt tokens that no step holds yet.

    Attributes:
        rid: Its number; 0 is a plan for a prompt that nobody submitted. A new ``history_len`` of 0 begins it anew.
        prompt_len: Tokens of the whole prompt; after the loss of a stage, with those that were delivered before.
        queued: Other requests whose prompts wait or are under way.
        queued_tokens: Their tokens.
        step_tokens: Prompt tokens of others that are in the step already.
        steps_ahead: Steps in flight.
    """

    rid: int
    prompt_len: int
    queued: int = 0
    queued_tokens: int = 0
    step_tokens: int = 0
    steps_ahead: int = 0


class ChunkPolicy(Protocol):
    """Chooses chunk sizes."""

    def next_chunk(self, request: ChunkRequest, history_len: int, remaining: int, budget: int) -> int:
        """Tokens of the next chunk, from 1 to min(remaining, budget).

        Behind others in a step (``request.step_tokens`` is not 0) it may be 0: not in this step; and the scheduler
        leaves the chunk for the next step if the step has less room.

        Args:
            request: Whose prompt it is.
            history_len: Prompt tokens that earlier chunks hold.
            remaining: Prompt tokens left, at least 1.
            budget: Tokens that the step has room for, at least 1.
        """
        ...


@dataclass(frozen=True)
class PolicyContext:
    """What a policy may know of its pipeline when it is made.

    Attributes:
        stages: Stages of the pipeline.
        window: Steps in flight at most.
        page_size: Tokens of a KV page.
        context_length: Tokens of prompt and output at most.
        max_chunk: Prompt tokens of one request in one step at most.
        chunk_size: ``--chunked-prefill-size``: the size for ``fixed``, the first size for ``sglang``, the largest one
            for ``planned``.
        smooth_factor: ``--dynamic-chunking-smooth-factor``.
        costs: What a step costs, learned while the engine runs: plan on ``costs.typical``.
        profile: The saved profile of this pipeline, if there is one.
    """

    stages: int
    window: int
    page_size: int
    context_length: int
    max_chunk: int
    chunk_size: int
    smooth_factor: float
    costs: CostLearner
    profile: Profile | None = None


def within(wanted: int, budget: int, align: int) -> int:
    """``wanted`` tokens, or as many as the budget has room for: a multiple of ``align``, so that the next chunk still
    begins on a page border, unless the budget is below one alignment."""
    return wanted if wanted <= budget else budget - budget % align or budget
