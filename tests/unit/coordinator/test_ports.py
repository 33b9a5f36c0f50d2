"""How the end of a stage's process is told."""

from __future__ import annotations

import asyncio
import signal
import sys

import pytest

from actorpp.coordinator import ports
from actorpp.coordinator.ports import ProcessPort
from actorpp.coordinator.stage_process import StageEnd
from actorpp.transport.process import ChildProcess


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_kill_is_told_from_the_out_of_memory_killers(
    monkeypatch: pytest.MonkeyPatch, short: bool, number: signal.Signals
) -> None:
    counts = [3, 3 + short]  # as the process starts, and as it has ended
    monkeypatch.setattr(ports, "oom_kills", lambda: counts.pop(0))

    async def main() -> None:
        child = ChildProcess([sys.executable, "-c", "import signal; signal.pause()"])
        port = ProcessPort(child, b"stage-0#0", lambda message: None)
        child.send_signal(number)
        how = f"its process {child.pid} was ended by signal {number}"
        if short and number == signal.SIGKILL:
            how += "; since it began, the kernel's out-of-memory killer has been at work"
        assert await port.exited() == StageEnd(how, crashed=short and number == signal.SIGKILL)

    asyncio.run(main())
