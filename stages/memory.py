"""How much memory a stage may give to KV pages: of the CUDA device, or of the host within its control group."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def kv_bytes_available(device: torch.device, fraction: float, colocated: int) -> int:
    """Bytes left for KV pages, with the weights loaded.

    Args:
        fraction: Share of the whole memory for weights and pages together.
        colocated: Stages that share this memory in equal parts.

    Returns:
        Bytes, 0 or more.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
    else:
        free, total = _host_memory()
    return max(0, int(free - total * (1 - fraction)) // colocated)


def _host_memory() -> tuple[int, int]:
    """Free and total bytes of this host, or of the control group where that is smaller."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    free = os.sysconf("SC_AVPHYS_PAGES") * page
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        available = [line.split() for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable")]
        free = int(available[0][1]) * 1024 if available else free
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free, total
    return min(free, max(0, limit - used)), min(total, limit)
