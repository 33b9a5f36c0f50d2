"""Learning what a step costs, from measured stage times.

``fit_profile`` fits a list of samples at once. ``CostLearner`` keeps sums only and learns while the engine runs: from
steps that hold one prompt chunk and nothing else, since only of these it is known what took the time. Errors count in
proportion to the time that was expected, so that short chunks are fitted as well as long ones. In proportion to the
time that was measured, slow steps would count less than fast ones: where times scatter by a quarter, that puts
predictions 12% below the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

import msgspec

from actorpp.coordinator.chunking.cost import NUM_FEATURES, CostModel, StageCost, features
from actorpp.coordinator.chunking.leastsquares import nnls

# Where the first estimate is worth believing until there are measurements: (history, tokens).
_PRIOR_AT = ((0, 128), (0, 512), (0, 2048), (4096, 128), (4096, 512), (16384, 512))
_PRIOR_WEIGHT = 0.01  # of one measurement, for each of these; less and less with more measurements, but see _fit
_PRIOR_ERROR = 0.5  # how far off the prior may be at these, as a share of the time
_PASSES = 3  # of fit_profile: each takes the expected times from the one before
_MEMORY = 0.99  # weight of a measurement against the next one: about the last hundred count


class StageSample(msgspec.Struct, frozen=True):
    """One measured step of one prompt chunk.

    Attributes:
        history: Tokens before the chunk.
        tokens: Tokens of the chunk.
        samples: Whether the step sampled a token behind it.
        seconds: Compute time of each stage.
    """

    history: int
    tokens: int
    samples: bool
    seconds: tuple[float, ...]


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
            sums = _Sums()
            for row, seconds, unit in zip(rows, measured, expected, strict=True):
                sums.add(row, seconds, unit)
            coefficients = nnls(sums.gram, sums.moment)
            expected = [sum(map(mul, coefficients, row)) for row in rows]
        residuals = tuple(seconds - fitted for seconds, fitted in zip(measured, expected, strict=True))
        fits.append(StageFit(StageCost(*coefficients), residuals, r_squared(measured, residuals)))
    return tuple(fits)


def r_squared(measured: Sequence[float], residuals: Sequence[float]) -> float:
    """Coefficient of determination: 1 is perfect; 0 too where all that was measured is equal."""
    mean = sum(measured) / len(measured)
    spread = sum((value - mean) ** 2 for value in measured)
    return 1 - sum(residual * residual for residual in residuals) / spread if spread else 0.0


class CostLearner:
    """A cost model that gets better while the engine runs.

    Args:
        prior: What is believed until something is measured. Its shape counts; measurements give the seconds, unless
            the prior was itself measured.

    Attributes:
        measured: Steps learned from.
    """

    def __init__(self, prior: CostModel) -> None:
        self._prior = prior
        self._sums = [_Sums() for _ in prior.stages]
        self._model: CostModel | None = prior
        self._cold = True
        self.measured = 0

    @property
    def num_stages(self) -> int:
        return len(self._prior.stages)

    @property
    def model(self) -> CostModel:
        """The model as of the last measurement."""
        if self._model is None:
            self._model = CostModel(tuple(map(self._fit, self._prior.stages, self._sums)))
        return self._model

    def add(self, sample: StageSample) -> None:
        """Learn from a step. The engine's first step is cold (memory, kernels, caches) and is left out."""
        if self._cold or len(sample.seconds) != self.num_stages or min(sample.seconds) <= 0:
            self._cold = False
            return
        row = features(sample.history, sample.tokens, sample.samples)
        for sums, prior, seconds in zip(self._sums, self._prior.stages, sample.seconds, strict=True):
            sums.forget(_MEMORY)
            sums.add(row, seconds, prior.time(sample.history, sample.tokens, sample.samples))
        self.measured += 1
        self._model = None

    def _fit(self, prior: StageCost, sums: _Sums) -> StageCost:
        # The prior in seconds: scaled so that its errors on the measurements are smallest.
        scale = sums.units / sums.count
        weight = _PRIOR_WEIGHT / (1 + self.measured)
        coefficients = self._solve(prior, 1.0 if self._prior.in_seconds else scale, sums, weight)
        # Measurements that scatter say little of what they hardly show, as the fixed cost of steps that are all long:
        # then the prior weighs as much as its own error allows beside theirs (Bayes' rule for normal errors).
        noise = sums.variance(coefficients) / _PRIOR_ERROR**2
        return StageCost(*(coefficients if noise <= weight else self._solve(prior, scale, sums, noise)))

    def _solve(self, prior: StageCost, scale: float, sums: _Sums, weight: float) -> Sequence[float]:
        believed = _Sums(sums)
        for history, tokens in _PRIOR_AT:
            for samples in (False, True):
                unit = prior.time(history, tokens, samples)
                believed.add(features(history, tokens, samples), scale * unit, unit, weight)
        return nnls(believed.gram, believed.moment)


class _Sums:
    """Normal equations of weighted least squares on errors in proportion to a unit of time of each row's own."""

    def __init__(self, other: _Sums | None = None) -> None:
        empty = [[0.0] * NUM_FEATURES for _ in range(NUM_FEATURES)]
        self.gram: list[list[float]] = empty if other is None else [list(row) for row in other.gram]
        self.moment: list[float] = [0.0] * NUM_FEATURES if other is None else list(other.moment)
        self.count: float = 0.0 if other is None else other.count  # of measurements, those forgotten in part in part
        self.units: float = 0.0 if other is None else other.units  # what was measured, in units, summed
        self.squares: float = 0.0 if other is None else other.squares  # and squared

    def add(self, row: Sequence[float], seconds: float, unit: float, weight: float = 1.0) -> None:
        self.count += weight
        self.units += weight * seconds / unit
        self.squares += weight * (seconds / unit) ** 2
        weight /= unit * unit
        for i, value in enumerate(row):
            if value:
                self.moment[i] += weight * value * seconds
                for j, other in enumerate(row):
                    self.gram[i][j] += weight * value * other

    def forget(self, share: float) -> None:
        self.count *= share
        self.units *= share
        self.squares *= share
        self.gram = [[share * value for value in row] for row in self.gram]
        self.moment = [share * value for value in self.moment]

    def variance(self, coefficients: Sequence[float]) -> float:
        """Of the relative errors that the coefficients make on the measurements; 0 with too few of them to say."""
        free = self.count - NUM_FEATURES
        if free < 1:
            return 0.0
        explained = 0.0
        for value, moment, row in zip(coefficients, self.moment, self.gram, strict=True):
            explained += value * (2 * moment - sum(map(mul, row, coefficients)))
        return max(0.0, 1 - explained / self.squares) * self.count / free
