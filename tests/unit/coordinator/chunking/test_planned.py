"""The ``planned`` policy's sizes: shapes, limits, what a queue and measurements change, and that it is repeatable."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorpp.coordinator.chunking.cost import CostModel, StageCost
from actorpp.coordinator.chunking.flowshop import completion_times, in_window, makespan
from actorpp.coordinator.chunking.plan import plan_prompt
from actorpp.coordinator.chunking.planned import PlannedChunks
from actorpp.coordinator.chunking.policy import ChunkRequest
from actorpp.coordinator.chunking.search import best_chunks
from tests.unit.coordinator.chunking.support import STAGE, context, model, pieces, sample

FREE = 1 << 30


def best(costs: CostModel, total: int, *, history: int = 0, queued: int = 0, largest: int = FREE) -> tuple[int, ...]:
    window = len(costs.stages) + 2
    return best_chunks(costs, history, total, window=window, align=64, largest=largest, queued=queued)


def span(costs: CostModel, chunks: Sequence[int], window: int) -> float:
    return makespan(costs.chunk_times(chunks), in_window(len(chunks), window))


def test_the_recurrence_by_hand() -> None:
    times = [(1.0, 2.0), (3.0, 1.0), (1.0, 1.0)]

    def ends(window: int, **waits: float) -> list[float]:
        return [done[-1] for done in completion_times(times, in_window(3, window), **waits)]

    assert ends(3) == [3.0, 5.0, 6.0]
    assert ends(3, hop=0.5) == [3.5, 5.5, 6.5]
    assert ends(1) == [3.0, 7.0, 9.0]
    assert ends(1, round_trip=0.5) == [3.0, 7.5, 10.0]
    equal = [(2.0,) * 4] * 5
    assert makespan(equal, in_window(5, 4)) == 5 * 2.0 + 3 * 2.0  # the sum, and P - 1 times the longest


def test_chunks_of_one_prompt_take_equally_long() -> None:
    costs = model(4)
    chunks = best(costs, 65536)
    times = [row[0] for row in costs.chunk_times(chunks)]
    assert chunks[0] > 3 * chunks[-1]
    assert max(times) < 1.6 * sum(times) / len(times)  # but for the alignment


def test_the_number_of_chunks_is_near_the_formulas() -> None:
    for stages, total in ((2, 8192), (4, 32768), (8, 32768)):
        work = STAGE.b * total + STAGE.a * total * total
        formula = ((stages - 1) * work / STAGE.c) ** 0.5
        assert len(best(model(stages), total)) == pytest.approx(formula, rel=0.3)


def test_one_stage_needs_no_chunks() -> None:
    assert best(model(1), 20000) == (20000,)
    assert best(model(1), 20000, largest=8192) == (6720, 6656, 6624)  # a tail is not left over


def test_a_queue_makes_chunks_bigger() -> None:
    numbers = [len(best(model(4), 32768, queued=queued)) for queued in (0, 1, 8, 64)]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[-1] < numbers[0] / 3


@settings(max_examples=60, deadline=None)
@given(
    total=st.integers(1, 40000),
    pages=st.integers(0, 300),
    stages=st.integers(1, 6),
    page_size=st.sampled_from([1, 16, 48, 64, 128]),
    largest=st.sampled_from([512, 1000, 8192, FREE]),
    queued=st.integers(0, 5),
)
def test_chunks_are_aligned_and_no_tail_is_short(
    total: int, pages: int, stages: int, page_size: int, largest: int, queued: int
) -> None:
    align = page_size * -(-64 // page_size)
    history = pages * align
    chunks = best_chunks(model(stages), history, total, window=stages + 2, align=align, largest=largest, queued=queued)
    assert sum(chunks) == total
    assert max(chunks) <= largest
    assert all(chunk % align == 0 for chunk in chunks[:-1])
    assert chunks[-1] >= min(align, total)


def test_unequal_stages_are_planned_for_the_slow_one() -> None:
    costs = model(speeds=[0.5, 1.0, 2.0, 0.7])
    chunks = best(costs, 32768)
    fixed = min(span(costs, pieces(32768, size), 6) for size in range(64, 8192, 64))
    assert span(costs, chunks, 6) <= 1.01 * fixed


def test_a_cost_for_history_keeps_chunks_equal_in_time() -> None:
    stage = StageCost(c=STAGE.c, gamma=2e-6, b=STAGE.b, a=STAGE.a)
    costs = CostModel((stage,) * 4)
    times = [row[0] for row in costs.chunk_times(best(costs, 65536))]
    assert max(times) < 1.6 * sum(times) / len(times)


def test_a_plan_is_followed_and_predicted() -> None:
    asked = context(model(2))
    policy = PlannedChunks(asked)
    plan = plan_prompt(policy, asked.costs.model, 8000, window=4, max_chunk=FREE)
    assert plan.chunks == best_chunks(model(2), 0, 8000, window=4, align=64, largest=FREE)
    assert plan.predicted_ttft_s == pytest.approx(span(model(2), plan.chunks, 4))
    assert plan.predicted_chunk_s == tuple(model(2).chunk_times(plan.chunks))
    assert plan.predicted_done_s is not None
    assert plan.predicted_done_s[-1] == plan.predicted_ttft_s
    unmeasured = CostModel(model(2).stages, in_seconds=False)
    plan = plan_prompt(PlannedChunks(context(unmeasured)), unmeasured, 8000, window=4, max_chunk=FREE)
    assert (plan.predicted_ttft_s, plan.predicted_chunk_s, plan.predicted_done_s) == (None, None, None)


@pytest.mark.parametrize(("page_size", "align"), [(16, 64), (48, 96), (64, 64), (128, 128), (80, 80)])
def test_chunks_of_the_policy_end_on_borders_of_pages(page_size: int, align: int) -> None:
    asked = context(model(3), page_size=page_size)
    chunks = plan_prompt(PlannedChunks(asked), asked.costs.model, 20011, window=5, max_chunk=FREE).chunks
    assert len(chunks) > 8
    assert {chunk % align for chunk in chunks[:-1]} == {0}


@pytest.mark.parametrize("limits", [(500, FREE), (FREE, 500)], ids=["max_chunk", "chunk_size"])
def test_the_policy_plans_with_the_limits_of_a_chunk(limits: tuple[int, int]) -> None:
    """Not for larger chunks that are cut afterwards, which leaves splinters."""
    asked = context(model(2), max_chunk=limits[0], chunk_size=limits[1])
    chunks = plan_prompt(PlannedChunks(asked), asked.costs.model, 30000, window=4, max_chunk=FREE).chunks
    assert chunks == best_chunks(model(2), 0, 30000, window=4, align=64, largest=500)
    assert max(chunks) == 448


def test_what_is_left_is_planned_again_when_the_measurements_say_so() -> None:
    asked = context(CostModel(model(4).stages, in_seconds=False))
    policy, request = PlannedChunks(asked), ChunkRequest(1, 32768)
    first = policy.next_chunk(request, 0, 32768, FREE)
    before = policy.next_chunk(request, first, 32768 - first, FREE)
    dear = CostModel(tuple(StageCost(c=40 * STAGE.c, gamma=0, b=STAGE.b, a=STAGE.a) for _ in range(4)))
    for history, tokens in [(0, 64), (0, 64), (0, 512), (0, 2048), (2048, 128), (4096, 512), (8192, 64)] * 4:
        asked.costs.add(sample(dear, history, tokens))
    after = policy.next_chunk(request, first, 32768 - first, FREE)
    assert after > 2 * before


def test_requests_that_come_make_the_next_chunks_bigger() -> None:
    policy = PlannedChunks(context(model(4)))
    first = policy.next_chunk(ChunkRequest(1, 32768), 0, 32768, FREE)
    alone = policy.next_chunk(ChunkRequest(1, 32768), first, 32768 - first, FREE)
    queued = policy.next_chunk(ChunkRequest(1, 32768, queued=16, queued_tokens=500_000), first, 32768 - first, FREE)
    assert queued > 1.5 * alone


def test_a_budget_cuts_a_chunk_to_pages_and_the_rest_is_planned_again() -> None:
    policy = PlannedChunks(context(model(2), page_size=16))
    chunk = policy.next_chunk(ChunkRequest(1, 8000), 0, 8000, 300)
    assert chunk == 288
    assert policy.next_chunk(ChunkRequest(1, 8000), 288, 8000 - 288, FREE) % 64 == 0


def test_short_prompts_share_a_step_up_to_a_planned_chunk() -> None:
    policy = PlannedChunks(context(model(2)))
    waiting, packed = 40, 0
    for rid in range(waiting):
        left = waiting - 1 - rid
        request = ChunkRequest(rid + 1, 100, queued=left, queued_tokens=100 * left, step_tokens=packed)
        chunk = policy.next_chunk(request, 0, 100, FREE)
        if not chunk:
            break
        assert chunk == 100
        packed += chunk
    alike = StageCost(c=STAGE.c, gamma=0.0, b=STAGE.b, a=STAGE.a / waiting)  # as one prompt, what they cost together
    whole = best(CostModel((alike,) * 2), 4000)[0]
    assert whole - 100 < packed <= whole


def test_prompts_that_wait_take_as_long_as_the_slowest_stage_computes_them() -> None:
    """Behind steps that keep a full window waiting a second prompt seems to take less, the more so in small chunks."""
    costs = model(speeds=[1.4] + [1.0] * 7)
    ahead = [costs.times(6784 - 512 * steps, 384) for steps in range(8, 0, -1)]
    chunks = best_chunks(costs, 6784, 1408, window=10, align=64, largest=FREE, queued=25, ahead=ahead)
    assert len(chunks) <= 4


def test_a_step_with_two_prompts_takes_no_longer_than_others() -> None:
    """All wait for the longest step: behind a prompt's end there is no room for a long one's first chunk."""

    def second(end: int, length: int) -> int:
        policy = PlannedChunks(context(model(8)))
        first = ChunkRequest(1, 8192, queued=7, queued_tokens=length + 6 * 8192)
        assert policy.next_chunk(first, 8192 - end, end, FREE) == end
        behind = ChunkRequest(2, length, queued=6, queued_tokens=6 * 8192, step_tokens=end)
        return policy.next_chunk(behind, 0, length, FREE)

    assert second(64, 8192) == second(256, 8192) == 0
    assert second(64, 200) == 200
    assert second(256, 200) == 0


def test_the_end_of_a_prompt_with_others_behind_it_is_not_cut_finer() -> None:
    """They keep the pipeline full: only the last one's end is waited for."""
    policy = PlannedChunks(context(model(8)))
    times = []
    for done in (0, 2048, 4096, 6144):
        request = ChunkRequest(1 + done, 8192, queued=7, queued_tokens=7 * 8192)
        times.append(STAGE.time(done, policy.next_chunk(request, done, 8192 - done, FREE)))
    assert min(times) > 0.7 * max(times)


