"""Costs are fitted: exactly to exact samples, well to noisy ones, and as scipy would."""

from __future__ import annotations

import random

import pytest
from scipy.optimize import nnls as scipy_nnls

from actorpp.coordinator.chunking.cost import CostModel, StageCost, features
from actorpp.coordinator.chunking.fit import StageSample, fit_profile
from actorpp.coordinator.chunking.leastsquares import nnls
from tests.unit.coordinator.chunking.support import sample

TRUE = CostModel(
    (StageCost(c=0.012, gamma=1e-7, b=2e-4, a=4e-8), StageCost(c=0.02, gamma=0.0, b=2.4e-4, a=3e-8, head=0.005))
)
GRID = [(0, 64), (0, 256), (0, 1024), (0, 2048), (2048, 128), (4096, 512), (6144, 1024), (7000, 64)]


@pytest.mark.parametrize("seed", range(40))
def test_nnls_is_scipys(seed: int) -> None:
    generator = random.Random(seed)
    rows, columns = generator.randrange(3, 30), generator.randrange(1, 6)
    a = [[generator.gauss(0.3, 1) * 10 ** (3 * j) for j in range(columns)] for _ in range(rows)]
    if seed % 5 == 0:
        a = [[0.0, *row[1:]] for row in a]
    y = [generator.gauss(1, 1) for _ in range(rows)]
    gram = [[sum(row[i] * row[j] for row in a) for j in range(columns)] for i in range(columns)]
    moment = [sum(row[i] * value for row, value in zip(a, y, strict=True)) for i in range(columns)]
    expected, _ = scipy_nnls(a, y)
    scale = [10 ** (-3 * j) for j in range(columns)]
    assert nnls(gram, moment) == pytest.approx(list(expected), rel=1e-5, abs=1e-9 * max(scale))


def test_a_fit_of_exact_samples_is_exact() -> None:
    samples = [sample(TRUE, history, tokens, samples) for history, tokens in GRID for samples in (False, True)]
    for fit, true in zip(fit_profile(samples), TRUE.stages, strict=True):
        for history, tokens in [(0, 100), (3000, 700), (100_000, 5000)]:
            assert fit.cost.time(history, tokens) == pytest.approx(true.time(history, tokens), rel=1e-5)
        assert fit.r2 == pytest.approx(1.0)
        assert max(map(abs, fit.residuals)) < 1e-6


def test_a_fit_of_noisy_samples_is_close_and_its_residuals_show_the_noise() -> None:
    generator = random.Random(5)
    samples = [sample(TRUE, h, x, factor=generator.uniform(0.97, 1.03)) for h, x in GRID * 4]
    for stage, (fit, true) in enumerate(zip(fit_profile(samples), TRUE.stages, strict=True)):
        assert fit.cost.time(5000, 800) == pytest.approx(true.time(5000, 800), rel=0.03)
        assert 0.99 < fit.r2 < 1
        assert fit.residuals[0] == pytest.approx(samples[0].seconds[stage] - fit.cost.time(*GRID[0]))


def test_times_that_scatter_are_fitted_in_the_mean() -> None:
    """A makespan is a sum of times. Errors in proportion to the measured times put it 16% too low here."""
    generator = random.Random(11)
    scatter = [generator.lognormvariate(0, 0.3) for _ in range(60)]
    mean = sum(scatter) / len(scatter)
    samples = [sample(TRUE, h, x, factor=factor / mean) for factor in scatter for h, x in GRID]
    for fit, true in zip(fit_profile(samples), TRUE.stages, strict=True):
        assert sum(fit.cost.time(h, x) for h, x in GRID) == pytest.approx(
            sum(true.time(h, x) for h, x in GRID), rel=0.01
        )


def test_coefficients_are_never_negative() -> None:
    samples = [StageSample(0, x, False, (0.1 + 1e-3 * x - 1e-7 * x * x,)) for x in range(100, 2000, 100)]
    (fit,) = fit_profile(samples)
    assert min(fit.cost.c, fit.cost.gamma, fit.cost.b, fit.cost.a) >= 0


def test_features_are_the_formulas() -> None:
    stage = TRUE.stages[1]
    coefficients = (stage.c, stage.gamma, stage.b, stage.a, stage.head)
    by_features = sum(c * f for c, f in zip(coefficients, features(700, 300, True), strict=True))
    assert stage.time(700, 300, True) == pytest.approx(by_features)
    assert TRUE.chunk_times([300, 200], 700) == [
        pytest.approx(TRUE.times(700, 300)),
        pytest.approx(TRUE.times(1000, 200, True)),
    ]
