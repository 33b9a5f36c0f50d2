"""Fitting what a step costs to measured stage times, all at once: a profile, or a trace.

Errors count in proportion to the time that was expected, so that short chunks are fitted as well as long ones. In
proportion to the time that was measured, slow steps would count less than fast ones: where times scatter by a quarter,
that puts predictions 12% below the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import Annotated

import msgspec

from actorpp.coordinator.chunking.cost import NUM_FEATURES, StageCost, features
from actorpp.coordinator.chunking.leastsquares import nnls

_PASSES = 3  # of fit_profile: each takes the expected times from the one before


class StageSample(msgspec.Struct, frozen=True):
    """One measured step of one prompt chunk. A file's samples are held to the limits of these types.

    Attributes:
        history: Tokens before the chunk.
        tokens: Tokens of the chunk.
        samples: Whether the step sampled a token behind it.
        seconds: Compute time of each stage.
    """

    history: Annotated[int, msgspec.Meta(ge=0)]
    tokens: Annotated[int, msgspec.Meta(ge=1)]
    samples: bool
    seconds: tuple[Annotated[float, msgspec.Meta(gt=0)], ...]


class StageFit(msgspec.Struct, frozen=True):
    """How well the formula describes one stage.

    Attributes:
        cost: The coefficients.
        residuals: Measured minus fitted seconds of each sample, in the samples' order.
        r2: Coefficient of determination: 1 is perfect.
    """

    cost: StageCost
    residuals: tuple[float, ...]
    r2: float


def fit_profile(samples: Sequence[StageSample]) -> tuple[StageFit, ...]:
    """Fit every stage. The samples all have as many stages; warm-up samples must not be among them."""
    rows = [features(sample.history, sample.tokens, sample.samples) for sample in samples]
    fits = []
    for stage in range(len(samples[0].seconds)):
        measured = [sample.seconds[stage] for sample in samples]
        expected: Sequence[float] = measured  # until there is a fit
        for _ in range(_PASSES):
            coefficients = _relative(rows, measured, expected)
            expected = [sum(map(mul, coefficients, row)) for row in rows]
        residuals = tuple(seconds - fitted for seconds, fitted in zip(measured, expected, strict=True))
        fits.append(StageFit(StageCost(*coefficients), residuals, r_squared(measured, residuals)))
    return tuple(fits)


def r_squared(measured: Sequence[float], residuals: Sequence[float]) -> float:
    """Coefficient of determination: 1 is perfect; 0 too where all that was measured is equal."""
    mean = sum(measured) / len(measured)
    spread = sum((value - mean) ** 2 for value in measured)
    return 1 - sum(residual * residual for residual in residuals) / spread if spread else 0.0


def _relative(rows: Sequence[Sequence[float]], measured: Sequence[float], expected: Sequence[float]) -> list[float]:
    """Non-negative coefficients with the least squared errors, each in proportion to the expected time."""
    gram = [[0.0] * NUM_FEATURES for _ in range(NUM_FEATURES)]
    moment = [0.0] * NUM_FEATURES
    for row, seconds, unit in zip(rows, measured, expected, strict=True):
        weight = 1 / (unit * unit)
        for i, value in enumerate(row):
            moment[i] += weight * value * seconds
            for j, other in enumerate(row):
                gram[i][j] += weight * value * other
    return nnls(gram, moment)
