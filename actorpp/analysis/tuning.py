"""Which chunking is best for a set of prompt lengths: the settings to try, and the choice between them.

The order of trials is that of SGLang's guide to its dynamic chunking: the best fixed size; an initial size of two to
three times that; a smoothing factor between 0.6 and 0.85. Nothing is measured here.

Only what was measured in turn is compared, for the machine's speed may differ from one step to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log
from typing import Literal

import msgspec

from actorpp.analysis.spread import Spread

INITIAL_SIZES = (2.0, 2.5, 3.0)  # times the best fixed size
SMOOTH_FACTORS = (0.75, 0.6, 0.65, 0.7, 0.8, 0.85)  # the default first: of equal ones the first is taken
WORTH_IT = 0.01  # a smaller gain is said to be none
STEADY = 0.1  # spread of one setting's times, as a share of the median, from which on it is said


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
"""For each setting and prompt length: TTFT in seconds, of settings that were measured in turn."""


def fixed_settings(sizes: Sequence[int], largest: int) -> list[Setting]:
    """First step: fixed sizes.

    Args:
        largest: Tokens of the largest chunk that can be: of the longest prompt, all of which is one chunk with any size
            above that, or of a step.
    """
    return [Setting("fixed", size) for size in sorted({min(size, largest) for size in sizes})]


def initial_sizes(best_fixed: int, align: int, largest: int) -> list[Setting]:
    """Second step: initial sizes for dynamic chunking, multiples of ``align`` below ``largest``, and that itself."""
    sizes = {min(max(round(factor * best_fixed / align), 1) * align, largest) for factor in INITIAL_SIZES}
    return [Setting("sglang", size, SMOOTH_FACTORS[0]) for size in sorted(sizes)]


def smooth_factors(initial: int) -> list[Setting]:
    """Third step: smoothing factors for the best initial size."""
    return [Setting("sglang", initial, factor) for factor in SMOOTH_FACTORS]


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


def recommended(measured: Measured) -> Setting:
    """The simplest setting that is within 1% of the fastest: planned, which has no size to choose, before a fixed size,
    and that before dynamic chunking, which needs a profile."""
    fastest = min(measured, key=lambda setting: relative(measured, setting, next(iter(measured))))
    near = [setting for setting in measured if gain(measured, fastest, setting) < WORTH_IT]
    return min(near, key=lambda setting: ("planned", "fixed", "sglang").index(setting.policy))


def gain(measured: Measured, setting: Setting, base: Setting) -> float:
    """The share of the TTFT of ``base`` that ``setting`` saves."""
    return 1 - relative(measured, setting, base)


def verdict(measured: Measured) -> list[str]:
    """What to do, in sentences: the flags to use, and whether dynamic chunking is worth its own."""
    fixed = best(measured, "fixed")
    said = [f"Best fixed size: {fixed.flags}"]
    if any(setting.policy == "sglang" for setting in measured):
        dynamic = best(measured, "sglang")
        saved = gain(measured, dynamic, fixed)
        if saved >= WORTH_IT:
            said.append(f"Dynamic chunking gains {saved:.1%} over it, with {dynamic.flags}")
        else:
            said.append(f"Dynamic chunking gains less than {WORTH_IT:.0%} over it ({saved:+.1%}): not worth it")
    if any(setting.policy == "planned" for setting in measured):
        saved = gain(measured, Setting("planned"), fixed)
        compared = "more" if saved < 0 else "less"
        said.append(f"Planned chunks take {abs(saved):.1%} {compared} time, with no size to choose")
    scatter = max((t.highest - t.lowest) / t.median for ttfts in measured.values() for t in ttfts.values())
    if scatter > STEADY:
        said.append(
            f"Times of one setting differed by up to {scatter:.0%}, and gains far below that may be chance: "
            "measure again when the machine does nothing else, or with more --num-iters"
        )
    use = recommended(measured)
    others = f", the simplest within {WORTH_IT:.0%} of the fastest" if len(measured) > 1 else ""
    said.append(f"Use {use.flags}{' (the default)' if use.policy == 'planned' else ''}{others}")
    return said
