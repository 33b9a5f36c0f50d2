"""A stage process that dies, stops or hangs at the points armed for it, and whose clocks are wrong.

But for that, it is the product's.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from actorpp.stages import entry
from actorpp.stages.spec import StageSpec
from actorpp.stages.wiring import WiringSpec
from tests.faults.trap import Trap, folder_of_environment

SKEW_S = 10.0

POISON = [3, 3, 3]
"""A prompt that begins so crashes the first stage at every chunk from its position 64 on. No other prompt here does."""


def strike(stage: int, kind: str) -> None:
    """Nothing of this process's own runs between the point and its end; of one that hangs, all but the compute."""
    if kind == "hang":
        threading.Event().wait()
    os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)


def skew_clocks(seconds: float) -> None:
    """Ahead in every other start of a stage, behind in the rest. For modules that are imported from now on."""
    number = StageSpec.from_env(os.environ).stage + WiringSpec.from_env(os.environ).incarnation
    ahead = seconds * (-1) ** number
    for name in ("time", "monotonic"):
        clock = getattr(time, name)
        setattr(time, name, lambda clock=clock: clock() + ahead)


def crash_by_poison(stack: ExitStack) -> None:
    from actorpp.stages.host import StageHost

    compute = StageHost._compute

    def computed(host: StageHost, step: Any, *rest: Any) -> Any:
        for segment in step.segments if host.is_first else ():
            tokens = host._requests[segment.rid].tokens
            if tokens is not None and tokens[:3].tolist() == POISON and segment.start >= 64:
                os.kill(os.getpid(), signal.SIGSEGV)
        return compute(host, step, *rest)

    stack.enter_context(patch.object(StageHost, "_compute", computed))


def set_traps(stack: ExitStack) -> None:
    from actorpp.stages import process
    from actorpp.transport.gloo import GlooLink

    trap = Trap(folder_of_environment(), strike)
    trap.set(stack)
    for point, method in (("sending", "_send"), ("receiving", "_receive")):
        watched = trap.around(point, lambda link, *rest: link.rank, getattr(GlooLink, method))
        stack.enter_context(patch.object(GlooLink, method, watched))
    joining = trap.around("joining", lambda url, epoch, rank, *rest: rank, process.connect_gloo)
    stack.enter_context(patch.object(process, "connect_gloo", joining))


if __name__ == "__main__":
    skew_clocks(SKEW_S)
    with ExitStack() as stack:
        import_lightly = entry.import_lightly

        def import_and_set(device: str) -> None:
            import_lightly(device)
            set_traps(stack)
            crash_by_poison(stack)

        stack.enter_context(patch.object(entry, "import_lightly", import_and_set))
        entry.main()
