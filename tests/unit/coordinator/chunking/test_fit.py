"""Costs are learned: exactly from exact samples, well from noisy ones, and as scipy would."""

from __future__ import annotations

import random

import pytest
from scipy.optimize import nnls as scipy_nnls

from actorpp.coordinator.chunking.cost import CostModel, StageCost, features
from actorpp.coordinator.chunking.fit import CostLearner, StageSample, fit_profile
from actorpp.coordinator.chunking.leastsquares import nnls
from tests.unit.coordinator.chunking.support import model, sample

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


def test_times_that_scatter_are_predicted_in_the_mean() -> None:
    """A makespan is a sum of times. Errors in proportion to the measured times put it 16% too low here."""
    generator = random.Random(11)
    scatter = [generator.lognormvariate(0, 0.3) for _ in range(60)]
    mean = sum(scatter) / len(scatter)
    samples = [sample(TRUE, h, x, factor=factor / mean) for factor in scatter for h, x in GRID]
    learner = CostLearner(CostModel(tuple(stage.scaled(1e9) for stage in model().stages), in_seconds=False))
    for measured in samples * 3:
        learner.add(measured)
    for stage, (fit, true) in enumerate(zip(fit_profile(samples), TRUE.stages, strict=True)):
        assert sum(fit.cost.time(h, x) for h, x in GRID) == pytest.approx(
            sum(true.time(h, x) for h, x in GRID), rel=0.01
        )
        learned = sum(learner.model.times(h, x)[stage] for h, x in GRID)
        assert learned == pytest.approx(sum(true.time(h, x) for h, x in GRID), rel=0.08)  # of the last hundred


def test_coefficients_are_never_negative() -> None:
    samples = [StageSample(0, x, False, (0.1 + 1e-3 * x - 1e-7 * x * x,)) for x in range(100, 2000, 100)]
    (fit,) = fit_profile(samples)
    assert min(fit.cost.c, fit.cost.gamma, fit.cost.b, fit.cost.a) >= 0


def test_the_first_step_is_cold_and_never_learned_from() -> None:
    learner = CostLearner(CostModel(model().stages, in_seconds=False))
    learner.add(StageSample(0, 512, False, (70.0, 90.0)))
    assert learner.measured == 0
    assert not learner.model.in_seconds
    learner.add(sample(TRUE, 512, 512))
    assert learner.measured == 1
    assert learner.model.in_seconds


def test_one_measurement_gives_the_seconds_and_the_first_estimate_the_shape() -> None:
    prior = CostModel(tuple(stage.scaled(1e9) for stage in model().stages), in_seconds=False)
    learner = CostLearner(prior)
    for _ in range(2):
        learner.add(sample(model(), 1024, 512))
    assert learner.model.times(0, 512) == pytest.approx(model().times(0, 512), rel=0.02)
    assert learner.model.times(8192, 512) == pytest.approx(model().times(8192, 512), rel=0.02)


def test_measurements_overrule_a_wrong_first_estimate() -> None:
    wrong = CostModel(tuple(StageCost(c=1.0, gamma=0.0, b=0.5, a=1e-9) for _ in range(2)), in_seconds=False)
    learner = CostLearner(wrong)
    learner.add(sample(TRUE, 0, 64))
    for history, tokens in GRID * 3:
        learner.add(sample(TRUE, history, tokens))
    for history, tokens in [(0, 500), (3000, 300), (8000, 1000)]:
        assert learner.model.times(history, tokens) == pytest.approx(TRUE.times(history, tokens), rel=0.05)


def test_a_machine_that_becomes_slower_is_followed() -> None:
    learner = CostLearner(TRUE)
    for _ in range(30):
        for history, tokens in GRID:
            learner.add(sample(TRUE, history, tokens))
    for _ in range(50):
        for history, tokens in GRID:
            learner.add(sample(TRUE, history, tokens, factor=2.0))
    assert learner.model.times(4096, 512) == pytest.approx([2 * t for t in TRUE.times(4096, 512)], rel=0.05)


def test_a_saved_models_seconds_are_believed_at_once() -> None:
    assert CostLearner(TRUE).model == TRUE


def test_features_are_the_formulas() -> None:
    stage = TRUE.stages[1]
    coefficients = (stage.c, stage.gamma, stage.b, stage.a, stage.head)
    by_features = sum(c * f for c, f in zip(coefficients, features(700, 300, True), strict=True))
    assert stage.time(700, 300, True) == pytest.approx(by_features)
    assert TRUE.chunk_times([300, 200], 700) == [
        pytest.approx(TRUE.times(700, 300)),
        pytest.approx(TRUE.times(1000, 200, True)),
    ]
