"""The ``fixed`` policy: one size for every chunk, as vLLM and SGLang cut prompts by default."""

from __future__ import annotations

from dataclasses import dataclass

from actorpp.coordinator.chunking.policy import ChunkRequest, PolicyContext, within


@dataclass(frozen=True)
class FixedChunks:
    """Chunks of ``size`` tokens; the last one takes what is left.

    Where the budget is smaller the chunk is cut to a multiple of ``align``, the page size.
    """

    size: int
    align: int = 1

    @classmethod
    def of(cls, context: PolicyContext) -> FixedChunks:
        """The policy for a pipeline."""
        return cls(context.chunk_size, align=context.page_size)

    def next_chunk(self, request: ChunkRequest, history_len: int, remaining: int, budget: int) -> int:
        return within(min(self.size, remaining), budget, self.align)
