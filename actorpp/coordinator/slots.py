"""Slots: the micro-batches over which decode requests are spread, so that some are computed while others are sampled.

A request decodes in the slot that it has, one slot's requests in one step. A step reads every weight, however few its
rows, so as few slots are used as keep the pipeline full: one for each stage. Where links are so slow that every stage
idles for longer than a step takes, round after round, one more is opened: its step costs nothing there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping, Sequence

from actorpp.coordinator.request import Request
from actorpp.stages.messages import StageTiming

IDLE_ROUNDS = 8
"""Rounds over the slots, one after the other, in which a step more would have fitted, before there is one more."""


class DecodeSlots:
    """Whose turn it is, and who goes where.

    Args:
        stages: Slots that are used from the start.
        count: Slots at most.
        running: The scheduler's admitted requests, by rid: read at each call.
    """

    def __init__(self, stages: int, count: int, running: Mapping[int, Request]) -> None:
        self.used = stages
        self._stages = stages
        self._running = running
        self._turns = deque(range(count))  # least recently served first
        self._round: deque[Sequence[StageTiming]] = deque()  # of decode steps that followed one another
        self._idle_rounds = 0

    def take_turn(self, ready: Container[int]) -> int:
        """The slot for the next step: of those that are ready the least recently served, and of all if none is."""
        slot = next((slot for slot in self._turns if slot in ready), self._turns[0])
        self._turns.remove(slot)
        self._turns.append(slot)
        return slot

    def emptiest(self) -> int:
        """The first slot with the fewest requests."""
        loads = self._loads()
        if not any(loads):
            self.used = self._stages
        return loads.index(min(loads[: self.used]))

    def balance(self) -> None:
        """Keep the slots' requests within one of each other, after some have left or a slot was opened."""
        loads = self._loads()[: self.used]
        while max(loads) - min(loads) > 1:
            fullest, emptiest = loads.index(max(loads)), loads.index(min(loads))
            next(request for request in self._running.values() if request.slot == fullest).slot = emptiest
            loads[fullest] -= 1
            loads[emptiest] += 1

    def measured(self, timings: Sequence[StageTiming], *, decode: bool) -> None:
        """Take in when the stages computed a step, in the order of steps, and whether it only decoded."""
        if not decode or self.used == len(self._turns):
            self._round.clear()
            self._idle_rounds = 0
            return
        self._round.append(timings)
        if len(self._round) <= self.used:
            return
        idles = all(
            of_stage[-1].end - of_stage[0].end - sum(t.end - t.start for t in of_stage[1:])
            > max(t.end - t.start for t in of_stage)
            for of_stage in zip(*self._round, strict=True)
        )
        self._round = deque([timings])
        self._idle_rounds = self._idle_rounds + 1 if idles else 0
        if self._idle_rounds == IDLE_ROUNDS and sum(self._loads()) > self.used:
            self.used += 1
            self._idle_rounds = 0
            self._round.clear()
            self.balance()

    def _loads(self) -> list[int]:
        loads = [0] * len(self._turns)
        for request in self._running.values():
            if request.slot is not None:
                loads[request.slot] += 1
        return loads
