"""Chunk plans on the real pipeline: predicted against measured time to first token, and ``planned`` beside fixed sizes.

    python -m tests.bench.plans --isl 1000,4000,8000 --fixed 256,512,1024 --rounds 5

One engine of the default model, random ids, one request at a time and one token each; all policies in turn, round by
round. The first round warms up and teaches the costs, and is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from statistics import median

from actorpp.config import EngineConfig
from actorpp.engine import Engine
from actorpp.serving.api import Finished, GenerationParams, RequestMetrics
from actorpp.transport.sockets import close_context


async def complete(engine: Engine, tokens: int, seed: int) -> RequestMetrics:
    generator = random.Random(seed)
    ids = [generator.randrange(engine.checkpoint.vocab_size) for _ in range(tokens)]
    async for event in engine.submit(ids, GenerationParams(max_tokens=1, ignore_eos=True)):
        if isinstance(event, Finished):
            return event.metrics
    raise RuntimeError("no final event")


def cell(values: list[float]) -> str:
    return f"{median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


async def measure(stages: int, lengths: list[int], fixed: list[int], rounds: int) -> None:
    config = EngineConfig(stages=stages, threads_per_stage=1)
    async with Engine(config) as engine:
        policies = {"planned": engine.planning.policy("planned")}
        policies |= {f"fixed {size}": engine.planning.policy("fixed", chunk_size=size) for size in fixed}
        ttft: dict[tuple[str, int], list[float]] = {}
        ratios: dict[tuple[str, int], list[float]] = {}
        chunks: dict[tuple[str, int], tuple[int, ...]] = {}
        spent = wall = 0.0
        for turn in range(rounds + 1):
            for length in lengths:
                for name, policy in policies.items():
                    engine.scheduler.policy = policy
                    predicted = engine.plan(length).predicted_ttft_s
                    began, cpu = time.perf_counter(), time.process_time()
                    metrics = await complete(engine, length, turn)
                    known = "unknown" if predicted is None else f"{predicted:.3f} s"
                    print(f"round {turn}, ISL {length}, {name}: {metrics.ttft_s:.3f} s, predicted {known}", flush=True)
                    if turn and metrics.ttft_s is not None and predicted is not None:
                        spent, wall = spent + time.process_time() - cpu, wall + time.perf_counter() - began
                        ttft.setdefault((name, length), []).append(metrics.ttft_s)
                        ratios.setdefault((name, length), []).append(predicted / metrics.ttft_s)
                        chunks[name, length] = metrics.chunks
        print(
            f"{rounds} rounds, {stages} stages of one thread; medians and range; driver CPU / wall {spent / wall:.1%}"
        )
        for length in lengths:
            for name in policies:
                key = (name, length)
                print(f"ISL {length:6} {name:12} TTFT {cell(ttft[key])} s, predicted / measured {cell(ratios[key])}")
            print(f"  planned: {' '.join(map(str, chunks['planned', length]))}")
        for index, cost in enumerate(engine.planning.costs.model.stages):
            shape = f"c {cost.c / cost.b:.0f} tokens, b/a {cost.b / cost.a if cost.a else float('inf'):.0f} tokens"
            print(f"stage {index}: {cost.b * 1e6:.1f} us a token, {shape}, gamma {cost.gamma * 1e6:.3f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--isl", default="1000,4000,8000")
    parser.add_argument("--fixed", default="256,512,1024")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    lengths, fixed = ([int(n) for n in text.split(",") if n] for text in (given.isl, given.fixed))
    asyncio.run(measure(given.stages, lengths, fixed, given.rounds))
    close_context()


if __name__ == "__main__":
    main()
