"""When an answer counts as equal to transformers': the project's policy for logits and tokens, for any test to use.

Three clauses: (a) the same step plan gives bit-equal logits however the model is split; (b) in float32 another plan
(chunks, batching, replay) gives logits within a tolerance, and the oracle's tokens up to the first position where its
own two best logits lie closer than twice that tolerance; such sequences are ambiguous, and few; (c) in bfloat16 the
error against the float32 oracle is hardly larger than transformers' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

MOST_AMBIGUOUS = 0.01
BFLOAT16_FACTOR = 1.25
TINY_RELATIVE = 1e-4
DEFAULT_MODEL_ABSOLUTE = 5e-4


@dataclass(frozen=True)
class Tolerance:
    """How far float32 logits may differ: ``absolute``, or ``relative`` times the oracle's standard deviation."""

    absolute: float = 0.0
    relative: float = 0.0

    def limit(self, oracle: torch.Tensor) -> float:
        """The allowed difference for logits like these."""
        return max(self.absolute, self.relative * float(oracle.float().std()))


TINY = Tolerance(relative=TINY_RELATIVE)
DEFAULT_MODEL = Tolerance(absolute=DEFAULT_MODEL_ABSOLUTE)


def check_bit_equal(first: torch.Tensor, second: torch.Tensor) -> None:
    """Clause (a). Raises AssertionError with the number of different logits."""
    if not torch.equal(first, second):
        raise AssertionError(f"{int((first != second).sum())} of {first.numel()} logits differ between two splits")


def check_logits(ours: torch.Tensor, oracle: torch.Tensor, tolerance: Tolerance) -> float:
    """Clause (b) for logits (rows, vocab): returns the largest difference, or raises AssertionError."""
    worst, limit = float((ours.float() - oracle.float()).abs().max()), tolerance.limit(oracle)
    if not worst <= limit:
        raise AssertionError(f"logits differ by {worst:.3g} from the oracle's, allowed is {limit:.3g}")
    return worst


def check_bfloat16(ours: torch.Tensor, theirs: torch.Tensor, oracle: torch.Tensor) -> tuple[float, float]:
    """Clause (c) for logits (…, vocab): a row's error is its root mean square difference from the float32 oracle's.

    Rows are averaged geometrically. Where a rounding picks another expert, in transformers as in ours, a row errs by
    many times as much, and a plain mean is made by a few such rows: over 16 prompts the ratio of two of them lay
    between 0.6 and 1.2 by chance, and over single ones between 0.1 and 7. This one, over 32 prompts, lay between 0.93
    and 1.13 for every family and plan that was tried, and above 2.7 where keys and values were cached in float8.

    Returns:
        Our error and transformers' own in bfloat16, or raises AssertionError.
    """
    mine, own = (
        float((logits.float() - oracle.float()).square().mean(dim=-1).log().mean().div(2).exp())
        for logits in (ours, theirs)
    )
    if not mine <= BFLOAT16_FACTOR * own:
        raise AssertionError(f"bfloat16 error {mine:.3g} is over {BFLOAT16_FACTOR} times transformers' own {own:.3g}")
    return mine, own


class TokenTally:
    """Clause (b) for tokens, over many sequences: counts the ambiguous ones and prints them at the end."""

    def __init__(self, tolerance: Tolerance) -> None:
        self.tolerance = tolerance
        self.sequences = 0
        self.ambiguous: list[str] = []

    def check(self, name: str, ours: Sequence[int], oracle: Sequence[int], logits: torch.Tensor) -> None:
        """Compare one sequence.

        Args:
            logits: The oracle's (len(oracle), vocab), from which its tokens were picked.

        Raises:
            AssertionError: A token differs where the oracle's choice was clear.
        """
        self.sequences += 1
        best = logits.float().topk(2, dim=-1).values
        gaps = (best[:, 0] - best[:, 1]).tolist()
        if len(ours) != len(oracle):
            raise AssertionError(f"{name}: {len(ours)} tokens, the oracle has {len(oracle)}")
        for position, (mine, theirs, gap) in enumerate(zip(ours, oracle, gaps, strict=True)):
            if gap < 2 * self.tolerance.limit(logits):
                self.ambiguous.append(f"{name} from token {position} on (gap {gap:.3g})")
                return
            if mine != theirs:
                raise AssertionError(f"{name}: token {position} is {mine}, the oracle's {theirs} (gap {gap:.3g})")

    def finish(self) -> None:
        """Print the count; raises AssertionError if more than one in a hundred sequences was ambiguous."""
        print(f"{len(self.ambiguous)} of {self.sequences} sequences ambiguous", *self.ambiguous, sep="\n  ")
        if len(self.ambiguous) > MOST_AMBIGUOUS * self.sequences:
            raise AssertionError(f"{len(self.ambiguous)} of {self.sequences} sequences are ambiguous")
