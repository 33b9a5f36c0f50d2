"""A trace as Chrome trace JSON, which chrome://tracing and Perfetto open; there and back.

A process for each stage with a track for each kind of span (and lane), and one for the driver with each request as an
asynchronous slice. Every slice of a step says which chunk or token of which request it is for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from actorpp.analysis.steps import chunk_numbers
from actorpp.analysis.trace import Trace, TracedRequest
from actorpp.errors import ConfigError
from actorpp.stages.messages import Segment, Span

_TRACKS = ("compute", "wait", "sample", "receive", "send")
_LANES = 16
_FIRST = 1  # of processes and tracks: Perfetto takes number 0 for the kernel's idle task
_KEY = "actorpp"  # of what only we read: Perfetto leaves it alone


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """The object to be written as JSON. Times are in microseconds from the first span."""
    stamps = [span.start for spans in trace.stages for span in spans] + [r.submitted for r in trace.requests]
    origin = min(stamps, default=0.0)
    events: list[dict[str, Any]] = []
    for stage, spans in enumerate(trace.stages):
        pid = _FIRST + stage
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"stage {stage}"}})
        for kind, lane in sorted({(span.kind, span.lane) for span in spans}):
            name = kind if lane == 0 else f"{kind} {lane}"
            track = _track(kind, lane)
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": track, "args": {"name": name}})
        work = _work(spans)
        for span in spans:
            of_step = work.get((span.epoch, span.seq), {})
            events.append(
                {
                    "ph": "X",
                    "name": _title(of_step) if span.kind == "compute" else span.kind,
                    "cat": span.kind,
                    "pid": pid,
                    "tid": _track(span.kind, span.lane),
                    "ts": (span.start - origin) * 1e6,
                    "dur": (span.end - span.start) * 1e6,
                    "args": {"epoch": span.epoch, "seq": span.seq, **of_step},
                }
            )
    events += _request_events(trace, origin)
    about = {
        "about": trace.about,
        "dropped": trace.dropped,
        "origin": origin,
        "requests": msgspec.to_builtins(trace.requests),
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", _KEY: about}


def write_trace(trace: Trace, path: Path) -> None:
    """Write it as JSON. Raises ConfigError when the file cannot be written."""
    try:
        path.write_text(json.dumps(chrome_trace(trace)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the trace to {path}: {error.strerror}", param="trace") from None


def read_trace(path: Path) -> Trace:
    """The trace that ``chrome_trace`` made.

    Raises:
        ConfigError: No such file, or it is not one of ours.
    """
    try:
        data = json.loads(path.read_bytes())
        ours, origin = data[_KEY], float(data[_KEY]["origin"])
        stages: list[list[Span]] = []
        for event in data["traceEvents"]:
            if event["ph"] == "M" and event["name"] == "process_name" and event["args"]["name"].startswith("stage "):
                stages.append([])
            if event["ph"] == "X":
                stages[event["pid"] - _FIRST].append(_span(event, origin))
        requests = msgspec.convert(ours["requests"], tuple[TracedRequest, ...])
        return Trace(dict(ours["about"]), tuple(tuple(spans) for spans in stages), requests, int(ours["dropped"]))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", param="trace") from None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a trace of actorpp ({type(error).__name__}: {error})", param="trace") from None


def _track(kind: str, lane: int) -> int:
    return _FIRST + _TRACKS.index(kind) * _LANES + lane


def _work(spans: tuple[Span, ...]) -> dict[tuple[int, int], dict[str, Any]]:
    """What each step was for, by epoch and seq: its tokens and its segments, a chunk with its number in its prompt."""
    steps = sorted(
        (((span.epoch, span.seq), span.segments) for span in spans if span.kind == "compute"), key=lambda step: step[0]
    )
    numbers = chunk_numbers(steps)
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for (epoch, seq), segments in steps:
        entries = []
        for segment in segments:
            entry = {"request": segment.rid, "history": segment.start, "tokens": segment.length}
            if segment.token is None:
                entry["chunk"] = numbers[epoch, seq, segment.rid]
            entries.append(entry)
        found[epoch, seq] = {"tokens": sum(segment.length for segment in segments), "segments": entries}
    return found


def _title(work: dict[str, Any]) -> str:
    """What a compute slice is called: ``r1 chunk 3: 512``, ``r1 chunk 3: 512 + 4 decode``, ``16 decode``."""
    chunks = [s for s in work["segments"] if "chunk" in s]
    decode = len(work["segments"]) - len(chunks)
    parts = [f"r{s['request']} chunk {s['chunk']}: {s['tokens']}" for s in chunks]
    return " + ".join([*parts, *([f"{decode} decode"] if decode else [])])


def _request_events(trace: Trace, origin: float) -> list[dict[str, Any]]:
    """Prefill and decode of each request as asynchronous slices: they may overlap, and get tracks of their own."""
    if not trace.requests:
        return []
    pid = _FIRST + len(trace.stages)
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": "requests"}}]
    for request in trace.requests:
        args = {"request": request.rid, "prompt_tokens": request.prompt_tokens, "output_tokens": request.output_tokens}
        for name, begin, end in (
            ("prefill", request.submitted, request.first_token),
            ("decode", request.first_token, request.ended),
        ):
            if begin is None or end is None:
                continue
            common = {"cat": "request", "name": name, "id": request.rid, "pid": pid, "tid": _FIRST}
            events.append({"ph": "b", **common, "ts": (begin - origin) * 1e6, "args": args})
            events.append({"ph": "e", **common, "ts": (end - origin) * 1e6})
    return events


def _span(event: dict[str, Any], origin: float) -> Span:
    start = origin + event["ts"] / 1e6
    args = event["args"]
    segments = () if event["cat"] != "compute" else tuple(_segment(entry) for entry in args["segments"])
    span = (
        event["cat"],
        args["epoch"],
        args["seq"],
        start,
        start + event["dur"] / 1e6,
        (event["tid"] - _FIRST) % _LANES,
    )
    return msgspec.convert((*span, msgspec.to_builtins(segments)), Span)


def _segment(entry: dict[str, Any]) -> Segment:
    """Which id a decode token takes in is not in the file: -1."""
    token = None if "chunk" in entry else -1
    return Segment(entry["request"], entry["history"], entry["tokens"], token)
