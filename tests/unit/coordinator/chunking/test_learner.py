"""What steps cost is learned while they run: shape, seconds and differences between stages, on machines that change."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import mean

import pytest

from actorpp.coordinator.chunking.cost import CostModel, StageCost
from actorpp.coordinator.chunking.fit import StageSample
from actorpp.coordinator.chunking.learner import CostLearner
from tests.unit.coordinator.chunking.support import model, sample

TRUE = CostModel((StageCost(c=0.012, gamma=0.0, b=2e-4, a=4e-8), StageCost(c=0.012, gamma=0.0, b=2e-4, a=4e-8)))
COUNTED = CostModel(tuple(stage.scaled(1e12) for stage in TRUE.stages), in_seconds=False)
GRID = [(0, 64), (0, 256), (0, 1024), (0, 2048), (2048, 128), (4096, 512), (6144, 1024), (7000, 64)]


def shape(learner: CostLearner, stage: int = 0) -> float:
    """How a chunk's time behind a long history compares with one behind none; the seconds divide out."""
    cost = learner.model.stages[stage]
    return cost.time(7500, 500) / cost.time(0, 500)


def ratio(costs: CostModel) -> float:
    """How much slower the second stage is than the first."""
    first, second = costs.times(3000, 300)
    return second / first


def taught(prior: CostModel, seconds: list[StageSample]) -> CostLearner:
    learner = CostLearner(prior)
    learner.add(sample(TRUE, 0, 64))  # cold
    for measured in seconds:
        learner.add(measured)
    return learner


def test_the_first_step_is_cold_and_never_learned_from() -> None:
    learner = CostLearner(COUNTED)
    learner.add(StageSample(0, 512, False, (70.0, 90.0)))
    assert learner.measured == 0
    assert not learner.model.in_seconds
    learner.add(sample(TRUE, 512, 512))
    assert learner.measured == 1
    assert learner.model.in_seconds


def test_one_measurement_gives_the_seconds_and_the_first_estimate_the_shape() -> None:
    learner = taught(COUNTED, [sample(TRUE, 1024, 512)])
    assert learner.model.times(0, 512) == pytest.approx(TRUE.times(0, 512), rel=0.02)
    assert learner.model.times(8192, 512) == pytest.approx(TRUE.times(8192, 512), rel=0.02)


def test_measurements_overrule_a_wrong_first_estimate() -> None:
    """The step's fixed cost six times too low, attention a fifth, the head ten times too high."""
    wrong = CostModel(tuple(StageCost(c=10.0, gamma=0.0, b=1.0, a=4e-5, head=50.0) for _ in range(2)), in_seconds=False)
    true = CostModel(tuple(StageCost(c=0.012, gamma=0.0, b=2e-4, a=4e-8, head=1e-3) for _ in range(2)))
    learner = CostLearner(wrong)
    learner.add(sample(true, 0, 64))
    for samples in (False, True, False, True):
        for history, tokens in GRID:
            learner.add(sample(true, history, tokens, samples))
    for history, tokens in [(0, 500), (3000, 300), (8000, 1000)]:
        for samples in (False, True):
            expected = true.times(history, tokens, samples)
            assert learner.model.times(history, tokens, samples) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_first_estimate_that_is_very_wrong_is_overruled_too(stages: int) -> None:
    """A step's fixed cost is 50 times what was counted, as where starting kernels takes longest."""
    counted = CostModel((StageCost(c=60.0, gamma=0.0, b=1.0, a=2e-4),) * stages, in_seconds=False)
    true = CostModel((StageCost(c=0.6, gamma=0.0, b=2e-4, a=4e-8),) * stages)
    learner = CostLearner(counted, [sample(true, history, tokens) for history, tokens in GRID * 6])
    for history, tokens in GRID:
        assert learner.typical.times(history, tokens) == pytest.approx(true.times(history, tokens), rel=0.1)


def test_stages_that_stay_unequal_are_learned_as_such() -> None:
    unequal = CostModel((TRUE.stages[0], TRUE.stages[1].scaled(1.3)))
    learner = taught(COUNTED, [sample(unequal, history, tokens) for history, tokens in GRID * 2])
    assert learner.model.times(3000, 300) == pytest.approx(unequal.times(3000, 300), rel=0.02)
    assert 1.05 < ratio(learner.typical) < 1.2  # it may be a slow phase
    for history, tokens in GRID * 10:
        learner.add(sample(unequal, history, tokens))
    assert ratio(learner.typical) == pytest.approx(1.3, rel=0.05)


def test_stages_that_are_slow_in_turn_are_not_taken_for_unequal() -> None:
    """One after the other takes 1.7 times as long for 15 steps. The last one was slow just now."""
    seconds = []
    for step in range(120):
        slow = step // 15 % 2
        times = [t * (1.7 if stage == slow else 1.0) for stage, t in enumerate(TRUE.times(0, 500))]
        seconds.append(StageSample(0, 500, False, tuple(times)))
    learner = taught(COUNTED, seconds)
    assert ratio(learner.model) == pytest.approx(1.7, rel=0.03)
    assert ratio(learner.typical) == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize("seed", range(5))
