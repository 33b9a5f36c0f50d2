"""Whether the kernel's out-of-memory killer was at work. A process that it ends gets a SIGKILL like anybody's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))
"""Of the control group that a container is in, where there is one; else of the machine."""


def oom_kills(counters: Sequence[Path] = COUNTERS) -> int:
    """How many processes it has ended so far, as the first of these files tells; 0 if none does."""
    for counter in counters:
        with suppress(OSError):
            for line in counter.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0
