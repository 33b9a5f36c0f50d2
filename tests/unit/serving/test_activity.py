"""What the pipeline is said to have done: bubbles, totals, and how long steps are kept."""

from __future__ import annotations

import pytest

from actorpp.coordinator.chunking.cost import CostModel, StageCost
from actorpp.serving.activity import KEEP_S, Activity
from actorpp.stages.messages import Segment, StageTiming, Step


def test_idle_time_is_a_bubble_only_while_there_is_work() -> None:
    activity = Activity(2)

    def bubbles_of(*spans: tuple[float, float], rested: bool = False) -> list[float]:
        before = list(activity.bubble_s)
        if rested:
            activity.rest_ends()
        activity.step_done(step(0, Segment(7, 0, 5)), [StageTiming(*span) for span in spans])
        return [after - so_far for after, so_far in zip(activity.bubble_s, before, strict=True)]

    assert bubbles_of((0.0, 1.0), (1.0, 3.0)) == [0.0, 0.0]
    # The next step follows at once: stage 0 waits for nothing, stage 1 for its input.
    assert bubbles_of((1.0, 2.0), (4.0, 5.0)) == pytest.approx([0.0, 1.0])
    # It comes late, when stage 1 has done the one before: there were requests all the time.
    assert bubbles_of((6.0, 7.0), (7.0, 8.0)) == pytest.approx([4.0, 2.0])
    # The pipeline had no request from 8 on: only what is before, and after the next one came, counts.
    assert bubbles_of((10.0, 11.0), (11.5, 12.0), rested=True) == pytest.approx([1.0, 1.5])
    assert bubbles_of((11.0, 12.0), (12.5, 13.0)) == pytest.approx([0.0, 0.5])


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
