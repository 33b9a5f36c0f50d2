"""``python -m tests.faults.storm``: 1000 aborts at random moments in 30 s over four stages, and much else meanwhile.

Thousands of tiny requests with a few of 8000 tokens among them, clients that stream, vanish, send rubbish or come too
late, all at random moments of the same seconds; the stages are processes whose clocks are 10 s ahead or behind. Every
request must end once as its kind may, no stage be taken for a stalled one, nothing be in use in the end, and requests
whose answers are known get them. Printed: how each kind ended, its longest time, and the longest stall of the pipeline.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from actorpp.config import EngineConfig
from actorpp.engine import Engine
from actorpp.logs import configure_logging
from actorpp.serving.api import EngineStats
from tests.exactness.tiny import save_llama
from tests.faults.clients import Clients, clients_of
from tests.faults.harness import Tally, opened

LONGEST = 8000
SAMPLE_S = 0.1

SHARES = {"aborted": 1.0, "short": 2.0, "streaming": 0.05, "too late": 0.1, "bad": 0.05, "vanishing": 0.1}
"""Clients of each kind for one that aborts; beside them are some long ones."""


@dataclass
class Outcome:
    """What a storm left.

    Attributes:
        stall_s: The longest time without a finished step while there was work.
        stats: Of the engine, afterwards.
    """

    clients: Clients
    tally: Tally
    stall_s: float
    stats: EngineStats

    @property
    def failed(self) -> bool:
        restarted = any(stage.restarts for stage in self.stats.stages)
        return self.tally.failed or bool(self.clients.wrong) or restarted or self.stats.state != "ready"

    def summary(self) -> str:
        restarts = sum(stage.restarts for stage in self.stats.stages)
        lines = [self.clients.summary(), "", f"longest stall {self.stall_s:.2f} s, stages restarted {restarts}"]
        return "\n".join([*lines, *self.tally.leaks, *self.tally.differing, *self.tally.lost])


async def storm(
    model: Path, *, aborts: int, seconds: float, seed: int, stages: int = 4, long: int = 4, transport: str = "process"
) -> Outcome:
    """One storm, and a round of known answers afterwards."""
    config = EngineConfig(
        model=str(model),
        stages=stages,
        transport=transport,
        dtype="float32",
        kv_tokens=8 * LONGEST,
        threads_per_stage=1,
        chunked_prefill_size=512,
        max_queued_requests=10 * aborts,
        watchdog_timeout=30.0,
    )
    generator = random.Random(seed)
    kinds = [kind for kind, share in SHARES.items() for _ in range(int(share * aborts))] + ["long"] * long
    async with (
        opened(config, seed, longest=100) as harness,
        clients_of(harness.engine, seed, longest=LONGEST) as clients,
    ):

        async def come(kind: str, after: float) -> None:
            await asyncio.sleep(after)
            await clients.one(kind)

        watching = asyncio.create_task(longest_stall(harness.engine))
        async with asyncio.TaskGroup() as group:
            for kind in kinds:
                group.create_task(come(kind, generator.uniform(0, seconds)))
        watching.cancel()
        await harness.play(0, [])
        return Outcome(clients, harness.tally, await watching, harness.engine.stats())


async def longest_stall(engine: Engine) -> float:
    """Until cancelled."""
    longest = 0.0
    with suppress(asyncio.CancelledError):
        while True:
            longest = max(longest, engine.stats().stalled_s)
            await asyncio.sleep(SAMPLE_S)
    return longest


def save_model(folder: Path) -> Path:
    """Tiny, with room for the long requests."""
    return save_llama(folder, tied=True, eos_token_id=2, max_position_embeddings=2 * LONGEST)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.faults.storm")
    parser.add_argument("--aborts", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    configure_logging("error")
    with tempfile.TemporaryDirectory() as name:
        outcome = asyncio.run(storm(save_model(Path(name)), **vars(chosen)))
    print(outcome.summary())
    sys.exit(outcome.failed)
