"""The committed prompt's plan for the default model: its length, chunk sizes, and where logits are compared."""

from __future__ import annotations

LENGTH = 3000
NEW_TOKENS = 20
CHUNKS = (64, 701, LENGTH)
SMALL = 60


def ends(chunk: int) -> list[int]:
    """Last positions of the prompt's chunks."""
    return [min(at + chunk, LENGTH) - 1 for at in range(0, LENGTH, chunk)]


ENDS = sorted({end for chunk in (*CHUNKS, SMALL) for end in ends(chunk)})


def rows(chunk: int) -> list[int]:
    """Where in logits at ``ENDS`` those of the prompt's chunks are."""
    return [ENDS.index(end) for end in ends(chunk)]
