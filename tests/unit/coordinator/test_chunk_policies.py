"""What the scheduler tells its chunk policy, and what it learns from the steps that come back."""

from __future__ import annotations

from dataclasses import dataclass, field

from actorpp.coordinator.chunking.cost import CostModel
from actorpp.coordinator.chunking.learner import CostLearner
from actorpp.coordinator.chunking.policy import ChunkRequest
from tests.unit.coordinator.chunking.support import model
from tests.unit.coordinator.support import Pipe, request, scheduler


@dataclass
class Recorded:
    """Chunks of 64 tokens, alone in their steps; keeps what it was asked."""

    asked: list[tuple[ChunkRequest, int, int]] = field(default_factory=list)

    def next_chunk(self, request: ChunkRequest, history_len: int, remaining: int, budget: int) -> int:
        self.asked.append((request, history_len, remaining))
        return 0 if request.step_tokens else min(64, remaining, budget)


def test_a_policy_hears_of_the_queue_of_what_is_packed_and_of_what_is_ahead() -> None:
    s = scheduler(stages=2, running=2, batched=200)
    policy = Recorded()
    s.policy = policy
    for rid, length in ((1, 100), (2, 300), (3, 50)):
        s.submit(request(rid, length))
    Pipe(s).pump()
    first, behind = policy.asked[0], policy.asked[1]
    assert first == (ChunkRequest(1, 100, queued=2, queued_tokens=350), 0, 100)
    assert behind == (ChunkRequest(2, 300, queued=2, queued_tokens=86, step_tokens=64), 0, 300)
    assert [asked.steps_ahead for asked, _, _ in policy.asked if not asked.step_tokens] == [0, 1, 2, 3]


def test_steps_with_one_chunk_teach_and_others_do_not() -> None:
    s = scheduler(stages=2, running=4)
    s.costs = CostLearner(CostModel(model(2).stages, in_seconds=False))
    alone, *packed = (request(1, 64 * 4), request(2, 20), request(3, 20))
    s.submit(alone)
    Pipe(s).drain()
    assert s.costs.measured == 3  # the first is cold; the decode steps of one token are none
    for other in packed:
        s.submit(other)
    Pipe(s).drain()
    assert s.costs.measured == 3
    assert [times.alone for times in alone.chunk_times] == [True] * 4
    assert alone.chunk_times[0].predicted_s is None
    assert all(times.measured_s == (1.0, 1.0) for times in alone.chunk_times)
    assert [times.alone for other in packed for times in other.chunk_times] == [False, False]
    assert packed[0].chunk_times[0].predicted_s is not None
