"""The trace's file: what Perfetto needs of it, and that it can be read again."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from actorpp.analysis.chrome import chrome_trace, read_trace, write_trace
from actorpp.analysis.steps import traced_steps
from actorpp.errors import ConfigError
from tests.unit.analysis.support import hand_made


def slices(data: dict[str, Any], cat: str) -> list[dict[str, Any]]:
    return [event for event in data["traceEvents"] if event["ph"] == "X" and event["cat"] == cat]


def test_every_slice_says_which_chunk_of_which_request_it_is_for() -> None:
    data = chrome_trace(hand_made())
    computes = [event for event in slices(data, "compute") if event["pid"] == 1]
    assert [event["name"] for event in computes] == ["r1 chunk 0: 4", "r1 chunk 1: 4", "r1 chunk 2: 2", "1 decode"]
    assert computes[2]["args"] == {
        "epoch": 1,
        "seq": 12,
        "tokens": 2,
        "segments": [{"request": 1, "history": 8, "tokens": 2, "chunk": 2}],
    }
    assert computes[3]["args"]["segments"] == [{"request": 1, "history": 10, "tokens": 1}]
    (wait,) = [event for event in slices(data, "wait") if event["args"]["seq"] == 11]
    (send,) = [event for event in slices(data, "send") if event["args"]["seq"] == 11]
    assert wait["args"] == send["args"] == computes[1]["args"]
    assert computes[2]["ts"] == pytest.approx(5.5e6)  # the request came half a second before the first step
    assert computes[2]["dur"] == pytest.approx(1e6)


def test_tracks_are_named_and_no_two_slices_on_one_overlap() -> None:
    events = chrome_trace(hand_made())["traceEvents"]
    names = {(event["pid"], event.get("tid")): event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {
        (1, None): "stage 0", (1, 1): "compute", (1, 65): "send", (1, 66): "send 1",
        (2, None): "stage 1", (2, 1): "compute", (2, 17): "wait", (3, None): "requests",
    }  # fmt: skip
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        spans.sort()
        assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(spans))
    phases = [(event["ph"], event["name"], event["ts"]) for event in events if event["ph"] in "be"]
    assert phases == [
        ("b", "prefill", 0.0), ("e", "prefill", 7.5e6), ("b", "decode", 7.5e6), ("e", "decode", 10.5e6)
    ]  # fmt: skip


def test_a_prompt_that_is_replayed_counts_its_chunks_anew() -> None:
    trace = hand_made()
    both = tuple(
        own + tuple(replace(span, epoch=2, start=span.start + 50, end=span.end + 50) for span in own)
        for own in trace.stages
    )
    computes = [event for event in slices(chrome_trace(replace(trace, stages=both)), "compute") if event["pid"] == 2]
    chunks = [event["args"]["segments"][0].get("chunk") for event in computes]
    assert chunks == [0, 1, 2, None] * 2


def test_a_written_trace_is_read_again(tmp_path: Path) -> None:
    trace = hand_made()
    write_trace(trace, tmp_path / "t.json")
    again = read_trace(tmp_path / "t.json")
    assert (again.about, again.requests, again.dropped) == (trace.about, trace.requests, trace.dropped)
    for step, expected in zip(traced_steps(again.stages), traced_steps(trace.stages), strict=True):
        assert (step.epoch, step.seq) == (expected.epoch, expected.seq)
        assert step.times == pytest.approx(expected.times)
        assert step.starts == pytest.approx(expected.starts)
        assert [replace(chunk, sample=False) for chunk in expected.chunks] == list(step.chunks)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": []}', json.dumps({"actorpp": {"origin": 0}})])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "t.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"t\.json: not a trace"):
        read_trace(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="No such file"):
        write_trace(hand_made(), tmp_path / "none" / "t.json")
