"""Spans: what a stage did and when, kept in memory while a trace is asked for. Others make something of them."""

from __future__ import annotations

from actorpp.stages.messages import Span

MAX_SPANS = 200_000  # per stage, a span's segments counted with it; beyond it spans are counted, not kept


class SpanRecorder:
    """Collects the spans of one stage. When off, recording costs one comparison."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._spans: list[Span] = []
        self._room = MAX_SPANS
        self._dropped = 0

    def add(self, span: Span) -> None:
        if not self.enabled:
            return
        size = 1 + len(span.segments)
        if size <= self._room:
            self._room -= size
            self._spans.append(span)
        else:
            self._dropped += 1

    def take(self) -> tuple[tuple[Span, ...], int]:
        """The spans so far and how many did not fit; both are forgotten here."""
        spans, dropped = tuple(self._spans), self._dropped
        self._spans, self._room, self._dropped = [], MAX_SPANS, 0
        return spans, dropped