def test_a_long_prompts_chunks_keep_the_step_to_themselves() -> None:
    policy = PlannedChunks(context(model(2)))
    first = policy.next_chunk(ChunkRequest(1, 8000, queued=1, queued_tokens=50), 0, 8000, FREE)
    assert policy.next_chunk(ChunkRequest(2, 50, queued=1, queued_tokens=7000, step_tokens=first), 0, 50, FREE) == 0


def test_the_same_events_give_the_same_plan() -> None:
    def life() -> list[int]:
        asked = context(CostModel(model(3).stages, in_seconds=False))
        policy, chunks, done = PlannedChunks(asked), [], 0
        while done < 12000:
            chunks.append(policy.next_chunk(ChunkRequest(1, 12000, queued=done // 5000), done, 12000 - done, FREE))
            asked.costs.add(sample(model(speeds=[1.0, 1.3, 0.8]), done, chunks[-1], factor=1 + done % 7 / 50))
            done += chunks[-1]
        return chunks

    first = life()
    assert first == life()
    assert sum(first) == 12000


def test_planning_a_million_tokens_does_not_hold_the_loop_up() -> None:
    costs = model(8)
    began = time.thread_time()
    chunks = best(costs, 1 << 20, largest=8192)
    assert sum(chunks) == 1 << 20
    assert time.thread_time() - began < 0.25  # typically a fifth of it


def test_requests_that_end_in_the_middle_are_forgotten() -> None:
    policy = PlannedChunks(context(model(2)))
    for rid in range(1, 300):
        policy.next_chunk(ChunkRequest(rid, 1000), 0, 1000, FREE)
    assert len(policy._plans) <= 256
