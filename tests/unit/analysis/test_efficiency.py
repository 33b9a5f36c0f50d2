"""Bound, bubbles and efficiency against figures worked out by hand."""

from __future__ import annotations

import random
from itertools import product

import pytest

from actorpp.analysis.efficiency import pipeline_figures
from actorpp.analysis.steps import needed_steps, traced_steps
from actorpp.coordinator.chunking.flowshop import completion_times, makespan
from tests.unit.analysis.support import decode, hand_made, prefill, spans_of


def test_steps_of_a_trace() -> None:
    steps = traced_steps(hand_made().stages)
    assert [(step.epoch, step.seq) for step in steps] == [(1, 10), (1, 11), (1, 12), (1, 13)]
    assert [step.num_tokens for step in steps] == [4, 4, 2, 1]
    assert [[segment.start for segment in step.chunks] for step in steps] == [[0], [4], [8], []]
    assert needed_steps(steps) == [None, None, None, 2]
    assert [step.times for step in steps] == [(2, 2), (2, 2), (1, 1), (1, 1)]


def test_a_step_that_one_stage_has_not_computed_is_left_out() -> None:
    first, second = hand_made().stages
    assert [step.seq for step in traced_steps((first, second[:2]))] == [10, 11]
    assert traced_steps(()) == []


def test_figures_of_the_hand_made_trace() -> None:
    figures = pipeline_figures(traced_steps(hand_made().stages))
    assert figures.num_steps == 4
    assert figures.busy_s == pytest.approx((6, 6))
    assert figures.makespan_s == pytest.approx(10)
    # 0-2 2-4 4-5 on stage 0, 2-4 4-6 6-7 on stage 1; then the sampled token: 7-8, 8-9
    assert figures.bound_s == pytest.approx(9)
    assert figures.over_bound == pytest.approx(10 / 9)
    assert figures.efficiency == pytest.approx(12 / 20)
    assert figures.bubble_share == pytest.approx(8 / 20)
    assert figures.bubble_share_after_fill == pytest.approx(1 - 10 / 16)  # from 2 on
    assert (figures.num_prefill_steps, figures.num_fills) == (3, 1)
    assert figures.prefill_bubble_share == pytest.approx(4 / 14)  # from 0 to 7
    assert figures.decode_bubble_share == pytest.approx(4 / 6)  # from 7 to 10
    assert figures.ideal_bubble_share == pytest.approx(1 / 4)
    assert figures.ideal == "(P-1)/(P-1+M)"


def test_prompts_that_follow_each_other_fill_the_pipeline_once_each_and_decode_in_between_is_no_prefill() -> None:
    def at(*begins: float) -> list[list[tuple[float, float]]]:
        return [[(begin, begin + 1), (begin + 1, begin + 2)] for begin in begins]

    steps = [
        *zip(prefill(1, [4, 4]), at(0, 1), strict=True),
        (decode(1, 8, 11), at(4)[0]),
        *zip(prefill(2, [4, 4]), at(7, 10), strict=True),  # the pipeline is empty from 9 to 10: no fill, a bubble
    ]
    figures = pipeline_figures(traced_steps(spans_of(steps, 2)))
    assert (figures.num_prefill_steps, figures.num_fills) == (4, 2)
    assert figures.prefill_bubble_share == pytest.approx(1 - 8 / (2 * (3 + 5)))
    assert figures.decode_bubble_share == pytest.approx(1 - 2 / (2 * 4))
    assert figures.ideal_bubble_share == pytest.approx(2 / 6)
    assert figures.ideal == "(2(P-1))/(2(P-1)+M)"


def test_chunks_among_decode_steps_fill_nothing_and_what_decodes_meanwhile_is_busy() -> None:
    chunk = prefill(2, [4])[0]
    segments = [prefill(1, [4])[0], decode(1, 4, 10), decode(1, 5, 11), chunk, decode(1, 6, 12)]
    steps = [(own, ((float(i), i + 1.0), (i + 1.0, i + 2.0))) for i, own in enumerate(segments)]
    figures = pipeline_figures(traced_steps(spans_of(steps, 2)))
    assert (figures.num_prefill_steps, figures.num_fills) == (2, 1)
    assert figures.prefill_bubble_share == pytest.approx(1 - 7 / 8)  # 0 to 2, with one stage idle to 1; 3 to 5
    assert figures.decode_bubble_share == pytest.approx(1 - 3 / 4)  # 2 to 3 and 5 to 6
    only = pipeline_figures(traced_steps(spans_of(steps[:1], 2)))
    assert only.decode_bubble_share is None
    rest = pipeline_figures(traced_steps(spans_of(steps[1:3], 2)))
    assert (rest.prefill_bubble_share, rest.ideal_bubble_share) == (None, None)
    assert rest.decode_bubble_share == pytest.approx(rest.bubble_share)


def test_a_pipeline_that_never_waits_has_the_ideal_bubbles_and_its_bound() -> None:
    for stages, chunks in product((1, 2, 4, 8), (1, 3, 16)):
        times = [tuple((float(i + k), float(i + k + 1)) for k in range(stages)) for i in range(chunks)]
        steps = traced_steps(spans_of(list(zip(prefill(1, [64] * chunks), times, strict=True)), stages))
        figures = pipeline_figures(steps)
        assert figures.bubble_share == pytest.approx(figures.ideal_bubble_share)
        assert figures.over_bound == pytest.approx(1)


def test_steps_are_needed() -> None:
    with pytest.raises(ValueError, match="no steps"):
        pipeline_figures([])


def test_completion_times_by_hand() -> None:
    assert completion_times([(1, 2), (3, 1), (1, 5)]) == [(1, 3), (4, 5), (5, 10)]
    assert completion_times([(1, 2), (3, 1)], [None, 0]) == [(1, 3), (6, 7)]
    assert makespan([]) == 0


def test_no_schedule_of_the_same_order_beats_the_bound() -> None:
    """Random delays before every job on every machine: never earlier than the recurrence says."""
    source = random.Random(0)
    for _ in range(50):
        machines, jobs = source.randint(1, 4), source.randint(1, 8)
        times = [[source.random() for _ in range(machines)] for _ in range(jobs)]
        free, end = [0.0] * machines, 0.0
        for job in times:
            end = 0.0
            for machine, time in enumerate(job):
                end = max(end, free[machine]) + source.choice((0.0, source.random())) + time
                free[machine] = end
        assert makespan(times) <= end + 1e-12
