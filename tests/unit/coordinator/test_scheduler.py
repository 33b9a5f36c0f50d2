"""The scheduler as a state machine: windows, slots, budgets, ends; and its invariants under random events."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorpp.coordinator.scheduler import MAX_PROMPT_LOGPROBS
from actorpp.errors import InvalidRequestError, OverloadedError, ProtocolError, RequestError
from actorpp.stages.messages import Admit, FromOutput, Logprobs, Output, Step
from tests.unit.coordinator.support import Pipe, recorder, request, scheduler, some_logprobs, token_at


def test_chunks_of_one_prompt_fill_the_window_without_any_output() -> None:
    s = scheduler(stages=4, depth=1, lookahead=1, chunk=64)
    r = request(1, 640)
    s.submit(r)
    pipe = Pipe(s)
    steps = pipe.pump()
    assert len(steps) == 6  # slots 4 + 1, lookahead 1
    assert [(x.segments[0].start, x.segments[0].length) for x in steps] == [(i * 64, 64) for i in range(6)]
    assert not any(x.segments[0].sample for x in steps)
    pipe.answer()
    assert len(pipe.pump()) == 1  # one credit, one step
    assert recorder(r).computed == [64]


def test_the_whole_life_of_a_request() -> None:
    s = scheduler(stages=2)
    r = request(1, 130, max_tokens=5)
    s.submit(r)
    pipe = Pipe(s)
    pipe.drain()
    assert recorder(r).ids == [token_at(1, 130 + i) for i in range(5)]
    assert recorder(r).end == "length"
    assert recorder(r).computed == [64, 128, 130]
    assert r.chunks == [64, 64, 2]
    assert s.pool.used_pages == 0
    assert not s.running
    seqs = [entry.seq for entry in pipe.log]
    assert seqs == list(range(len(seqs)))


def test_a_stop_id_is_delivered_and_ends_the_request() -> None:
    s = scheduler()
    r = request(1, 10, max_tokens=50, stop=frozenset({token_at(1, 13)}))
    s.submit(r)
    Pipe(s).drain()
    assert recorder(r).ids == [token_at(1, 10 + i) for i in range(4)]
    assert recorder(r).end == "stop"
    assert s.pool.used_pages == 0


@dataclass
class StopAt:
    """Stands for a stop string that the ``count``-th id completes; or for text that cannot be decoded."""

    count: int
    error: RequestError | None = None
    seen: list[int] = field(default_factory=list)

    def reaches_stop(self, token: int) -> bool:
        self.seen.append(token)
        if len(self.seen) == self.count and self.error is not None:
            raise self.error
        return len(self.seen) == self.count


def test_a_stop_string_ends_the_request_and_nothing_after_it_is_delivered() -> None:
    s = scheduler(stages=3, depth=4)
    r = request(1, 10, max_tokens=50)
    r.stop_text = watch = StopAt(4)
    s.submit(r)
    Pipe(s).drain()
    assert recorder(r).ids == watch.seen == [token_at(1, 10 + i) for i in range(4)]
    assert recorder(r).end == "stop"
    assert s.pool.used_pages == 0


def test_a_stop_string_in_the_last_token_goes_before_the_length() -> None:
    s = scheduler()
    r = request(1, 10, max_tokens=4)
    r.stop_text = StopAt(4)
    s.submit(r)
    Pipe(s).drain()
    assert recorder(r).end == "stop"


def test_text_that_cannot_be_decoded_fails_its_request_alone() -> None:
    s = scheduler()
    bad, good = request(1, 10, max_tokens=9), request(2, 10, max_tokens=9)
    bad.stop_text = StopAt(3, RequestError("no text"))
    s.submit(bad)
    s.submit(good)
    Pipe(s).drain()
    assert str(recorder(bad).end) == "no text"
    assert recorder(good).end == "length"
    assert s.pool.used_pages == 0


def test_log_probabilities_are_delivered_as_many_as_asked_for() -> None:
    s = scheduler(stages=2, depth=2)
    both, none = request(1, 130, max_tokens=5, logprobs=2, prompt_logprobs=0), request(2, 130, max_tokens=5)
    s.submit(both)
    s.submit(none)
    Pipe(s).drain()
    assert (recorder(both).rows, recorder(both).prompt_rows) == (5, 129)
    assert (recorder(none).rows, recorder(none).prompt_rows) == (0, 0)


@pytest.mark.parametrize("wrong", [{}, {1: some_logprobs(2)}])
def test_a_wrong_number_of_log_probabilities_ends_the_epoch(wrong: dict[int, Logprobs]) -> None:
    for missing in ("logprobs", "prompt_logprobs"):
        s = scheduler()
        s.submit(request(1, 10, **{missing: 0}))
        pipe = Pipe(s)
        pipe.pump()
        pipe.logprobs = lambda step, kind=missing: {kind: wrong}  # type: ignore[method-assign, misc]
        with pytest.raises(ProtocolError, match="log-probabilities for request 1"):
            pipe.answer()


def test_prompt_log_probabilities_of_one_step_are_bounded() -> None:
    s = scheduler(chunk=4096, batched=16384, pages=3000)
    asking = [request(rid, 2500, prompt_logprobs=20) for rid in (1, 2)]
    other = request(3, 2500)
    for r in (*asking, other):
        s.submit(r)
    pipe = Pipe(s)
    pipe.drain()
    rows = [sum(x.length for x in e.segments if x.rid < 3) for e in pipe.log if isinstance(e, Step)]
    assert max(rows) <= MAX_PROMPT_LOGPROBS + 2  # decode tokens have none
    assert asking[0].chunks == asking[1].chunks == [512, 512, 512, 512, 452]
    assert other.chunks == [2500]
    assert {x.rid for e in pipe.log[:5] if isinstance(e, Step) for x in e.segments} >= {1, 3}  # 2 holds up nobody
    assert all(recorder(r).prompt_rows == 2499 for r in asking)


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_from_output_stands_at_least_num_stages_behind_its_source(depth: int) -> None:
    """So many steps: that requests were admitted in between does not count."""
    s = scheduler(stages=3, depth=depth, running=12)
    for rid in range(30):
        s.submit(request(rid, 20, max_tokens=2 + rid % 12))
    pipe = Pipe(s)
    pipe.drain()
    fed = 0
    steps = [entry for entry in pipe.log if isinstance(entry, Step)]
    number = {step.seq: at for at, step in enumerate(steps)}
    for at, step in enumerate(steps):
        for segment in step.segments:
            if isinstance(segment.token, FromOutput):
                fed += 1
                assert at - number[segment.token.seq] >= 3
                assert segment.token.seq >= step.watermark
    assert (fed > 0) == (depth > 0)


def test_dead_segments_are_at_most_the_depth_and_their_pages_come_back() -> None:
    s = scheduler(stages=2, depth=2, running=8)
    requests = [request(rid, 16, max_tokens=100, stop=frozenset({token_at(rid, 20)})) for rid in range(8)]
    for r in requests:
        s.submit(r)
    pipe = Pipe(s)
    pipe.drain()
    for r in requests:
        assert recorder(r).ids[-1] == token_at(r.rid, 20)
        assert r.sampled - len(r.output_ids) <= 2
    assert s.pool.used_pages == 0


def test_decode_requests_are_spread_over_slots_within_one() -> None:
    s = scheduler(stages=3, depth=1, running=16, chunk=256)
    requests = [request(rid, 8, max_tokens=10 + 3 * rid) for rid in range(16)]
    for r in requests:
        s.submit(r)
    pipe = Pipe(s)
    pipe.pump()
    while pipe.pending:
        pipe.answer()
        loads = [sum(r.slot == slot for r in requests) for slot in range(3)]
        assert max(loads) - min(loads) <= 1, loads
        assert sum(loads) == sum(r.slot is not None for r in requests)
        pipe.pump()


@pytest.mark.parametrize("stages", [1, 2])
def test_requests_that_came_one_after_the_other_decode_together(stages: int) -> None:
    s = scheduler(stages=stages, running=16, chunk=256)
    pipe = Pipe(s)
    for rid in range(16):
        s.submit(request(rid, 8, max_tokens=40))
        pipe.pump()
        if rid % 3 == 2:
            pipe.answer()
    pipe.drain()
    decodes = [e.num_tokens for e in pipe.log if isinstance(e, Step) and e.segments[0].token is not None]
    full = 16 // stages
    assert sum(tokens == full for tokens in decodes) >= 30 * stages
    assert len(decodes) <= 50 * stages


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_decode_steps_are_no_more_than_the_stages_need(stages: int) -> None:
    s = scheduler(stages=stages, depth=3, running=16, chunk=256)
    for rid in range(16):
        s.submit(request(rid, 8, max_tokens=40))
    pipe = Pipe(s)
    pipe.drain()
    decodes = [e.num_tokens for e in pipe.log if isinstance(e, Step) and e.segments[0].token is not None]
    assert decodes == [16 // stages] * (39 * stages)


def test_k_requests_keep_min_k_p_steps_in_flight() -> None:
    for k in (1, 2, 3, 4, 6):
        s = scheduler(stages=4, depth=1, running=8, chunk=512)
        for rid in range(k):
            s.submit(request(rid, 8, max_tokens=1000))
        pipe = Pipe(s)
        pipe.pump()
        for _ in range(40):  # past the prefill, in steady decode
            pipe.answer()
            pipe.pump()
        assert len(pipe.pending) >= min(k, 4)


def test_a_short_request_starts_within_a_few_chunks_of_a_long_one() -> None:
    s = scheduler(stages=4, chunk=64)
    s.submit(request(1, 6400))
    pipe = Pipe(s)
    for _ in range(5):
        pipe.pump()
        pipe.answer()
    s.submit(request(2, 20))
    steps = [step for _ in range(3) for step in (*pipe.pump(), pipe.answer())][:4]
    assert any(segment.rid == 2 for step in steps for segment in step.segments)


def test_the_long_prompt_is_not_starved_by_short_ones() -> None:
    s = scheduler(stages=2, chunk=64, running=4)
    long = request(0, 640)
    s.submit(long)
    pipe = Pipe(s)
    for rid in range(1, 200):
        s.submit(request(rid, 64, max_tokens=1))
        pipe.pump()
        if pipe.pending:
            pipe.answer()
        if long.computed == 640:
            break
    assert long.computed == 640
    assert rid < 100


def test_chunks_stay_aligned_when_decode_takes_budget() -> None:
    s = scheduler(stages=2, chunk=64, batched=64, running=8)
    for rid in range(7):
        s.submit(request(rid, 8, max_tokens=200))
    pipe = Pipe(s)
    for _ in range(20):
        pipe.pump()
        pipe.answer()
    long = request(99, 1000)
    s.submit(long)
    while long.remaining:
        pipe.pump()
        pipe.answer()
    assert all(chunk % 16 == 0 for chunk in long.chunks[:-1]), long.chunks
    assert min(long.chunks[:-1]) >= 32


def test_the_token_budget_holds() -> None:
    s = scheduler(chunk=64, batched=100, running=10)
    for rid in range(10):
        s.submit(request(rid, 30 + 17 * rid, max_tokens=9))
    pipe = Pipe(s)
    pipe.drain()
    assert max(e.num_tokens for e in pipe.log if isinstance(e, Step)) <= 100


def test_what_can_never_fit_is_refused_and_what_does_not_fit_now_waits() -> None:
    s = scheduler(pages=10, page_size=16)
    with pytest.raises(InvalidRequestError, match=r"needs 176 KV tokens.*holds 160"):
        s.submit(request(1, 160, max_tokens=4))
    first, second = request(2, 100), request(3, 100)
    s.submit(first)
    s.submit(second)
    pipe = Pipe(s)
    pipe.pump()
    assert [e.rid for e in pipe.log if isinstance(e, Admit)] == [2]
    pipe.drain()
    assert recorder(first).end == recorder(second).end == "length"


def test_lower_priorities_are_admitted_first_and_equal_ones_in_order_of_arrival() -> None:
    s = scheduler(running=1)
    pipe = Pipe(s)
    for rid, priority in enumerate([0, 5, 0, -1, 5, -1, 0]):
        r = request(rid, 10, max_tokens=2)
        r.priority = priority
        s.submit(r)
        if rid == 0:
            pipe.pump()  # it runs, and the others wait
    pipe.drain()
    assert [e.rid for e in pipe.log if isinstance(e, Admit)] == [0, 3, 5, 2, 6, 1, 4]


def test_urgent_requests_neither_put_back_nor_starve_a_running_one() -> None:
    s = scheduler(stages=2, chunk=64, running=3)
    long = request(0, 640, max_tokens=20)
    long.priority = 100
    s.submit(long)
    pipe = Pipe(s)
    pipe.pump()
    for rid in range(1, 400):
        r = request(rid, 64, max_tokens=2)
        r.priority = -100
        s.submit(r)
        pipe.pump()
        pipe.answer()
        if recorder(long).end is not None:
            break
    assert recorder(long).end == "length"
    assert rid < 150


def test_a_large_request_at_the_head_is_not_passed_by_small_ones() -> None:
    s = scheduler(pages=20, page_size=16, depth=0)
    small, large = request(1, 100), request(2, 300)
    s.submit(small)
    s.submit(large)
    pipe = Pipe(s)
    pipe.pump()
    later = [request(rid, 10) for rid in range(3, 8)]
    for r in later:
        s.submit(r)
    pipe.drain()
    assert [e.rid for e in pipe.log if isinstance(e, Admit)] == [1, 2, 3, 4, 5, 6, 7]


def test_the_queue_is_bounded() -> None:
    s = scheduler(running=1, queued=2)
    pipe = Pipe(s)
    for rid in range(3):
        s.submit(request(rid, 10))
        pipe.pump()
    with pytest.raises(OverloadedError):
        s.submit(request(9, 10))
    pipe.drain()


def test_abort_in_every_phase_ends_once_and_frees_pages() -> None:
    s = scheduler(stages=4, running=2)
    pipe = Pipe(s)
    waiting, prefill, decode = request(3, 10), request(2, 1000), request(1, 10, max_tokens=100)
    s.submit(decode)
    s.submit(prefill)
    s.submit(waiting)
    for _ in range(4):
        pipe.pump()
        pipe.answer()
    assert recorder(decode).ids
    assert recorder(prefill).computed
    for r in (waiting, prefill, decode):
        s.abort(r)
        s.abort(r)
        assert recorder(r).end == "abort"
    assert s.pool.used_pages > 0  # their steps are still on the way
    pipe.drain()
    assert s.pool.used_pages == 0


def test_abort_all_with_every_slot_full() -> None:
    s = scheduler(stages=4, depth=1, running=5)
    requests = [request(rid, 8, max_tokens=1000) for rid in range(5)]
    for r in requests:
        s.submit(r)
    pipe = Pipe(s)
    for _ in range(30):
        pipe.pump()
        pipe.answer()
    for r in requests:
        s.abort(r)
    pipe.drain()
    assert all(recorder(r).end == "abort" for r in requests)
    assert s.pool.used_pages == 0


def test_one_requests_error_is_its_own() -> None:
    s = scheduler(chunk=256)
    good, bad = request(1, 10), request(2, 10)
    s.submit(good)
    s.submit(bad)
    pipe = Pipe(s)
    (step,) = pipe.pump()
    pipe.pending.clear()
    s.on_output(Output(epoch=1, seq=step.seq, ids=(5, 0), errors={2: "logits are not finite"}))
    pipe.drain()
    assert recorder(good).end == "length"
    assert isinstance(recorder(bad).end, RequestError)
    assert "not finite" in str(recorder(bad).end)
    assert s.pool.used_pages == 0


def test_outputs_out_of_order_or_of_the_wrong_size_end_the_epoch() -> None:
    s = scheduler()
    s.submit(request(1, 200))
    pipe = Pipe(s)
    steps = pipe.pump()
    with pytest.raises(ProtocolError, match="expected"):
        s.on_output(Output(epoch=1, seq=steps[1].seq))
    with pytest.raises(ProtocolError, match="epoch 7"):
        s.on_output(Output(epoch=7, seq=steps[0].seq))
    with pytest.raises(ProtocolError, match="1 ids for 0"):
        s.on_output(Output(epoch=1, seq=steps[0].seq, ids=(3,)))


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    stages=st.integers(1, 5),
    depth=st.integers(0, 4),
    lookahead=st.integers(1, 3),
    chunk=st.sampled_from([1, 16, 64, 100]),
    pages=st.integers(8, 60),
)
def test_random_events_keep_the_invariants(
    data: st.DataObject, stages: int, depth: int, lookahead: int, chunk: int, pages: int
) -> None:
    s = scheduler(stages=stages, depth=depth, lookahead=lookahead, chunk=chunk, pages=pages, running=4, queued=3)
    pipe = Pipe(s)
    accepted, rid = [], 0
    for _ in range(data.draw(st.integers(1, 60))):
        match data.draw(st.sampled_from(["submit", "answer", "answer", "pump", "abort"])):
            case "submit":
                rid += 1
                prompt_len = data.draw(st.integers(1, 300))
                stop = frozenset({token_at(rid, prompt_len + data.draw(st.integers(0, 9)))})
                r = request(rid, prompt_len, max_tokens=data.draw(st.integers(1, 8)), stop=stop)
                try:
                    s.submit(r)
                except (InvalidRequestError, OverloadedError):
                    continue
                accepted.append(r)
            case "answer" if pipe.pending:
                pipe.answer()
            case "abort" if accepted:
                s.abort(data.draw(st.sampled_from(accepted)))
            case _:
                pipe.pump()
        assert len(s.in_flight) <= s.config.window
        owned = [page for r in s.running.values() for page in r.pages]
        assert len(owned) == len(set(owned)) == s.pool.used_pages
    pipe.drain()
    assert s.pool.used_pages == 0
    assert not s.running
    assert not s.waiting
    for r in accepted:
        out = recorder(r)
        assert out.end in ("stop", "length", "abort")
        assert out.ids == [token_at(r.rid, r.prompt_len + i) for i in range(len(out.ids))]
        if out.end != "abort":
            assert sum(r.chunks) == r.prompt_len == out.computed[-1]
        assert r.sampled - len(r.output_ids) <= depth or out.end == "abort"
    retired = [rid for e in pipe.log if isinstance(e, Step) for rid in e.retire]
    assert len(retired) == len(set(retired))


def test_an_abort_that_overtakes_its_request_ends_it_once() -> None:
    s = scheduler()
    r = request(1, 10)
    s.abort(r)
    assert recorder(r).end == "abort"
    s.fail(r, RequestError("late"))
    assert s.requests() == []
    assert s.pool.used_pages == 0
