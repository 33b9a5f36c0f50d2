"""The kernel's count of processes that it ended for want of memory."""

from __future__ import annotations

from pathlib import Path

from actorpp.transport.oom import COUNTERS, oom_kills


def test_the_control_groups_count_comes_before_the_machines(tmp_path: Path) -> None:
    group, machine = tmp_path / "memory.events", tmp_path / "vmstat"
    assert oom_kills([group, machine]) == 0
    machine.write_text("pgfault 123\noom_kill 7\n")
    assert oom_kills([group, machine]) == 7
    group.write_text("low 0\noom 5\noom_kill 2\noom_group_kill 0\n")
    assert oom_kills([group, machine]) == 2


def test_this_kernel_counts() -> None:
    assert any("\noom_kill " in counter.read_text() for counter in COUNTERS if counter.exists())
