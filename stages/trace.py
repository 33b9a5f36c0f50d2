"""Spans: what a stage did and when, kept in memory while a trace is asked for, and written as Chrome trace JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actorpp.stages.messages import Span

MAX_SPANS = 200_000  # per stage; beyond it spans are counted, not kept

_TRACKS = ("compute", "wait", "sample", "receive", "send")


class SpanRecorder:
    """Collects the spans of one stage. When off, recording costs one comparison."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._spans: list[Span] = []
        self._dropped = 0

    def add(self, span: Span) -> None:
        if not self.enabled:
            return
        if len(self._spans) < MAX_SPANS:
            self._spans.append(span)
        else:
            self._dropped += 1

    def take(self) -> tuple[tuple[Span, ...], int]:
        """The spans so far and how many did not fit; both are forgotten here."""
        spans, dropped = tuple(self._spans), self._dropped
        self._spans, self._dropped = [], 0
        return spans, dropped


def chrome_trace(stages: Sequence[Sequence[Span]]) -> dict[str, Any]:
    """The object that chrome://tracing and Perfetto open: a process per stage, a track per kind and lane.

    Times are in microseconds from the first span. Stages on one host share a monotonic clock.
    """
    origin = min((span.start for spans in stages for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for stage, spans in enumerate(stages):
        events.append({"ph": "M", "name": "process_name", "pid": stage, "args": {"name": f"stage {stage}"}})
        for kind, lane in sorted({(span.kind, span.lane) for span in spans}):
            name = kind if lane == 0 else f"{kind} {lane}"
            track = _track(kind, lane)
            events.append({"ph": "M", "name": "thread_name", "pid": stage, "tid": track, "args": {"name": name}})
        events.extend(
            {
                "ph": "X",
                "name": span.kind,
                "cat": span.kind,
                "pid": stage,
                "tid": _track(span.kind, span.lane),
                "ts": (span.start - origin) * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "args": {"seq": span.seq},
            }
            for span in spans
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _track(kind: str, lane: int) -> int:
    return _TRACKS.index(kind) * 16 + lane
