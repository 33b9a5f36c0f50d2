"""Learning what a step costs while the engine runs, on machines whose speed changes.

A step may take 1.7 times as long because a neighbour has the core, for one step or for some seconds, and prompts go by
in just such times: least squares takes it for the cost of a long history, or for a slow stage, and plans for it. But
nothing makes a step quicker than the machine allows. So what is fitted is not the mean of the times but their quick
quartile: a quantile regression (R. Koenker & G. Bassett, 1978) of the logarithms of stage times,

    log t = speed + log(step c + reading gamma L + b x + attention a (2 L x + x^2) + sampling head)

over the newest steps, with

- the *shape*: by what factors the prior's costs of a step, of history, attention and head are off, beside its cost of a
  token. All stages share it: they run the same code on layers of the same kind;
- the *typical speed* of each stage, undisturbed. Plans are made for this one: a plan made for a stage that is slow just
  now gains little if it stays slow, and loses more if it does not. Of two cores that are disturbed in turn, one is
  always the one that was disturbed longer, and a plan for that costs more than a plan for equal stages.

Where there are few steps yet, shape and differences between stages stay near the prior's: this is the most likely fit
given that logarithms of the factors are normally distributed, and times as an asymmetric Laplace distribution about
their quartile. Each step brings it up to date by Gauss-Newton iterations, reweighted.

Predictions are for the machine as it is: they begin at the speeds of the newest steps, which fade into the mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from actorpp.coordinator.chunking.cost import CostModel, StageCost
from actorpp.coordinator.chunking.fit import StageSample

_Array = NDArray[np.float64]

_STEPS = 512  # that are fitted: the newest
_QUANTILE = 0.25  # of times, which is fitted
_DISTURBED = 5  # steps that one disturbance lasts: together they say as little as one sample of a profile
_SMOOTH = 0.02  # smaller residuals weigh as if squared: iterations shall converge
_ITERATIONS = 2
_LARGEST_CHANGE = 1.0  # of a logarithm in one iteration

# Standard deviations of logarithms: 0.1 is about 10%.
_SHAPE = (0.7, 0.7, 0.5, 0.7)  # of the prior's c, gamma, a and head, beside its b
_FACTORS = len(_SHAPE)
_UNKNOWN = 1e3  # of their speed
_INEQUALITY = 0.05  # of stages that the prior takes for equal

_SCATTER, _SCATTER_COUNT = 0.1, 10  # mean loss before anything was measured, and as how many times this counts
_LEAST_SCATTER = 0.02

_RECENT = 200  # steps that a speed's mean comes from
_FOLLOWED = 0.6  # of a change that a step shows, how much is taken for one of the stage's speed
_PERSISTENCE = 0.95  # of a speed's distance from the mean, how much is left of it one step later


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
        stages = len(prior.stages)
        self._prior = prior
        self._costs = np.array([[cost.c, cost.gamma, cost.a, cost.head, cost.b] for cost in prior.stages])
        self._counts: _Array = np.empty((0, _FACTORS + 1))  # what each of these is multiplied with, step after step
        self._times: _Array = np.empty((0, stages))  # logarithms
        self._worth: _Array = np.empty(0)  # what each step says, in samples of a profile
        self._fitted: _Array = np.zeros(_FACTORS + stages)  # logarithms: factors of the shape, speeds of the stages
        self._certainty = np.diag(np.power([*_SHAPE, *[_UNKNOWN] * stages], -2.0))  # inverse of their covariance
        self._certainty[_FACTORS:, _FACTORS:] += (np.eye(stages) - 1 / stages) / _INEQUALITY**2
        self._now: _Array = np.zeros(stages)  # logarithms of the speeds of this moment beside the fitted ones
        self._model: CostModel | None = prior
        self._typical: CostModel | None = prior
        self._cold = True
        self.measured = 0
        for sample in profile:
            self._learn(sample, 1.0)

    @property
    def in_seconds(self) -> bool:
        """Whether anything was measured, here or for the prior."""
        return self.model.in_seconds

    @property
    def model(self) -> CostModel:
        """What a step takes at the stages' speeds of this moment."""
        if self._model is None:
            self._model = self._scaled(self._now)
        return self._model

    @property
    def typical(self) -> CostModel:
        """What a step takes where nothing disturbs it: for plans."""
        if self._typical is None:
            self._typical = self._scaled(np.zeros_like(self._now))
        return self._typical

    def chunk_times(self, chunks: Sequence[int]) -> list[tuple[float, ...]]:
        """What the chunks of a prompt that begins now will take, for each chunk and stage: the last one samples.

        A stage that is slow just now is expected to be less so with every chunk.
        """
        if not self.measured:
            return self._prior.chunk_times(chunks)
        mean = self._residuals(self._shares()[0])[-_RECENT:].mean(axis=0)
        fading = np.outer(_PERSISTENCE ** np.arange(len(chunks)), self._now - mean)
        return [tuple(row) for row in (np.exp(mean + fading) * self.typical.chunk_times(chunks)).tolist()]

    def add(self, sample: StageSample) -> None:
        """Learn from a step. The engine's first step is cold (memory, kernels, caches) and is left out."""
        if self._cold or len(sample.seconds) != len(self._prior.stages) or min(sample.seconds) <= 0:
            self._cold = False
        else:
            self._learn(sample, 1 / _DISTURBED)

    def _learn(self, sample: StageSample, worth: float) -> None:
        pairs = (2 * sample.history + sample.tokens) * sample.tokens
        counts = [1.0, sample.history, pairs, sample.samples, sample.tokens]
        self._counts = np.vstack([self._counts[1 - _STEPS :], counts])
        self._times = np.vstack([self._times[1 - _STEPS :], np.log(sample.seconds)])
        self._worth = np.append(self._worth[1 - _STEPS :], worth)
        expected, shares = self._shares()
        if not self.measured:
            self._fitted[_FACTORS:] = self._residuals(expected).mean()
        for _ in range(_ITERATIONS):
            self._improve(self._residuals(expected), shares)
            expected, shares = self._shares()
        self._now = self._now + _FOLLOWED * (self._residuals(expected)[-1] - self._now)
        self.measured += 1
        self._model = self._typical = None

    def _shares(self) -> tuple[_Array, _Array]:
        """Logarithms of what the steps cost at the prior's speeds, (steps, stages), and what share of it each part of
        the shape has, (steps, stages, factors)."""
        factors = np.append(np.exp(self._fitted[:_FACTORS]), 1.0)
        parts = self._counts[:, None, :] * (self._costs * factors)
        whole = parts.sum(axis=2)
        return np.log(whole), parts[:, :, :_FACTORS] / whole[:, :, None]

    def _residuals(self, expected: _Array) -> _Array:
        """By how much longer the steps took than fitted, as logarithms, (steps, stages)."""
        residuals: _Array = self._times - expected - self._fitted[_FACTORS:]
        return residuals

    def _improve(self, residuals: _Array, shares: _Array) -> None:
        """One iteration: least squares of the residuals, each with the weight that makes its square its loss."""
        asymmetry = np.where(residuals > 0, _QUANTILE, 1 - _QUANTILE)
        loss = (asymmetry * np.abs(residuals)).sum() + _SCATTER * _SCATTER_COUNT
        scatter = max(_LEAST_SCATTER, loss / (residuals.size + _SCATTER_COUNT))
        weights = self._worth[:, None] * asymmetry / np.maximum(np.abs(residuals), _SMOOTH) / scatter

        # Normal equations: a time's slope is its shares by the shape, and 1 by its stage's speed.
        weighted = weights[:, :, None] * shares
        by_shape, by_both = weighted.reshape(-1, _FACTORS).T, weighted.sum(axis=0)
        by_speed = np.diag(weights.sum(axis=0))
        squares = np.block([[by_shape @ shares.reshape(-1, _FACTORS), by_both.T], [by_both, by_speed]])
        gradient = np.concatenate([by_shape @ residuals.ravel(), (weights * residuals).sum(axis=0)])
        change = np.linalg.solve(squares + self._certainty, gradient - self._certainty @ self._fitted)
        self._fitted = self._fitted + np.clip(change, -_LARGEST_CHANGE, _LARGEST_CHANGE)

    def _scaled(self, speeds: _Array) -> CostModel:
        """With the shape as fitted, at these speeds beside the fitted ones."""
        step, reading, attention, sampling = np.exp(self._fitted[:_FACTORS]).tolist()
        factors = np.exp(self._fitted[_FACTORS:] + speeds).tolist()
        return CostModel(
            tuple(
                StageCost(
                    c=factor * step * prior.c,
                    gamma=factor * reading * prior.gamma,
                    b=factor * prior.b,
                    a=factor * attention * prior.a,
                    head=factor * sampling * prior.head,
                )
                for factor, prior in zip(factors, self._prior.stages, strict=True)
            )
        )
