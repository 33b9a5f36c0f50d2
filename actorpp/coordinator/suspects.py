"""Suspects: finds the request that crashes its stage every time it is computed, so that it fails and the others do not.

Whose segments were under way when a stage crashed by its own doing may have been the cause; who had none was not. At
the second crash in a row a request becomes a suspect: it is computed alone, nothing else in flight, before all others
and one suspect after the other, until it has passed what was under way at its last crash. Then it is cleared, and goes
on with the others. If a stage crashes while it is alone, it is convicted. What somebody else ended (a kill, a lost
link) proves nothing.

A plain book: the scheduler asks it, and it decides nothing about requests that no crash has met.
"""

from __future__ import annotations

from collections.abc import Sequence

from actorpp.coordinator.request import Request

SUSPECTED = 2
"""Crashes in a row after which a request is computed alone."""

CONVICTED = 3
"""Crashes in a row, the last of them alone, after which it fails. --max-restarts must allow for so many."""


class Suspects:
    """Attributes:
    alone: The suspect that is computed now; nothing else may be.
    explained: Convictions so far after which something was computed: until then the stage may be what is broken.
    """

    def __init__(self) -> None:
        self.alone: Request | None = None
        self.explained = 0
        self._unproven = 0  # convictions since the last Output

    def crashed(self, under_way: Sequence[Request]) -> Request | None:
        """A stage crashed by its own doing, with segments of these requests under way. Returns who is convicted."""
        for request in under_way:
            request.crashes = 1 if self.passed(request) else request.crashes + 1
            request.crash_end = request.sent
        if len(under_way) != 1 or under_way[0].crashes < CONVICTED:
            return None
        self._unproven += 1
        return under_way[0]

    def progressed(self, request: Request) -> None:
        """An Output of it is in: it may be cleared by that."""
        self.explained += self._unproven
        self._unproven = 0
        if request.crashes and self.passed(request):
            request.crashes = 0
            self.ended(request)

    def ended(self, request: Request) -> None:
        """It is alone no more."""
        if request is self.alone:
            self.alone = None

    def passed(self, request: Request) -> bool:
        """Whether all that was under way at its last crash has been computed since."""
        return request.seen >= request.crash_end

    def suspected(self, request: Request) -> bool:
        return request.crashes >= SUSPECTED
