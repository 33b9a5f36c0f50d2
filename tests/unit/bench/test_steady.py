"""What counts in a benchmark is decided by the control, not by what was measured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bench import steady
from tests.bench.steady import MAX_DRIFT, Steady


class Machine:
    """Measurements that take a second each, and a control beside them."""

    def __init__(self, *control_s: float) -> None:
        self._of_measurements = iter(control_s)
        self._idle = True
        self.measured = 0

    def seconds(self) -> float:
        """Asked before a measurement, and behind it."""
        self._idle = not self._idle
        return next(self._of_measurements) if self._idle else 99.0

    def measure(self) -> int:
        self.measured += 1
        return self.measured


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(10_000))
    monkeypatch.setattr(steady.time, "perf_counter", lambda: float(next(seconds)))


def warmed(patience_s: float, *control_s: float, looks: int = 4) -> tuple[Steady, Machine]:
    machine = Machine(*control_s)
    found = Steady(machine, patience_s)
    for _ in range(looks):
        found.watch(lambda: None)
    return found, machine


def runs(found: Steady, machine: Machine, count: int) -> Iterator[int]:
    return (found.run(machine.measure) for _ in range(count))


def test_what_a_slow_machine_slowed_down_is_measured_again() -> None:
    found, machine = warmed(100.0, 1.0, 1.0, 1.0, 1.0, 1.6, 1.04, 1.5, 1.5, 1.01)
    assert list(runs(found, machine, 2)) == [2, 5]
    assert found.control_s == [1.04, 1.01]
    assert found.left_out == 3
    assert "steady enough" in str(found)


def test_without_patience_everything_counts_and_the_call_is_void() -> None:
    found, machine = warmed(0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.06)
    assert list(runs(found, machine, 3)) == [1, 2, 3]
    assert found.drift > MAX_DRIFT
    assert "VOID" in str(found)


def test_patience_ends() -> None:
    found, machine = warmed(3.0, 1.0, 1.0, 1.0, 1.0, *[1.6] * 10)
    assert list(runs(found, machine, 1)) == [4]


def test_what_is_usual_is_the_quickest_quarter_of_all_that_was_seen() -> None:
    found, machine = warmed(100.0, *[1.6] * 8, *[1.0] * 4, 1.6, 1.02, looks=12)
    assert list(runs(found, machine, 1)) == [2]
    assert found.control_s == [1.02]


def test_slow_times_do_not_widen_what_counts() -> None:
    """The machine was fast at first, and is slow now: what counted stays within the drift allowed."""
    found, machine = warmed(1000.0, *[1.0] * 6, *[1.08] * 40, 1.0)
    assert list(runs(found, machine, 3)) == [1, 2, 43]
    assert found.drift == 0


def test_a_machine_that_becomes_faster_is_not_measured_at_its_old_speed() -> None:
    found, machine = warmed(100.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.9, 0.97, 0.9)
    assert list(runs(found, machine, 3)) == [1, 2, 4]
    assert found.drift == 0


def test_what_counted_before_the_machine_became_faster_is_measured_again() -> None:
    found, machine = warmed(100.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.9, 0.9, 1.0, 0.91)
    assert list(runs(found, machine, 4)) == [1, 2, 3, 4]
    assert found.outdated() == 0
    assert found.run_again(0, machine.measure) == 6
    assert found.control_s == [0.91, 0.9, 0.9, 0.9]
    assert found.outdated() is None
    assert found.left_out == 2


def test_patience_ends_for_what_is_measured_again_too() -> None:
    found, machine = warmed(2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.9, *[1.0] * 10)
    assert list(runs(found, machine, 3)) == [1, 2, 3]
    assert found.outdated() == 0
    assert found.run_again(0, machine.measure) is None
    assert found.outdated() is None
    assert "VOID" in str(found)
