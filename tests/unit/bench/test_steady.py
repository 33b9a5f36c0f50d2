"""What counts in a benchmark is decided by the control, not by what was measured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bench import steady
from tests.bench.steady import MAX_DRIFT, Steady


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(steady.time, "sleep", slept.append)
    return slept


def machine(*seconds: float) -> Iterator[float]:
    """A control that takes these seconds: first those of one look."""
    return iter([1.0] * steady.LOOKS + list(seconds))


def looked(control: Iterator[float], patience_s: float) -> Steady:
    found = Steady(lambda: next(control), patience_s)
    found.look()
    return found


def test_a_slow_machine_is_waited_for_and_what_it_slowed_down_is_measured_again(pauses: list[float]) -> None:
    results = iter("abc")
    measured = looked(machine(1.6, 1.5, 1.0, 1.6, 1.04, 1.02, 1.0, 1.01), 100.0)
    assert measured.run(lambda: next(results)) == "b"  # a: slow behind it
    assert measured.run(lambda: next(results)) == "c"
    assert len(pauses) == 2
    assert measured.control_s == [1.04, 1.02, 1.0, 1.01]
    assert measured.repeated == 1
    assert "steady enough" in str(measured)


def test_without_patience_everything_counts_and_the_call_is_void(pauses: list[float]) -> None:
    measured = looked(machine(1.0, 1.0, 1.0, 1.06), 0.0)
    assert [measured.run(lambda: "a") for _ in range(2)] == ["a", "a"]
    assert not pauses
    assert measured.drift > MAX_DRIFT
    assert "VOID" in str(measured)


def test_what_is_usual_is_the_quickest_quarter_of_all_looks(pauses: list[float]) -> None:
    measured = looked(iter([1.6] * 8 + [1.0] * 4 + [1.6, 1.0, 1.0]), 100.0)
    measured.look()
    measured.look()
    measured.run(lambda: "a")
    assert measured.control_s == [1.0, 1.0]
    assert len(pauses) == 1


def test_a_machine_that_becomes_faster_is_not_measured_at_its_old_speed(pauses: list[float]) -> None:
    results = iter("abc")
    measured = looked(machine(0.9, 0.9, 0.9, 0.97, 0.9, 0.9), 100.0)
    assert measured.run(lambda: next(results)) == "a"
    assert measured.run(lambda: next(results)) == "c"  # b: slow behind it, though as fast as what was usual at first
    assert measured.drift == 0


def test_slow_looks_do_not_widen_what_counts(pauses: list[float]) -> None:
    """The machine was fast at first, and is slow now: what counted stays within the drift allowed."""
    measured = looked(iter([1.0] * 6 + [1.08] * 40 + [1.0] * 4), 1000.0)
    assert measured.run(lambda: "a") == "a"
    assert measured.run(lambda: "b") == "b"
    assert measured.control_s == [1.0] * 4
    assert measured.drift == 0
