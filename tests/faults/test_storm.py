"""A storm of aborts over four stages in this process; ``python -m tests.faults.storm`` is the one of processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.faults.storm import save_model, storm

ABORTS = 250
SECONDS = 7.5  # so many in 30 s are a thousand


def test_aborts_at_random_moments_leave_nothing_behind(tmp_path: Path) -> None:
    outcome = asyncio.run(
        storm(save_model(tmp_path), aborts=ABORTS, seconds=SECONDS, seed=0, long=1, transport="inproc")
    )
    assert not outcome.failed, outcome.summary()
    ends = outcome.clients.ends
    assert ends["aborted: abort"] > ABORTS // 4
    assert ends["short: length"] == 2 * ABORTS
    assert outcome.stall_s < 10
