"""How long the loop was held up, and by whom."""

from __future__ import annotations

import asyncio
import time

import pytest

from actorpp.serving import looplag
from actorpp.serving.looplag import INTERVAL_S, LoopLag


@pytest.mark.parametrize("without_cpu_s", [0.0, 0.2])
def test_what_the_machine_takes_is_not_the_process_s_fault(
    monkeypatch: pytest.MonkeyPatch, without_cpu_s: float
) -> None:
    waited = 1.0
    monkeypatch.setattr(looplag, "_without_cpu", lambda: waited)

    async def main() -> LoopLag:
        nonlocal waited
        lag = LoopLag()
        measuring = asyncio.create_task(lag.run())
        await asyncio.sleep(0)
        time.sleep(0.3)  # noqa: ASYNC251 - the loop is held up
        waited += without_cpu_s
        await asyncio.sleep(2 * INTERVAL_S)
        measuring.cancel()
        return lag

    lag = asyncio.run(main())
    assert lag.longest_s >= 0.3 - INTERVAL_S
    taken = max(0.0, without_cpu_s - INTERVAL_S)
    assert lag.longest_held_s == pytest.approx(lag.longest_s - taken)


def test_the_system_tells_of_waiting() -> None:
    assert looplag._without_cpu() >= 0.0
