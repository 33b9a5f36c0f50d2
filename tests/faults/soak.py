"""``python -m tests.faults.soak --minutes 60``: mixed load for so long; what each process holds must not grow.

Printed for the driver and each stage that has lived throughout: resident memory's slope, descriptors and threads at the
beginning and the end. With ``--kill-every N`` a stage dies every so many rounds; then it is the driver and the others
that are watched.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from actorpp.config import EngineConfig
from actorpp.logs import configure_logging
from tests.exactness.tiny import VOCAB, save_llama
from tests.faults.harness import Harness, opened, schedule

WARM_UP = 0.2
"""Share of the samples left out: allocators and caches fill at first."""


@dataclass
class Series:
    """One process over time."""

    name: str
    seconds: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def sample(self, pid: int, now: float) -> None:
        process = psutil.Process(pid)
        with process.oneshot():
            self.seconds.append(now)
            self.resident.append(process.memory_info().rss)
            self.descriptors.append(process.num_fds())
            self.threads.append(process.num_threads())

    def row(self) -> str:
        start = int(WARM_UP * len(self.seconds))
        slope = statistics.linear_regression(self.seconds[start:], self.resident[start:]).slope
        return (
            f"| {self.name} | {self.resident[-1] / 2**20:.0f} MiB | {60 * slope / 2**10:+.0f} KiB/min | "
            f"{self.descriptors[start]} → {self.descriptors[-1]} | {self.threads[start]} → {self.threads[-1]} |"
        )


async def soak(harness: Harness, options: argparse.Namespace) -> list[Series]:
    """Rounds until the time is over; every round is one sample."""
    generator = random.Random(options.seed)
    series: dict[int, Series] = {}
    began = time.monotonic()
    number = 0
    while time.monotonic() < began + 60 * options.minutes and not harness.tally.failed:
        number += 1
        struck = options.kill_every and number % options.kill_every == 0
        await harness.play(number, schedule(generator, options.stages, processes=True)[:1] if struck else [])
        alive = {os.getpid(): "driver"}
        alive |= {stage.pid: f"stage {index}" for index, stage in enumerate(harness.engine.stats().stages)}
        series = {pid: series.get(pid, Series(name)) for pid, name in alive.items()}
        for pid, own in series.items():
            own.sample(pid, time.monotonic() - began)
    print(f"{number} rounds, {harness.tally.requests} requests, {harness.tally.restarts} restarts")
    return [own for own in series.values() if len(own.seconds) > 5]


async def main(options: argparse.Namespace, model: str) -> int:
    config = EngineConfig(
        model=model,
        stages=options.stages,
        dtype="float32",
        kv_tokens=8192,
        threads_per_stage=1,
        chunked_prefill_size=32,
        max_restarts=1_000_000,
        watchdog_timeout=60.0,
    )
    async with opened(config, options.seed, vocab=VOCAB, longest=100) as harness:
        series = await soak(harness, options)
    print("| process | resident | slope | descriptors | threads |\n|---|---|---|---|---|")
    for own in series:
        print(own.row())
    if harness.tally.failed:
        print(harness.tally.summary())
    return int(harness.tally.failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--kill-every", type=int, default=0, metavar="ROUNDS")
    chosen = parser.parse_args()
    configure_logging("error")
    with tempfile.TemporaryDirectory() as folder:
        path = str(save_llama(Path(folder), tied=True, eos_token_id=2))
        sys.exit(asyncio.run(main(chosen, path)))
