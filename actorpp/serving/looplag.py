"""How long the event loop is held up: what every client of this process waits for."""

from __future__ import annotations

import asyncio

INTERVAL_S = 0.02


class LoopLag:
    """Measures while ``run`` runs.

    Attributes:
        longest_s: The longest stall so far.
        newest_s: What the newest measurement found.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.newest_s = 0.0

    async def run(self) -> None:
        """Until cancelled: ask to be woken after an interval, and see by how much it was too late."""
        now = asyncio.get_running_loop().time
        while True:
            asked = now() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            self.newest_s = max(0.0, now() - asked)
            self.longest_s = max(self.longest_s, self.newest_s)
