"""A stage process that lives on keeps nothing of an epoch that has ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.faults.epochs import OF_AN_EPOCH, STAGES
from tests.support.cli import ROOT


def test_forty_epochs_leave_nothing_behind() -> None:
    """What the end of the very last epoch is still busy with may be alive: at most one of each kind and stage."""
    command = [sys.executable, "-m", "tests.faults.epochs", "--epochs", "40"]
    ran = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    left = json.loads(ran.stdout)
    assert max(left["alive"][kind] for kind in OF_AN_EPOCH) <= 2 * STAGES, left
    assert left["letters"] == 0, left
    assert left["arenas"] == 1, left
    assert left["heap_bytes_per_epoch"] < 16 * 1024, left
    assert left["resident_bytes_per_epoch"] < 48 * 1024, left
