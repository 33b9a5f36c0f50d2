"""Which chunking is best for a set of prompt lengths: the settings to try, and the choice between them.

The order of trials is that of SGLang's guide to its dynamic chunking: the best fixed size; an initial size of two to
three times that; a smoothing factor between 0.6 and 0.85. Nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log
from typing import Literal

import msgspec

from actorpp.analysis.spread import Spread

INITIAL_SIZES = (2.0, 2.5, 3.0)  # times the best fixed size
SMOOTH_FACTORS = (0.6, 0.65, 0.7, 0.75, 0.8, 0.85)
FIRST_SMOOTH_FACTOR = 0.75
WORTH_IT = 0.01  # a smaller gain is said to be none


class Setting(msgspec.Struct, frozen=True):
    """One way to chunk. Sizes are in tokens."""

    policy: Literal["fixed", "sglang", "planned"]
    chunk_size: int | None = None
    smooth_factor: float | None = None

    @property
    def name(self) -> str:
        """Short, for a table."""
        parts: list[str] = [self.policy]
        if self.chunk_size is not None:
            parts.append(str(self.chunk_size))
        if self.smooth_factor is not None:
            parts.append(f"smoothing {self.smooth_factor:g}")
        return " ".join(parts)

    @property
    def flags(self) -> str:
        """What to give ``actorpp run`` for it."""
        parts = [f"--chunk-policy {self.policy}"]
        if self.chunk_size is not None:
            parts.append(f"--chunked-prefill-size {self.chunk_size}")
        if self.smooth_factor is not None:
            parts.append(f"--dynamic-chunking-smooth-factor {self.smooth_factor:g}")
        return " ".join(parts)


Measured = Mapping[Setting, Mapping[int, Spread]]
"""For each setting and prompt length: TTFT in seconds."""


def fixed_settings(sizes: Sequence[int], longest: int) -> list[Setting]:
    """Fixed sizes to try: what is not below the longest prompt is the same as the whole prompt at once, tried once."""
    return [Setting("fixed", size) for size in sorted({min(size, longest) for size in sizes})]


def initial_sizes(best_fixed: int, align: int, largest: int) -> list[Setting]:
    """Second step: initial sizes for dynamic chunking, multiples of ``align`` up to ``largest``."""
    most = max(largest // align, 1)
    steps = {min(max(round(factor * best_fixed / align), 1), most) for factor in INITIAL_SIZES}
    return [Setting("sglang", step * align, FIRST_SMOOTH_FACTOR) for step in sorted(steps)]


def smooth_factors(initial: int) -> list[Setting]:
    """Third step: the other smoothing factors for the best initial size."""
    return [Setting("sglang", initial, factor) for factor in SMOOTH_FACTORS if factor != FIRST_SMOOTH_FACTOR]


def relative(measured: Measured, setting: Setting, base: Setting) -> float:
    """The setting's TTFT over that of ``base``: the geometric mean of the medians' ratios over all lengths."""
    ratios = [ttft.median / measured[base][length].median for length, ttft in measured[setting].items()]
    return exp(sum(map(log, ratios)) / len(ratios))


def best(measured: Measured, policy: str) -> Setting:
    """The setting of that policy with the smallest TTFT over all lengths. Raises ValueError if none was measured."""
    candidates = [setting for setting in measured if setting.policy == policy]
    if not candidates:
        raise ValueError(f"no setting of the policy {policy} was measured")
    return min(candidates, key=lambda setting: relative(measured, setting, candidates[0]))


def verdict(measured: Measured) -> list[str]:
    """What to do, in sentences: the flags to use, and whether dynamic chunking is worth its own."""
    fixed = best(measured, "fixed")
    said = [f"Best fixed size: {fixed.flags}"]
    if any(setting.policy == "sglang" for setting in measured):
        dynamic = best(measured, "sglang")
        gain = 1 - relative(measured, dynamic, fixed)
        said.append(
            f"Dynamic chunking gains {gain:.1%} over the best fixed size: use {dynamic.flags}"
            if gain >= WORTH_IT
            else f"Dynamic chunking gains less than {WORTH_IT:.0%} over the best fixed size ({gain:+.1%}): not worth it"
        )
    if any(setting.policy == "planned" for setting in measured):
        gain = 1 - relative(measured, Setting("planned"), fixed)
        said.append(f"Planned chunks gain {gain:+.1%} over the best fixed size, with no size to choose")
    winner = min(measured, key=lambda setting: relative(measured, setting, fixed))
    said.append(f"Best over these lengths: {winner.flags}")
    return said
