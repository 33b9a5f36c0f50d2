"""The recorder of spans: off, on, and full."""

from __future__ import annotations

import pytest

import actorpp.stages.trace
from actorpp.stages.messages import Segment, Span
from actorpp.stages.trace import SpanRecorder

WAIT = Span("wait", 1, 0, 0.0, 1.0)
COMPUTE = Span("compute", 1, 0, 1.0, 2.0, segments=(Segment(1, 0, 4), Segment(2, 0, 4)))


def test_what_is_recorded_is_handed_over_once() -> None:
    spans = SpanRecorder(enabled=True)
    spans.add(WAIT)
    spans.add(COMPUTE)
    assert spans.take() == ((WAIT, COMPUTE), 0)
    assert spans.take() == ((), 0)
    off = SpanRecorder(enabled=False)
    off.add(WAIT)
    assert off.take() == ((), 0)


def test_a_full_one_counts_what_it_leaves_out_and_has_room_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A span takes room for itself and each of its segments: that bounds the message that carries them."""
    monkeypatch.setattr(actorpp.stages.trace, "MAX_SPANS", 4)
    spans = SpanRecorder(enabled=True)
    for span in (COMPUTE, COMPUTE, WAIT, WAIT):
        spans.add(span)
    assert spans.take() == ((COMPUTE, WAIT), 2)
    spans.add(COMPUTE)
    assert spans.take() == ((COMPUTE,), 0)
