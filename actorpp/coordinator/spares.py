"""Warm spares: processes that have imported everything and wait to become any stage. A stage's restart costs less.

How a process is started and spoken to is the ports' business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actorpp.coordinator.ports import ProcessPort


class Spares:
    """Keeps ``count`` spares. Those that end by themselves are replaced at the next ``fill``, not before: what ends
    them may end the next one too.

    Args:
        start: Starts one, given its number and what to call when it is ready.
    """

    def __init__(self, count: int, start: Callable[[int, Callable[[], None]], ProcessPort]) -> None:
        self.started = 0
        self._count = count
        self._start = start
        self._spares: dict[int, ProcessPort] = {}
        self._ready: set[int] = set()

    def fill(self) -> None:
        """Start what is missing."""
        self._forget_ended()
        while len(self._spares) < self._count:
            number = self.started
            self.started += 1
            self._spares[number] = self._start(number, lambda number=number: self._ready.add(number))  # type: ignore[misc]

    def take(self) -> ProcessPort | None:
        """The spare that has been ready for longest, if one is; it is a spare no more."""
        self._forget_ended()
        for number in self._spares:
            if number in self._ready:
                return self._spares.pop(number)
        return None

    def close(self) -> list[ProcessPort]:
        """Those left, to be ended."""
        left, self._spares = list(self._spares.values()), {}
        return left

    def _forget_ended(self) -> None:
        self._spares = {number: port for number, port in self._spares.items() if not port.child.ended}
