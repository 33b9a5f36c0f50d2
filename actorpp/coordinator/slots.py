"""Slots: the micro-batches over which decode requests are spread, so that some are computed while others are sampled.

A request decodes in the slot that it has, one slot's requests in one step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping

from actorpp.coordinator.request import Request


class DecodeSlots:
    """Whose turn it is, and who goes where.

    Args:
        count: Number of slots.
        running: The scheduler's admitted requests, by rid: read at each call.
    """

    def __init__(self, count: int, running: Mapping[int, Request]) -> None:
        self._running = running
        self._turns = deque(range(count))  # least recently served first

    def take_turn(self, ready: Container[int]) -> int:
        """The slot for the next step: of those that are ready the least recently served, and of all if none is."""
        slot = next((slot for slot in self._turns if slot in ready), self._turns[0])
        self._turns.remove(slot)
        self._turns.append(slot)
        return slot

    def emptiest(self) -> int:
        """The first slot with the fewest requests."""
        loads = self._loads()
        return loads.index(min(loads))

    def balance(self) -> None:
        """Keep the slots' requests within one of each other, after one request has left its slot."""
        loads = self._loads()
        fullest, emptiest = loads.index(max(loads)), loads.index(min(loads))
        if loads[fullest] - loads[emptiest] > 1:
            next(request for request in self._running.values() if request.slot == fullest).slot = emptiest

    def _loads(self) -> list[int]:
        loads = [0] * len(self._turns)
        for request in self._running.values():
            if request.slot is not None:
                loads[request.slot] += 1
        return loads
