"""What the pipeline is said to have done: bubbles, totals, and how long steps are kept."""

from __future__ import annotations

import pytest

from actorpp.coordinator.chunking.cost import CostModel, StageCost
from actorpp.serving.activity import KEEP_S, Activity, bubbles
from actorpp.stages.messages import Segment, StageTiming, Step


def test_idle_time_is_a_bubble_only_while_a_step_is_under_way() -> None:
    before = ((0.0, 1.0), (1.0, 3.0))
    # The next step follows at once: stage 0 waits for nothing, stage 1 for its input.
    assert bubbles(before, ((1.0, 2.0), (4.0, 5.0))) == pytest.approx([0.0, 1.0])
    # It comes late, but while stage 1 is still at the step before.
    assert bubbles(before, ((2.5, 3.5), (3.5, 4.5))) == pytest.approx([1.5, 0.5])
    # The pipeline was empty from 3 to 10: only what is before and after counts.
    assert bubbles(before, ((10.0, 11.0), (11.5, 12.0))) == pytest.approx([2.0, 1.5])


def step(seq: int, *segments: Segment, epoch: int = 1) -> Step:
    return Step(epoch=epoch, seq=seq, slot=0, segments=segments)


def test_totals_and_the_newest_steps() -> None:
    activity = Activity(2)
    timings = [(0.0, 1.0), (1.0, 3.0)]
    for seq, at in ((0, 0.0), (1, 1.0), (2, KEEP_S + 10)):
        activity.step_done(
            step(seq, Segment(7, 0, 5), Segment(8, 9, 1, 42, True)),
            [StageTiming(start + at, end + at) for start, end in timings],
        )
    assert activity.busy_s == pytest.approx([3.0, 6.0])
    assert [record.number for record in activity.steps] == [2]
    assert (activity.steps[0].prefill, activity.steps[0].decode, activity.steps[0].requests) == (5, 1, (7,))
    activity.step_done(step(3, Segment(7, 0, 5)), ())  # a step without timings tells nothing
    assert [record.number for record in activity.steps] == [2]


def test_numbers_go_on_when_an_epoch_was_lost() -> None:
    activity = Activity(1)
    for at, (epoch, seq) in enumerate([(1, 0), (1, 1), (2, 0), (2, 1)]):
        activity.step_done(step(seq, Segment(7, 0, 5), epoch=epoch), [StageTiming(at, at + 1)])
    assert [record.number for record in activity.steps] == [0, 1, 2, 3]


def test_only_a_lone_prompt_chunk_is_compared_with_its_prediction() -> None:
    model = CostModel((StageCost(1.0, 0.0, 2.0, 0.0, head=10.0), StageCost(0.5, 0.1, 0.0, 0.0)))
    activity = Activity(2)
    timings = [StageTiming(0.0, 1.0), StageTiming(1.0, 2.0)]
    for seq, segments in enumerate(
        ([Segment(7, 4, 5)], [Segment(7, 4, 5, None, True)], [Segment(7, 9, 1, 42, True)], [Segment(7, 0, 5)] * 2)
    ):
        activity.step_done(step(seq, *segments), timings, model)
    assert [record.predicted for record in activity.steps] == [(11.0, 0.9), (21.0, 0.9), (), ()]
    activity.step_done(step(5, Segment(7, 4, 5)), timings, CostModel(model.stages, in_seconds=False))
    assert activity.steps[-1].predicted == ()
