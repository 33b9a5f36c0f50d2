"""The benchmarks beside transformers and the peers run; their shape only, in small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.contestant import Contestant
from tests.bench.peers import Job

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


@pytest.mark.long
def test_our_contestant_beside_the_peers_answers(default_model: Path) -> None:
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    command = [sys.executable, "-m", "tests.bench.contestants.ours", str(default_model), "2", "bfloat16", cores]
    with Contestant("ours", command) as child:
        child.ready()
        answers = [child.run(job.message("0")) for job in (Job(400), Job(400, fixed=128), Job(16, osl=4, count=3))]
    assert [sum(answer["chunks"]) for answer in answers] == [400, 400, 16]
    assert answers[1]["chunks"] == [128, 128, 128, 16]
    for answer in answers:
        assert 0 < answer["efficiency"] <= 1 <= answer["over_bound"]
        assert 0 < answer["ttft"] <= answer["seconds"] + 0.01
    assert answers[1]["predicted"] > 0  # the engine has learned from the first prompt
