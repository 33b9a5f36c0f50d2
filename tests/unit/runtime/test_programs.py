"""The runtime in processes of its own: the examples, what an import costs, and a thread that hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from actorpp.runtime.system import EX_SOFTWARE

ROOT = Path(__file__).parents[3]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("01_ping", "player: ping 3 -> pong 3\nplayer has finished\n"),
        ("02_supervision", "restarts: 1\ndead letters: [Divide(a=5, b=5)]\n"),
        ("03_embedded", "'brevity is the soul of wit' scores 1.00\nStats(scored=2)\n"),
    ],
)
def test_examples(name: str, said: str) -> None:
    ran = python(f"examples/{name}.py")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.endswith(said)


def test_importing_costs_nothing_heavy() -> None:
    heavy = ["torch", "transformers", "numpy", "zmq"]
    code = f"""
import sys
import actorpp
assert "asyncio" not in sys.modules
assert actorpp.__version__[0].isdigit()
import actorpp.runtime, actorpp.testing
assert not [name for name in {heavy} if name in sys.modules]
assert [getattr(actorpp, name) for name in actorpp.__all__]
assert not [name for name in {heavy[:2]} if name in sys.modules]
assert "EngineConfig" in dir(actorpp)
"""
    ran = python("-c", code)
    assert ran.returncode == 0, ran.stderr


def test_a_hung_thread_ends_the_process() -> None:
    code = """
import asyncio, threading
from actorpp.runtime import Actor, ActorSystem

entered = threading.Event()

def hang():
    entered.set()
    threading.Event().wait()

class Hung(Actor):
    async def run(self):
        await self.offload(hang)

async def main():
    async with ActorSystem(grace=0.05) as system:
        ref = await system.spawn(Hung, name="hung")
        await asyncio.to_thread(entered.wait)
        await system.kill(ref)

asyncio.run(main())
"""
    ran = python("-c", code)
    assert ran.returncode == EX_SOFTWARE
    assert "hung was killed, and has not ended within 0.05 s: ending the process" in ran.stderr


def test_the_benchmark_runs() -> None:
    """Its shape only; a ceiling on speed is in test_speed."""
    ran = python("-m", "tests.bench.actors", "--rounds", "1", "--no-peers", "--json")
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(ran.stdout)["results"]
    kinds = {"ask, in process": ("us", 12.0), "tell, in process": ("k/s", 500.0), "between processes": ("us", 150.0)}
    for kind, (unit, target) in kinds.items():
        found = [row for row in rows if kind in row["case"]]
        assert found
        assert all((row["unit"], row["target"]) == (unit, target) and row["median"] > 0 for row in found)
