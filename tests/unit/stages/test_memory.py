"""How much memory KV pages may take: the smaller of the host's and the control group's, shared by stages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actorpp.stages import memory

CPU = torch.device("cpu")


def test_control_group_bounds_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert memory.kv_bytes_available(CPU, 0.9, 1) == 500_000
    assert memory.kv_bytes_available(CPU, 0.9, 4) == 125_000
    assert memory.kv_bytes_available(CPU, 0.3, 1) == 0


def test_without_a_limit_the_host_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    whole = memory.kv_bytes_available(CPU, 1.0, 1)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert whole > 2**20
    assert memory.kv_bytes_available(CPU, 1.0, 1) > 2**20
