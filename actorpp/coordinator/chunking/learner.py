"""Learning what a step costs while the engine runs, on machines whose speed changes.

A stage that takes 1.7 times as long for some seconds, because a neighbour has the core, looks like one whose cost grows
with the history: a prompt's chunks go by in just such times. Least squares on the times believes it, and plans for it.
So what is learned here has three parts that differ in how they may change:

- the *shape*: by what factors the prior's costs of a step, of history, attention and head are off, beside its cost of a
  token. All stages share it: they run the same code on layers of the same kind. It barely changes;
- the *speed* of each stage at this moment, which may drift, or jump;
- the *typical speed*: how much slower one stage is than the others on the average. Plans are made for this one: a plan
  made for a stage that is slow just now gains little if it stays slow, and loses more if it does not.

Shape and speed are the state of an extended Kalman filter (R. E. Kalman, 1960) that observes logarithms of stage times,

    log t = speed + log(step c + reading gamma L + b x + attention a (2 L x + x^2) + sampling head)

with the update iterated, as the sum in the logarithm is not linear. A time farther off than ``_JUMP`` standard
deviations is taken for a jump of that stage's speed, which says nothing of the shape. How far times scatter from step
to step is estimated meanwhile.

The counted cost of a step may be wrong by far, where starting kernels takes longer than computing. A filter that begins
too far from the truth takes every step for a jump; so several begin at different places, and the most likely one is
believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log, sqrt

import msgspec
import numpy as np
from numpy.typing import NDArray

from actorpp.coordinator.chunking.cost import CostModel, StageCost
from actorpp.coordinator.chunking.fit import StageSample

_Array = NDArray[np.float64]

# Standard deviations of logarithms: 0.1 is about 10%.
_SHAPE = (0.7, 0.7, 0.5, 0.7)  # of the prior's c, gamma, a and head, beside its b
_FACTORS = len(_SHAPE)
_UNKNOWN = 1e3  # of a speed that was never seen
_SHAPE_DRIFT, _SPEED_DRIFT = 0.003, 0.01  # from one step to the next
_JUMP = 3.0  # standard deviations
_JUMP_CHANCE = 0.05
_ITERATIONS = 3

_NOISE, _NOISE_COUNT = 0.1, 10  # how times scatter before anything was measured, and as how many steps this counts
_LEAST_NOISE = 0.01
_INEQUALITY = 0.05  # of stages that the prior takes for equal
_UNSEEN = 0.2  # by how much one step's difference between stages may be of that step alone, at least
_MEMORY = 0.995  # weight of a step against the next one in what is learned of scatter and typical speeds

_STEP_FACTORS = (1.0, 8.0, 64.0)  # of the prior's c, where a filter begins
_UNLIKELY = 10.0  # by how much, in logarithms of likelihood, a factor is less likely than the one before it
_SETTLED = 100  # steps, after which only the most likely filter goes on


class CostLearner:
    """A cost model that gets better while the engine runs.

    It learns from steps that hold one prompt chunk and nothing else: only of these it is known what took the time.

    Args:
        prior: What is believed until something is measured; then its shape counts, and measurements give the seconds.
        profile: Samples to learn from at once, none of them cold.

    Attributes:
        measured: Steps learned from.
    """

    def __init__(self, prior: CostModel, profile: Sequence[StageSample] = ()) -> None:
        self._filters = [
            _Filter([msgspec.structs.replace(cost, c=factor * cost.c) for cost in prior.stages], -index * _UNLIKELY)
            for index, factor in enumerate(_STEP_FACTORS)
        ]
        self._speeds = _Speeds(len(prior.stages))
        self._model: CostModel | None = prior
        self._typical: CostModel | None = prior
        self._cold = True
        self._stages = len(prior.stages)
        self.measured = 0
        for sample in profile:
            self._learn(sample)

    @property
    def model(self) -> CostModel:
        """What a step takes at the stages' speeds of this moment: for predictions."""
        if self._model is None:
            filter_ = self._likeliest
            self._model = filter_.model(filter_.speeds, self._speeds.noise)
        return self._model

    @property
    def typical(self) -> CostModel:
        """What it takes at their typical speeds: for plans."""
        if self._typical is None:
            filter_ = self._likeliest
            speeds = filter_.speeds.mean() + self._speeds.differences()
            self._typical = filter_.model(speeds, self._speeds.noise)
        return self._typical

    def add(self, sample: StageSample) -> None:
        """Learn from a step. The engine's first step is cold (memory, kernels, caches) and is left out."""
        if self._cold or len(sample.seconds) != self._stages or min(sample.seconds) <= 0:
            self._cold = False
        else:
            self._learn(sample)

    def _learn(self, sample: StageSample) -> None:
        noise = self._speeds.noise
        shown = [filter_.add(sample, noise) for filter_ in self._filters]
        self._speeds.add(shown[self._filters.index(self._likeliest)])
        self.measured += 1
        if self.measured == _SETTLED:
            self._filters = [self._likeliest]
        self._model = self._typical = None

    @property
    def _likeliest(self) -> _Filter:
        return max(self._filters, key=lambda filter_: filter_.likelihood)


