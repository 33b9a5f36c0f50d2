"""What a step costs: prefill chunks and decoding, on the whole default model as one stage of one thread.

    python -m tests.bench.steps [--dtype float32] [--rounds 7] [--profile]

Each way of computing is measured in turn, round by round, on the same pages, in CPU time of the thread that computes:
it leaves out what other programs take, though not what they do to caches and memory. Ratios of one run compare;
absolute times do not. ``--profile`` prints where the steps spend their time instead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from actorpp.cli.machine import cpu_name
from actorpp.stages.checkpoint import resolve
from actorpp.stages.host import StageHost
from actorpp.stages.linears import OneDnnLinear
from actorpp.stages.messages import Segment, Step
from tests.exactness.chain import Chain

IDS = [3 + (7 * n * n + 3 * n) % 40000 for n in range(8192)]


class Job(NamedTuple):
    """One step, again and again: segments of ``length`` tokens, each after ``past`` tokens of its request."""

    name: str
    requests: int
    past: int
    length: int


JOBS = [
    Job("prefill of 500", 1, 0, 500),
    Job("prefill of 500 after 7500", 1, 7500, 500),
    Job("decode, 8 requests after 96", 8, 96, 1),
    Job("decode, 16 requests after 96", 16, 96, 1),
    Job("decode, 16 requests after 1000", 16, 1000, 1),
    Job("decode, one after 4000", 1, 4000, 1),
]


def plain_linears() -> AbstractContextManager[Any]:
    return patch("actorpp.stages.loader.pack_linears", lambda model: 0)


def onednn() -> AbstractContextManager[Any]:
    return patch("actorpp.stages.linears.packed", OneDnnLinear)


def own_layers() -> AbstractContextManager[Any]:
    return patch("actorpp.stages.host.fusing", lambda layers: contextlib.nullcontext())


def without_the_library() -> AbstractContextManager[Any]:
    return patch("actorpp.stages.native.library", lambda: None)


class Way:
    """The model loaded and run in one way.

    Args:
        held: While the model is loaded, and while it runs.
    """

    def __init__(self, model: Path, dtype: str, held: Any, backend: str = "auto") -> None:
        self._held = held
        with held():
            chain = Chain(model, 1, num_pages=320, dtype=dtype, attention_backend=backend, threads=1)
        self.host: StageHost = chain.hosts[0]
        self.chain = chain
        for page in range(chain.hosts[0].arena.num_pages):
            for view in self.host.arena.page(page):
                view.normal_()

    def run(self, job: Job) -> float:
        """CPU seconds of one step."""
        pages = -(-(job.past + job.length) // self.chain.page_size)
        self.host.reset()
        for rid in range(job.requests):
            self.chain.admit(rid, IDS[: job.past + job.length], range(rid * pages, (rid + 1) * pages))
            self.host._requests[rid].computed = job.past
        segments = tuple(Segment(rid, job.past, job.length, None, True) for rid in range(job.requests))
        with self._held():
            start = time.thread_time()
            self.host.fetch(self.host.launch(Step(0, 0, 0, segments), None, {}))
            return time.thread_time() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"], help="default bfloat16")
    parser.add_argument("--rounds", type=int, default=7, help="after one to warm up (default 7)")
    parser.add_argument("--profile", action="store_true", help="print each job's operators instead")
    options = parser.parse_args()
    model = asyncio.run(resolve()).path
    none = contextlib.nullcontext
    ways = {"as it is": Way(model, options.dtype, none)}
    if options.profile:
        for job in JOBS:
            ways["as it is"].run(job)
            with torch.profiler.profile() as profile:
                ways["as it is"].run(job)
            print(job.name, profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=15), sep="\n")
        return
    ways["without the library"] = Way(model, options.dtype, without_the_library)
    ways["flash kernel"] = Way(model, options.dtype, none, "flash")
    ways["layers' own code"] = Way(model, options.dtype, own_layers)
    ways["oneDNN's linear layers"] = Way(model, options.dtype, onednn)
    ways["plain linear layers"] = Way(model, options.dtype, plain_linears)
    ways["SDPA"] = Way(model, options.dtype, none, "sdpa")
    print(f"{cpu_name()}, {options.dtype}, load average {os.getloadavg()[0]:.1f}; CPU ms, median (lowest)")
    print(f"{'':<32}" + "".join(f"{name:>28}" for name in ways))
    for job in JOBS:
        rounds = [{name: 1e3 * way.run(job) for name, way in ways.items()} for _ in range(options.rounds + 1)][1:]
        row = [[values[name] for values in rounds] for name in ways]
        print(f"{job.name:<32}" + "".join(f"{statistics.median(v):>18.1f} ({min(v):.1f})" for v in row), flush=True)


if __name__ == "__main__":
    main()
