"""Which machine and versions a figure was measured with."""

from __future__ import annotations

import contextlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def cpu_name() -> str:
    """As the kernel says it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def machine() -> dict[str, Any]:
    """CPU, usable cores, load average of the last minute, and versions."""
    versions = {}
    for package in ("actorpp", "torch", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        **versions,
    }
