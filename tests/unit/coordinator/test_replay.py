"""The scheduler after the loss of an epoch: what is replayed, in which order, and what clients see of it: nothing."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from actorpp.coordinator.request import Request
from actorpp.errors import OverloadedError, RequestError
from actorpp.stages.messages import Admit, Logprobs
from tests.unit.coordinator.support import Pipe, Recorder, recorder, request, scheduler, token_at


def admits(pipe: Pipe, epoch: int) -> list[Admit]:
    return [entry for entry in pipe.log if isinstance(entry, Admit) and entry.epoch == epoch]


def expected(request: Request) -> list[int]:
    return [token_at(request.rid, request.prompt_len + index) for index in range(request.max_tokens)]


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("answered", range(0, 30, 3))
def test_a_replay_at_any_point_delivers_each_token_once(depth: int, answered: int) -> None:
    s = scheduler(stages=2, depth=depth, chunk=32)
    pipe = Pipe(s)
    requests = [request(1, 100, 6), request(2, 3, 6), request(3, 40, 1)]
    for r in requests:
        s.submit(r)
    pipe.pump()
    for _ in range(answered):
        if pipe.pending:
            pipe.answer()
            pipe.pump()
    before = {r.rid: list(r.output_ids) for r in s.running.values() if r in s.requests()}
    pipe.restart()
    assert s.pool.used_pages == 0
    assert not s.in_flight
    pipe.drain()
    for r in requests:
        assert recorder(r).ids == expected(r)
        assert recorder(r).end == "length"
    for admit in admits(pipe, 2):
        if admit.rid in before:
            assert admit.prompt_len == requests[admit.rid - 1].prompt_len
            assert list(array("i", admit.tokens or b"")) == [0] * admit.prompt_len + before[admit.rid]
    assert [entry.seq for entry in pipe.log if entry.epoch == 2] == list(range(s.next_seq))
    assert s.pool.used_pages == 0
    assert s.generated_tokens == 13
    assert s.prompt_tokens == 143


def test_what_ran_goes_before_what_waited_and_before_what_is_more_urgent() -> None:
    s = scheduler(running=2)
    pipe = Pipe(s)
    ran = [request(1, 50, 4), request(2, 50, 4)]
    ran[0].priority = 5
    waited = request(3, 50, 4)
    for r in ran:
        s.submit(r)
        pipe.pump()
    s.submit(waited)
    pipe.restart()
    urgent = request(4, 50, 4)
    urgent.priority = -1
    s.submit(urgent)
    assert [r.rid for r in s.waiting] == [1, 2, 4, 3]
    pipe.drain()
    assert [admit.rid for admit in admits(pipe, 2)] == [1, 2, 4, 3]


def test_requests_to_replay_take_no_place_in_the_queue() -> None:
    s = scheduler(running=2, queued=1)
    pipe = Pipe(s)
    for rid in (1, 2):
        s.submit(request(rid, 50))
    pipe.pump()
    pipe.restart()
    s.submit(request(3, 50))
    with pytest.raises(OverloadedError):
        s.submit(request(4, 50))


def test_an_ended_request_with_segments_in_flight_is_not_replayed() -> None:
    s = scheduler()
    pipe = Pipe(s)
    r, aborted = request(1, 200, 8), request(2, 200, 8)
    s.submit(r)
    s.submit(aborted)
    pipe.pump()
    s.abort(aborted)
    assert aborted.in_flight
    pipe.restart()
    assert s.requests() == [r]
    pipe.drain()
    assert [admit.rid for admit in admits(pipe, 2)] == [1]
    assert recorder(aborted).end == "abort"
    assert recorder(aborted).ids == []


@pytest.mark.parametrize("how", ["abort", "fail"])
def test_a_request_that_waits_for_its_replay_can_end(how: str) -> None:
    s = scheduler()
    pipe = Pipe(s)
    r = request(1, 200, 8)
    s.submit(r)
    pipe.pump()
    pipe.answer()
    pipe.restart()
    if how == "abort":
        s.abort(r)
    else:
        s.fail(r, RequestError("late"))
    pipe.drain()
    assert admits(pipe, 2) == []
    assert s.pool.used_pages == 0


class Rows(Recorder):
    """Keeps the ids of the prompt's log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.first_ids: list[int] = []

    def prompt_logprobs(self, logprobs: Logprobs) -> None:
        super().prompt_logprobs(logprobs)
        self.first_ids += list(array("i", logprobs.ids))[:: 1 + logprobs.top]
        assert len(logprobs.values) == len(logprobs.ids) == 4 * (1 + logprobs.top) * logprobs.rows


class Positions(Pipe):
    """Answers with log-probabilities that name their position."""

    def logprobs(self, step: Any) -> dict[str, dict[int, Logprobs]]:
        answers = super().logprobs(step)
        for segment in step.segments:
            if segment.rid in answers["prompt_logprobs"]:
                rows = segment.prompt_logprob_rows(self.scheduler.running[segment.rid].prompt_len)
                ids = array("i", [number for position in rows for number in (position, -1)]).tobytes()
                ranks = array("i", [1] * len(rows)).tobytes()
                answers["prompt_logprobs"][segment.rid] = Logprobs(top=1, ids=ids, values=ids, ranks=ranks)
        return answers


@pytest.mark.parametrize("answered", range(9))
def test_log_probabilities_are_delivered_once(answered: int) -> None:
    s = scheduler(chunk=32)
    pipe = Positions(s)
    r = request(1, 100, 6, prompt_logprobs=1, logprobs=0)
    r.sink = Rows()
    s.submit(r)
    pipe.pump()
    for _ in range(answered):
        if pipe.pending:
            pipe.answer()
            pipe.pump()
    pipe.restart()
    s.policy = type(s.policy)(48)  # other cuts than before
    pipe.drain()
    assert r.sink.first_ids == list(range(99))
    assert r.sink.rows == 6
    assert r.sink.ids == expected(r)


def test_progress_begins_again_before_the_first_token_and_not_after_it() -> None:
    s = scheduler(chunk=32, depth=0)
    pipe = Pipe(s)
    r = request(1, 100, 6)
    s.submit(r)
    pipe.pump()
    pipe.answer()
    pipe.restart()
    pipe.pump()
    while len(r.output_ids) < 2:
        pipe.answer()
        pipe.pump()
    pipe.restart()
    pipe.drain()
    assert recorder(r).computed == [32, 32, 64, 96, 100]
    assert sum(r.chunks) == 102  # the second replay's


def test_the_last_replay_counts_and_stops_still_end_it() -> None:
    s = scheduler()
    pipe = Pipe(s)
    r = request(1, 10, 8, stop=frozenset({token_at(1, 14)}))
    s.submit(r)
    while len(r.output_ids) < 3:
        pipe.pump()
        pipe.answer()
    pipe.restart()
    pipe.restart()
    pipe.drain()
    assert recorder(r).ids == expected(r)[:5]
    assert recorder(r).end == "stop"
    assert s.replays == 1  # the second time it only waited
