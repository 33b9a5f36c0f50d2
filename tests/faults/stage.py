"""A stage process that dies or stops at the points armed for it; but for that, it is the product's."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from unittest.mock import patch

from actorpp.stages import entry
from tests.faults.trap import Trap, folder_of_environment


def strike(stage: int, kind: str) -> None:
    """Nothing of this process's own runs between the point and its end."""
    os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)


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
    with ExitStack() as stack:
        import_lightly = entry.import_lightly

        def import_and_set(device: str) -> None:
            import_lightly(device)
            set_traps(stack)

        stack.enter_context(patch.object(entry, "import_lightly", import_and_set))
        entry.main()
