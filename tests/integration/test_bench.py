"""The benchmark beside transformers runs; its shape only, in small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_benchmark_runs(default_model: Path) -> None:
    small = ["--stages", "1", "--rounds", "1", "--requests", "2", "--new", "8", "--long", "80"]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.bench.generate", "--json", *small],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(ran.stdout)["results"]
    assert [(row["job"], row["metric"], row["who"]) for row in rows] == [
        (job, metric, who)
        for job, metric in (
            ("2 requests of 64 + 8", "output tokens/s"),
            ("one request of 80 + 2", "TTFT, s"),
            ("one request of 80 + 2", "TPOT, ms"),
        )
        for who in ("actorpp, 1 stage", "transformers generate")
    ]
    assert all(row["median"] > 0 for row in rows)
