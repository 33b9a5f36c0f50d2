"""Chunk policies: how many tokens of a prompt the next chunk takes. One small class each.

A policy sees one request and a budget. It does not choose which request goes next, and it keeps no account of pages or
slots: the scheduler does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class ChunkPolicy(Protocol):
    """Chooses chunk sizes."""

    def next_chunk(self, *, history_len: int, remaining: int, budget: int) -> int:
        """Tokens of the next chunk, from 1 to min(remaining, budget).

        Args:
            history_len: Prompt tokens that earlier chunks hold.
            remaining: Prompt tokens left, at least 1.
            budget: Tokens that the step has room for, at least 1.
        """
        ...


@dataclass(frozen=True)
class FixedChunks:
    """Chunks of ``size`` tokens; the last one takes what is left.

    Where the budget is smaller the chunk is cut to a multiple of ``align`` (the page size), so that the next one still
    begins on a page border, or to the budget itself where that is below one alignment.
    """

    size: int
    align: int = 1

    def next_chunk(self, *, history_len: int, remaining: int, budget: int) -> int:
        wanted = min(self.size, remaining)
        if wanted <= budget:
            return wanted
        return budget - budget % self.align or budget