def test_slow_phases_at_the_end_of_prompts_are_not_taken_for_the_cost_of_history(seed: int) -> None:
    """The last third of each prompt finds one stage, then the other, at 0.6 of its speed."""
    generator = random.Random(seed)
    seconds = []
    for prompt in range(10):
        for history in range(0, 8000, 500):
            factors = [generator.lognormvariate(0, 0.03) for _ in TRUE.stages]
            if history >= 5000 and prompt % 3:
                factors[prompt % 2] /= 0.6
            times = tuple(t * f for t, f in zip(TRUE.times(history, 500), factors, strict=True))
            seconds.append(StageSample(history, 500, False, times))
    true = TRUE.stages[0].time(7500, 500) / TRUE.stages[0].time(0, 500)
    assert shape(taught(COUNTED, seconds)) == pytest.approx(true, rel=0.08)


@pytest.mark.parametrize("seed", range(5))
def test_times_that_scatter_are_predicted_in_the_mean(seed: int) -> None:
    generator = random.Random(seed)
    learner, ratios = taught(COUNTED, []), []
    for history, tokens in GRID * 40:
        times = [t * generator.lognormvariate(-0.045, 0.3) for t in TRUE.times(history, tokens)]  # as TRUE in the mean
        learner.add(StageSample(history, tokens, False, tuple(times)))
        ratios += [mean(learner.model.times(*size)) / mean(TRUE.times(*size)) for size in GRID]
    assert mean(ratios[len(GRID) * 40 :]) == pytest.approx(1.0, rel=0.1)


def test_a_machine_that_becomes_slower_is_followed_at_once() -> None:
    learner = taught(COUNTED, [sample(TRUE, history, tokens) for history, tokens in GRID * 5])
    before = shape(learner)
    for history, tokens in GRID[:3]:
        learner.add(sample(TRUE, history, tokens, factor=2.0))
    assert learner.model.times(4096, 512) == pytest.approx([2 * t for t in TRUE.times(4096, 512)], rel=0.05)
    assert shape(learner) == pytest.approx(before, rel=0.03)


def test_a_stage_that_is_slow_just_now_is_predicted_to_be_less_so_with_every_chunk() -> None:
    learner = taught(COUNTED, [sample(TRUE, history, tokens) for history, tokens in GRID * 20])
    slow = CostModel((TRUE.stages[0], TRUE.stages[1].scaled(2.0)))
    for history, tokens in GRID[:4]:
        learner.add(sample(slow, history, tokens))
    chunks = [400] * 100
    factors = [
        [took / t for took, t in zip(row, undisturbed, strict=True)]
        for row, undisturbed in zip(learner.chunk_times(chunks), TRUE.chunk_times(chunks), strict=True)
    ]
    assert factors[0] == pytest.approx([1.0, 2.0], rel=0.05)
    assert factors[-1] == pytest.approx([1.0, 1.0], rel=0.05)
    assert all(before[1] > after[1] for before, after in pairwise(factors))
    assert all(first == pytest.approx(1.0, rel=0.05) for first, _ in factors)


def test_a_saved_models_seconds_are_believed_at_once() -> None:
    assert CostLearner(TRUE).model == CostLearner(TRUE).typical == TRUE


def test_a_profile_is_learned_from_at_once() -> None:
    """On a machine that was slow for a part of it; the engine, later, finds it fast."""
    true = CostModel(tuple(StageCost(c=0.03, gamma=3e-6, b=2e-4, a=8e-8) for _ in range(2)))
    counted = CostModel(tuple(stage.scaled(1e12) for stage in model().stages), in_seconds=False)
    counted = CostModel(tuple(StageCost(s.c, 40 * s.a, s.b, s.a) for s in counted.stages), in_seconds=False)
    grid = [(h, x) for h in (0, 2000, 6000) for x in (64, 256, 1024)] * 2
    profile = [sample(true, h, x, factor=1.7 if 6 <= index < 12 else 1.0) for index, (h, x) in enumerate(grid)]
    learner = CostLearner(counted, profile)
    assert learner.measured == len(grid)
    assert learner.model.in_seconds
    for history, tokens in grid:
        assert learner.model.times(history, tokens) == pytest.approx(true.times(history, tokens), rel=0.06)


def test_stages_that_were_saved_as_unequal_stay_so() -> None:
    saved = CostModel((TRUE.stages[0], TRUE.stages[1].scaled(1.5)))
    learner = taught(saved, [sample(saved, history, tokens) for history, tokens in GRID])
    assert ratio(learner.typical) == pytest.approx(1.5, rel=0.02)


def test_a_sample_of_another_number_of_stages_is_left_out() -> None:
    learner = taught(COUNTED, [sample(TRUE, 0, 256)])
    learner.add(StageSample(0, 256, False, (0.1,)))
    learner.add(StageSample(0, 256, False, (0.1, 0.0)))
    assert learner.measured == 1
