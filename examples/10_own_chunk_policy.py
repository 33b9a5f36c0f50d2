"""A chunk policy of your own: one class, named by its import path, beside the one that is there by default."""

from __future__ import annotations

from actorpp import LLM, SamplingParams
from actorpp.coordinator.chunking.policy import ChunkRequest, PolicyContext


class Halving:
    """Half of what is left of the prompt, in whole pages, down to 64 tokens."""

    def __init__(self, context: PolicyContext) -> None:
        self.page_size = context.page_size

    def next_chunk(self, request: ChunkRequest, history_len: int, remaining: int, budget: int) -> int:
        half = remaining // 2 - remaining // 2 % self.page_size
        return min(max(half, 64), remaining, budget)


if __name__ == "__main__":
    prompt = {"prompt_token_ids": [10 + n * n % 1000 for n in range(1000)]}
    for policy in (f"{__name__}:Halving", "planned"):
        with LLM(stages=2, chunk_policy=policy, use_tqdm_on_load=False) as llm:
            metrics = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1))[0].metrics
            print(f"{policy}: chunks {metrics.chunks}, TTFT {metrics.ttft_s:.2f} s")
