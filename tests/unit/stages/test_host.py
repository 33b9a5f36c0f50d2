"""StageHost: the log's rules, failures that stay with their request, capacity, sampling over stages and replays."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from actorpp.errors import ConfigError, ProtocolError
from actorpp.stages.host import StageHost
from actorpp.stages.messages import Admit, FromOutput, Output, SamplingParams, Segment, Step
from actorpp.stages.spec import StageSpec
from tests.exactness.chain import Chain

IDS = [(7 * n + n * n) % 320 for n in range(60)]


def test_facts_follow_from_the_own_layers(untied: Path) -> None:
    chain = Chain(untied, 2, page_size=16)
    first, last = chain.hosts
    assert (first.is_first, first.is_last, last.is_first, last.is_last) == (True, False, False, True)
    per_layer = 16 * 2 * 2 * 16 * 4  # page tokens, keys and values, heads, width, bytes
    assert [host.kv_bytes_per_page for host in chain.hosts] == [2 * per_layer, 3 * per_layer]
    assert (first.hidden_size, first.dtype) == (64, torch.float32)


def test_capacity_in_pages(untied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From tokens asked for; from free memory over bytes per page; never more than requests of full length need."""
    host = Chain(untied, 2, page_size=16, context_length=100, max_running_requests=3).hosts[0]
    assert host.max_pages(kv_tokens=1000) == 62
    assert host.max_pages() == 7 * 3
    room = 5 * host.kv_bytes_per_page + 1
    monkeypatch.setattr("actorpp.stages.host.kv_bytes_available", lambda device, fraction, colocated: room)
    assert host.max_pages() == 5
    room = 3
    with pytest.raises(ConfigError, match="no room for one KV page"):
        host.max_pages()
    with pytest.raises(ConfigError, match="no room for one KV page of 16 tokens"):
        host.max_pages(kv_tokens=15)


def test_hidden_states_go_on_and_ids_come_out(untied: Path) -> None:
    chain = Chain(untied, 2, page_size=16)
    chain.admit(1, IDS, range(8))
    first, last = chain.hosts
    step = Step(0, 2, 0, (Segment(1, 0, 60, None, True),))
    passed = first.launch(step, None, {})
    assert passed.hidden is not None
    assert (passed.hidden.shape, passed.hidden.is_contiguous(), passed.start <= passed.end) == ((60, 64), True, True)
    assert first.fetch(passed) == ((), {})
    done = last.launch(step, passed.hidden, {})
    assert done.hidden is None
    ids, errors = last.fetch(done)
    assert (len(ids), errors) == (1, {})


