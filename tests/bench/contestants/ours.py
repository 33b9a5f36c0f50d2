"""actorpp as a contestant of tests.bench.peers: python -m tests.bench.contestants.ours MODEL STAGES DTYPE CORES

Each stage has one thread, pinned to a core of its own; the driver may run on any of them. Answers jobs from stdin until
it closes, one line of JSON each.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from actorpp import Engine, EngineConfig
from actorpp.cli.workload import Workload, run_once

KV_TOKENS = 40_960
"""Enough for every job: the machine's memory is not one contestant's own."""


def pin(pid: int, core: int) -> None:
    """All threads of a process, and those they will start, to one core."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


async def answer(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    """Figures of one job: seconds, shares, and of each chunk nothing."""
    if "fixed" in job:
        engine.scheduler.policy = engine.planning.policy("fixed", chunk_size=job["fixed"])
    else:
        engine.scheduler.policy = engine.planning.policy("planned")
    predicted = engine.plan(job["isl"]).predicted_ttft_s
    cpu, began = time.process_time(), time.perf_counter()
    work = Workload(job["isl"], job["osl"], job["count"], job["count"])
    iteration, _ = await run_once(engine, work, job["seed"])
    wall = time.perf_counter() - began
    pipeline = iteration.pipeline
    return {
        "seconds": iteration.duration_s,
        "ttft": iteration.requests[0].ttft_s,
        "tokens_s": job["count"] * job["osl"] / iteration.duration_s,
        "efficiency": pipeline.efficiency,
        "over_bound": pipeline.over_bound,
        "bubble_after_fill": pipeline.bubble_share_after_fill,
        "driver_cpu": (time.process_time() - cpu) / wall,
        "makespan": pipeline.makespan_s,
        "predicted": predicted,
        "chunks": list(iteration.requests[0].chunks),
    }


async def main(model: str, stages: int, dtype: str, cores: list[int]) -> None:
    """Start, say so, answer."""
    config = EngineConfig(
        model=model,
        stages=stages,
        dtype=dtype,
        threads_per_stage=1,
        kv_tokens=KV_TOKENS,
        watchdog_timeout=3600,
    )
    async with Engine(config, trace=True) as engine:
        for stage, core in zip(engine.stats().stages, cores, strict=False):
            pin(stage.pid, core)
        print("ANSWER", json.dumps({"ready": True}), flush=True)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print("ANSWER", json.dumps(await answer(engine, json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], [int(core) for core in sys.argv[4].split(",")]))
