"""What a policy would do with a prompt if it came now and alone, and how long the pipeline would take."""

from __future__ import annotations

import msgspec

from actorpp.coordinator.chunking.cost import CostModel
from actorpp.coordinator.chunking.flowshop import completion_times, in_window
from actorpp.coordinator.chunking.learner import CostLearner
from actorpp.coordinator.chunking.policy import ChunkPolicy, ChunkRequest


class ChunkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The chunks of one prompt. Times are None until the pipeline has been measured: by a profile, or by running.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        chunks: Tokens of each chunk, in order; they sum to the prompt.
        predicted_chunk_s: Compute seconds of each chunk, for each stage.
        predicted_ttft_s: Seconds from the first chunk's start until the last one's end on the last stage: the time to
            first token of a prompt that finds the pipeline empty, without tokenising and delivery.
        predicted_done_s: The same for each chunk.
    """

    prompt_tokens: int
    chunks: tuple[int, ...]
    predicted_chunk_s: tuple[tuple[float, ...], ...] | None
    predicted_ttft_s: float | None
    predicted_done_s: tuple[float, ...] | None


def plan_prompt(
    policy: ChunkPolicy, costs: CostModel | CostLearner, prompt_tokens: int, *, window: int, max_chunk: int
) -> ChunkPlan:
    """Ask the policy for every chunk of a prompt of ``prompt_tokens`` tokens, at least 1, and predict its times."""
    chunks: list[int] = []
    done = 0
    request = ChunkRequest(rid=0, prompt_len=prompt_tokens)
    while done < prompt_tokens:
        chunks.append(policy.next_chunk(request, done, prompt_tokens - done, max_chunk))
        done += chunks[-1]
    times = costs.chunk_times(chunks)
    ends = [done[-1] for done in completion_times(times, in_window(len(times), window))]
    return ChunkPlan(
        prompt_tokens=prompt_tokens,
        chunks=tuple(chunks),
        predicted_chunk_s=tuple(times) if costs.in_seconds else None,
        predicted_ttft_s=ends[-1] if costs.in_seconds else None,
        predicted_done_s=tuple(ends) if costs.in_seconds else None,
    )
