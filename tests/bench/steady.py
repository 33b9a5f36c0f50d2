"""Measuring only while the machine is as fast as usual: a virtual machine's host gives it more speed now and less then,
for seconds or minutes. What decides is a control, before and after; never the measurement itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

MAX_DRIFT = 0.05
LOOKS = 4  # at once: what is usual is the quickest quarter of all looks
PAUSE_S = 2.0

Result = TypeVar("Result")


class Steady:
    """Runs measurements between two controls, and again when a control was slow, as long as there is patience.

    Args:
        control: Does a fixed amount of work and returns its seconds.
        patience_s: For waiting and for repeated measurements, in all. When it is used up, everything counts.

    ``look`` comes first, several times: what is usual comes from it, and from every control after it, so that a machine
    that was looked at in bad times only is not taken for a slow one.

    Attributes:
        control_s: The controls of the measurements that count.
        repeated: Measurements that did not.
    """

    def __init__(self, control: Callable[[], float], patience_s: float) -> None:
        self._control = control
        self._patience_s = patience_s
        self._seen_s: list[float] = []
        self.control_s: list[float] = []
        self.repeated = 0

    def look(self) -> None:
        """See how fast the machine is, in good times and bad ones."""
        for _ in range(LOOKS):
            self._timed()

    def run(self, measurement: Callable[[], Result]) -> Result:
        """The result of the first time that counts."""
        while True:
            before = self._wait()
            begin = time.perf_counter()
            result = measurement()
            after = self._timed()
            if self._is_usual(after) or self._patience_s <= 0:
                self.control_s += [before, after]
                return result
            self.repeated += 1
            self._patience_s -= time.perf_counter() - begin

    @property
    def drift(self) -> float:
        """How much longer than the median the slowest control took."""
        return max(self.control_s) / statistics.median(self.control_s) - 1

    def __str__(self) -> str:
        if not self.control_s and not self._seen_s:
            return "control: not run"
        if not self.control_s:
            return f"control: usually {self._usual_s:.3f} s"
        verdict = "steady enough" if self.drift <= MAX_DRIFT else "VOID: the machine was not the same all the time"
        found = f"control: median {statistics.median(self.control_s):.3f} s, slowest {100 * self.drift:+.1f}%"
        return f"{found}, {self.repeated} measurements repeated: {verdict}"

    @property
    def _usual_s(self) -> float:
        """Never more than the median of what counts, so that what is accepted keeps within the drift allowed."""
        quickest = statistics.quantiles(self._seen_s, n=4)[0]
        return min(quickest, statistics.median(self.control_s)) if self.control_s else quickest

    def _wait(self) -> float:
        """Until a control takes the usual time; its seconds."""
        while not self._is_usual(seconds := self._timed()) and self._patience_s > 0:
            time.sleep(PAUSE_S)
            self._patience_s -= PAUSE_S + seconds
        return seconds

    def _timed(self) -> float:
        self._seen_s.append(self._control())
        return self._seen_s[-1]

    def _is_usual(self, seconds: float) -> bool:
        return seconds <= (1 + MAX_DRIFT) * self._usual_s