def test_a_step_that_hangs_can_be_seen_from_another_thread(untied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(untied, 1, page_size=16)
    chain.admit(1, IDS, range(8))
    host, reached, going = chain.hosts[0], threading.Event(), threading.Event()

    def hang(*args: Any) -> None:
        reached.set()
        going.wait(60)
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("actorpp.stages.host.compute_in_memory", hang)
    assert host.computing_s == 0
    with ThreadPoolExecutor(1) as thread:
        launched = thread.submit(host.launch, Step(0, 2, 0, (Segment(1, 0, 60, None, True),)), None, {})
        assert reached.wait(60)
        first = host.computing_s
        assert 0 < first < host.computing_s
        going.set()
        with pytest.raises(ZeroDivisionError):
            launched.result()
    assert host.computing_s == 0


def test_step_without_sampling_gives_no_ids(untied: Path) -> None:
    chain = Chain(untied, 1, page_size=16)
    chain.admit(1, IDS, range(8))
    assert chain.step(Segment(1, 0, 30)).ids == ()


def test_request_with_broken_logits_fails_alone(untied: Path) -> None:
    chain = Chain(untied, 2, page_size=16)
    with torch.no_grad():
        chain.hosts[0].model.model.embed_tokens.weight[5] = torch.nan
    chain.admit(1, IDS[:20], range(2))
    chain.admit(2, [5, *IDS[:9]], range(2, 4))
    chain.admit(3, IDS[:20], range(4, 6))
    output = chain.step(*(Segment(rid, 0, length, None, True) for rid, length in ((1, 20), (2, 10), (3, 20))))
    assert set(output.errors) == {2}
    assert "not finite" in output.errors[2]
    assert output.ids[0] == output.ids[2]


@pytest.mark.parametrize("stage", [0, 1])
def test_request_whose_chunk_does_not_fit_in_memory_fails_alone(
    untied: Path, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever stage runs out: the others' tokens are those of a step without it, and it stays failed."""
    chain = Chain(untied, 2, page_size=16)
    host = chain.hosts[stage]
    whole, most = host.forward, 25

    def forward(ids: Any, hidden: Any, positions: torch.Tensor, cache: Any, rows: Any) -> torch.Tensor:
        if positions.shape[1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(ids, hidden, positions, cache, rows)

    lengths = {1: 20, 2: 40, 3: 9}
    for rid, length in lengths.items():
        chain.admit(rid, IDS[:length], range(4 * rid, 4 * rid + 4))
    step = [Segment(rid, 0, length, None, rid != 2) for rid, length in lengths.items()]
    expected = chain.step(step[0], step[2]).ids
    for one in chain.hosts:
        one.reset()
    for rid, length in lengths.items():
        chain.admit(rid, IDS[:length], range(4 * rid, 4 * rid + 4), SamplingParams(logprobs=1, prompt_logprobs=0))
    monkeypatch.setattr(host, "forward", forward)
    output = chain.step(*step)
    assert output.ids == expected
    assert not {1, 3} & output.errors.keys()
    assert len(output.prompt_logprobs[1].ids) == 4 * 19
    monkeypatch.undo()
    after = chain.step(*(Segment(rid, lengths[rid], 1, 7, True) for rid in lengths))
    assert after.errors.keys() == {2}
    assert ("no memory for 40 tokens" if stage else "not finite") in after.errors[2]


def test_ids_outside_the_vocabulary_fail_alone(untied: Path) -> None:
    chain = Chain(untied, 2, page_size=16)
    chain.admit(1, IDS[:20], range(2))
    chain.admit(2, [320, -1], range(2, 4))
    output = chain.step(Segment(1, 0, 20, None, True), Segment(2, 0, 2, None, True))
    assert output.errors == {2: "token ids must lie in 0-319"}


def test_steps_that_do_not_follow_are_protocol_errors(untied: Path) -> None:
    chain = Chain(untied, 1, page_size=16, num_pages=8)
    chain.admit(1, IDS, range(3))
    with pytest.raises(ProtocolError, match="admitted twice"):
        chain.admit(1, IDS, range(3))
    with pytest.raises(ProtocolError, match="pages outside 0-7"):
        chain.admit(2, IDS, [7, 8])
    for segment in (Segment(9, 0, 1), Segment(1, 4, 2)):
        with pytest.raises(ProtocolError, match=f"continues request {segment.rid} where it is not"):
            chain.step(segment)
    with pytest.raises(ProtocolError, match="do not fit in the request's 3 pages"):
        chain.step(Segment(1, 0, 60))
    host = Chain(untied, 1, page_size=16).hosts[0]
    with pytest.raises(ProtocolError, match="hidden states do not fit"):
        host.launch(Step(0, 1, 0, ()), torch.zeros(3, 64), {})


def test_input_that_is_not_there_is_a_protocol_error(untied: Path) -> None:
    for token, words in ((None, "goes past the ids"), (FromOutput(7, 0), "needs output 7")):
        chain = Chain(untied, 1, page_size=16)
        chain.admit(1, IDS[:3], range(3))
        chain.step(Segment(1, 0, 3, None, True))
        with pytest.raises(ProtocolError, match=words):
            chain.step(Segment(1, 3, 1, token, True))


def test_decode_input_may_be_a_literal_or_an_output(untied: Path) -> None:
    tokens = []
    for literal in (True, False):
        chain = Chain(untied, 1, page_size=16)
        chain.admit(1, IDS, range(6))
        first = chain.step(Segment(1, 0, 60, None, True)).ids[0]
        token = first if literal else FromOutput(chain.seq, 0)
        tokens.append(chain.step(Segment(1, 60, 1, token, True)).ids)
    assert tokens[0] == tokens[1]


def test_ids_of_a_mixed_step_lie_in_the_segments_order(untied: Path) -> None:
    chain = Chain(untied, 1, page_size=16)
    for rid in range(3):
        chain.admit(rid, IDS, range(8 * rid, 8 * rid + 8))
    picked = chain.step(Segment(1, 0, 60, None, True), Segment(2, 0, 60, None, True)).ids
    with patch.object(chain.hosts[0], "forward", wraps=chain.hosts[0].forward) as calls:
        chain.step(Segment(1, 60, 1, FromOutput(chain.seq, 0)), Segment(0, 0, 5), Segment(2, 60, 1, 7))
    assert calls.call_args.args[0].tolist() == [[picked[0], *IDS[:5], 7]]


def test_retire_and_reset_forget_requests(untied: Path) -> None:
    chain = Chain(untied, 1, page_size=16)
    for rid in (1, 2, 3):
        chain.admit(rid, IDS, range(8 * rid, 8 * rid + 4))
    host = chain.hosts[0]
    chain.step(Segment(2, 0, 4), retire=[1, 77])
    assert host.num_requests == 2
    host.reset()
    assert host.num_requests == 0
    chain.admit(1, IDS, range(4))


def test_penalty_without_ids_is_a_protocol_error(untied: Path) -> None:
    host = Chain(untied, 1, page_size=16).hosts[0]
    with pytest.raises(ProtocolError, match="no ids came to the last stage"):
        host.admit(Admit(0, 1, 1, 3, SamplingParams(repetition_penalty=1.1), (0,)))
    with pytest.raises(ProtocolError, match="no ids came to the last stage"):
        host.admit(Admit(0, 1, 1, 3, SamplingParams(prompt_logprobs=0), (0,)))


def test_host_that_is_not_loaded_says_so(untied: Path) -> None:
    host = StageHost(StageSpec(stage=0, num_stages=1, lo=0, hi=5, model_path=str(untied)))
    assert host.loaded_bytes == 0
    with pytest.raises(RuntimeError, match="not loaded"):
        host.allocate(1)


def test_load_tells_its_progress(untied: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    host = StageHost(StageSpec(stage=0, num_stages=1, lo=0, hi=5, model_path=str(untied), dtype="float32"))
    host.load(lambda phase, done, total: seen.append((phase, done, total)))
    assert seen[0][0] == seen[-1][0] == "load"
    assert seen[-1][1] == seen[-1][2]


def test_output_ids_outlive_the_step_that_used_them(untied: Path) -> None:
    """The mapping is read during launch alone: dropping an output afterwards changes nothing."""
    chain = Chain(untied, 1, page_size=16)
    chain.admit(1, IDS, range(8))
    chain.step(Segment(1, 0, 60, None, True))
    outputs: dict[int, Output] = {chain.seq: chain.outputs[chain.seq]}
    step = Step(0, chain.seq + 1, 0, (Segment(1, 60, 1, FromOutput(chain.seq, 0), True),))
    launched = chain.hosts[0].launch(step, None, outputs)
    outputs.clear()
    assert len(chain.hosts[0].fetch(launched)[0]) == 1
