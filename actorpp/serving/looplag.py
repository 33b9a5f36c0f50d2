"""How long the event loop is held up: what every client of this process waits for."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

INTERVAL_S = 0.02
SCHEDSTAT = Path("/proc/thread-self/schedstat")  # of Linux: ns on a CPU, ns ready and without one, time slices


class LoopLag:
    """Measures while ``run`` runs.

    Attributes:
        longest_s: The longest stall so far.
        longest_held_s: The longest for which this process itself is to blame: without the time in which the machine
            had no CPU for the loop's thread. It may be up to INTERVAL_S too much.
        newest_s: What the newest measurement found.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.longest_held_s = 0.0
        self.newest_s = 0.0

    async def run(self) -> None:
        """Until cancelled: ask to be woken after an interval, and see by how much it was too late."""
        now = asyncio.get_running_loop().time
        waited = _without_cpu()
        while True:
            asked = now() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            before, waited = waited, _without_cpu()
            self.newest_s = max(0.0, now() - asked)
            self.longest_s = max(self.longest_s, self.newest_s)
            # Some of the waiting may have been within the interval, and is no part of what came after it.
            held_s = self.newest_s - max(0.0, waited - before - INTERVAL_S)
            self.longest_held_s = max(self.longest_held_s, held_s)


def _without_cpu() -> float:
    """Seconds that this thread has been ready to run and had no CPU; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        return int(SCHEDSTAT.read_bytes().split()[1]) / 1e9
    return 0.0
