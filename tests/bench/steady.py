"""Measuring only while the machine is as fast as usual: a virtual machine's host gives it more speed now and less then,
for seconds or minutes. What decides is a control that runs beside; never the measurement itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection
from typing import Protocol, TypeVar

MAX_DRIFT = 0.05

Result = TypeVar("Result")


class Control(Protocol):
    """Does the same small work again and again, all the time."""

    def seconds(self) -> float:
        """What it took in the mean since this was asked last."""
        ...


class Steady:
    """Runs measurements, and again when the machine was slow meanwhile, as long as there is patience.

    Args:
        control: Says how fast the machine was.
        patience_s: For repeated measurements, in all. When it is used up, everything counts.

    What is usual is the quickest quarter of all that the control has said, the warm-up's too, and never more than the
    median of what counts: so what is accepted keeps within the drift that is allowed.

    Attributes:
        control_s: What the control took during the measurements that count.
        left_out: Measurements that did not.
    """

    def __init__(self, control: Control, patience_s: float) -> None:
        self._control = control
        self._patience_s = patience_s
        self._seen_s: list[float] = []
        self.control_s: list[float] = []
        self.left_out = 0

    def watch(self, measurement: Callable[[], Result]) -> Result:
        """Its result, whatever the machine did: a warm-up, from which is learned what is usual."""
        self._control.seconds()
        result = measurement()
        self._seen_s.append(self._control.seconds())
        return result

    def run(self, measurement: Callable[[], Result]) -> Result:
        """The result of the first time that counts."""
        while True:
            begin = time.perf_counter()
            result = self.watch(measurement)
            if self._patience_s <= 0 or self._was_usual(begin):
                self.control_s.append(self._seen_s[-1])
                return result

    def outdated(self) -> int | None:
        """Which measurement no longer counts, as the machine was faster in most of the others; None: no more of them,
        or no patience."""
        return max(self.slow(), key=self.control_s.__getitem__, default=None) if self._patience_s > 0 else None

    def run_again(self, index: int, measurement: Callable[[], Result]) -> Result | None:
        """A result to take the place of this one's; None when patience ends before the machine is as usual."""
        self.left_out += 1
        while self._patience_s > 0:
            begin = time.perf_counter()
            result = self.watch(measurement)
            if self._was_usual(begin):
                self.control_s[index] = self._seen_s[-1]
                return result
        return None

    def slow(self) -> list[int]:
        """Which measurements make the call void: the control took too much longer than in most of the others."""
        most = (1 + MAX_DRIFT) * statistics.median(self.control_s)
        return [index for index, took in enumerate(self.control_s) if took > most]

    def leave_out(self, indices: Collection[int]) -> None:
        """These do not count after all."""
        self.control_s = [took for index, took in enumerate(self.control_s) if index not in indices]
        self.left_out += len(indices)

    def _was_usual(self, begin: float) -> bool:
        """Whether the last measurement counts; if not, the time since its begin took patience."""
        if self._seen_s[-1] <= (1 + MAX_DRIFT) * self._usual_s:
            return True
        self.left_out += 1
        self._patience_s -= time.perf_counter() - begin
        return False

    @property
    def drift(self) -> float:
        """How much longer than the median the control took in the slowest time that counts."""
        return max(self.control_s) / statistics.median(self.control_s) - 1

    def __str__(self) -> str:
        if not self._seen_s and not self.control_s:
            return "control: not run"
        if not self.control_s:
            return f"control: usually {1e3 * self._usual_s:.3f} ms"
        verdict = "steady enough" if self.drift <= MAX_DRIFT else "VOID: the machine was not the same all the time"
        found = f"control: median {1e3 * statistics.median(self.control_s):.3f} ms, slowest {100 * self.drift:+.1f}%"
        return f"{found}, {self.left_out} measurements left out: {verdict}"

    @property
    def _usual_s(self) -> float:
        quickest = statistics.quantiles(self._seen_s, n=4)[0] if len(self._seen_s) > 1 else self._seen_s[0]
        return min(quickest, statistics.median(self.control_s)) if self.control_s else quickest