class _Filter:
    """The Kalman filter from one prior on.

    Attributes:
        likelihood: Logarithm of that of all samples, up to a constant, and of the prior.
    """

    def __init__(self, prior: Sequence[StageCost], likelihood: float) -> None:
        self._prior = prior
        self._stages = len(prior)
        self._costs = np.array([[cost.c, cost.gamma, cost.b, cost.a, cost.head] for cost in prior]).T
        # Logarithms: factors of the shape, then speeds of the stages.
        self._state: _Array = np.zeros(_FACTORS + self._stages)
        self._covariance: _Array = np.diag([*_SHAPE, *[_UNKNOWN] * self._stages]) ** 2
        self._drift = np.diag([_SHAPE_DRIFT] * _FACTORS + [_SPEED_DRIFT] * self._stages) ** 2
        self._begun = False
        self.likelihood = likelihood

    @property
    def speeds(self) -> _Array:
        """Logarithms of the stages' speeds of this moment."""
        return self._state[_FACTORS:]

    def add(self, sample: StageSample, noise: float) -> _Array:
        """Take a sample in, and return the logarithm of each stage's speed as this one step shows it."""
        measured = np.log(sample.seconds)
        before, scatter = self._state, noise**2 * np.eye(self._stages)
        covariance = self._covariance + self._drift
        expected, slopes = self._expected(sample)
        if self._begun:
            errors, uncertain = measured - expected, slopes @ covariance @ slopes.T + scatter
            jumped = errors**2 > _JUMP**2 * np.diag(uncertain)
            jumps = np.where(jumped, errors**2, 0.0)
            covariance += np.diag([*[0.0] * _FACTORS, *jumps])
            uncertain += np.diag(jumps)
            fit = errors @ np.linalg.solve(uncertain, errors) + np.linalg.slogdet(uncertain)[1]
            self.likelihood += float(jumped.sum() * log(_JUMP_CHANCE) - fit / 2)
        for _ in range(_ITERATIONS):
            gain = np.linalg.solve(slopes @ covariance @ slopes.T + scatter, slopes @ covariance).T
            linear, used = measured - expected - slopes @ (before - self._state), slopes
            self._state = before + gain @ linear
            expected, slopes = self._expected(sample)
        covariance -= gain @ used @ covariance
        self._covariance = (covariance + covariance.T) / 2
        self._begun = True
        return measured - expected + self.speeds

    def _expected(self, sample: StageSample) -> tuple[_Array, _Array]:
        """The logarithms of the stages' times, (stages,), and their derivatives by the state, (stages, state)."""
        c, gamma, b, a, head = self._costs
        pairs = (2 * sample.history + sample.tokens) * sample.tokens
        parts = np.stack([c, gamma * sample.history, a * pairs, head * sample.samples], axis=1)
        parts *= np.exp(self._state[:_FACTORS])
        whole = parts.sum(axis=1) + b * sample.tokens
        return np.log(whole) + self.speeds, np.hstack([parts / whole[:, None], np.eye(self._stages)])

    def model(self, speeds: _Array, noise: float) -> CostModel:
        """With the shape as known, at these speeds."""
        step, reading, attention, sampling = np.exp(self._state[:_FACTORS]).tolist()
        # The mean of times that scatter is greater than that of their logarithms says.
        factors = np.exp(speeds + noise**2 / 2).tolist()
        return CostModel(
            tuple(
                StageCost(
                    c=factor * step * prior.c,
                    gamma=factor * reading * prior.gamma,
                    b=factor * prior.b,
                    a=factor * attention * prior.a,
                    head=factor * sampling * prior.head,
                )
                for factor, prior in zip(factors, self._prior, strict=True)
            )
        )


class _Speeds:
    """What the measured times say of the stages' speeds, step after step: how they scatter, and how they differ.

    Sums are over steps, each step weighing _MEMORY of the next.
    """

    def __init__(self, stages: int) -> None:
        self._last: list[_Array] = []  # two
        self._count = 0.0
        self._difference = np.zeros(stages)  # of a stage from the mean of all
        self._square = np.zeros(stages)
        self._change = np.zeros(stages)  # squared, of the difference, from the step before
        self._near = self._far = 2 * _NOISE**2 * _NOISE_COUNT  # squared change of a speed in one step, and in two
        self._noise_count = float(_NOISE_COUNT)

    def add(self, speeds: _Array) -> None:
        """The logarithm of each stage's speed as one step shows it."""
        difference = speeds - speeds.mean()
        self._count = _MEMORY * self._count + 1
        self._difference = _MEMORY * self._difference + difference
        self._square = _MEMORY * self._square + difference**2
        self._change *= _MEMORY
        if self._last:
            before = self._last[-1]
            self._change += (difference - before + before.mean()) ** 2
        if len(self._last) == 2:
            self._near = _MEMORY * self._near + float(np.mean((speeds - self._last[1]) ** 2))
            self._far = _MEMORY * self._far + float(np.mean((speeds - self._last[0]) ** 2))
            self._noise_count = _MEMORY * self._noise_count + 1
        self._last = [*self._last[-1:], speeds]

    @property
    def noise(self) -> float:
        """Standard deviation of one step's times around the speed of that moment.

        Scatter alone changes a time as much in one step as in two; a speed that wanders, twice as much in two. (It is
        the nugget of the variogram; G. Matheron, 1963.)
        """
        return max(_LEAST_NOISE, sqrt(max(0.0, (2 * self._near - self._far) / (2 * self._noise_count))))

    def differences(self) -> _Array:
        """How much slower than the mean each stage is on the average, as a logarithm, as far as that can be believed.

        The mean of n values that depend on the one before is as uncertain as that of n (1 - rho) / (1 + rho)
        independent ones: stages that were slow in turn are known as equal only after many turns.
        """
        count = self._count
        mean = self._difference / count
        variance = np.maximum(self._square / count - mean**2, 1e-12)
        change = np.clip(self._change / (2 * count), 1e-12, variance)  # (1 - rho) of the variance
        uncertain = np.minimum(variance, variance * (2 * variance - change) / (count * change)) + _UNSEEN**2 / count
        return mean * _INEQUALITY**2 / (_INEQUALITY**2 + uncertain)
