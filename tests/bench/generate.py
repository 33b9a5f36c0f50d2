"""Throughput and latency beside transformers' generate, in the same interleaved run.

    python -m tests.bench.generate [--stages 1 2] [--rounds 5] [--dtype float32] [--json]

Two jobs on the default model: a batch (16 requests of 64 prompt tokens and 64 new ones), and one request of 4000 prompt
tokens. Every round measures all cases one after the other, so that all meet the same noise; medians over the rounds and
the range are shown, and the load average: where it is not near 0 before the run, others compute too. transformers runs
in a process of its own, with all cores; the stages share the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actorpp import LLM, SamplingParams
from actorpp.cli.machine import cpu_name
from actorpp.stages.checkpoint import resolve

DATA = Path(__file__).resolve().parents[1] / "data" / "prompt_3000.json"
UNITS = {"tokens_s": ("output tokens/s", 1.0), "ttft": ("TTFT, s", 1.0), "tpot": ("TPOT, ms", 1e3)}

Figures = dict[str, float]


class Job:
    """Prompts of one length, and how many tokens to generate for each."""

    def __init__(self, count: int, prompt: int, new: int) -> None:
        ids: list[int] = json.loads(DATA.read_text())["ids"]
        ids = ids * (prompt // len(ids) + 2)
        self.prompts = [ids[17 * n : 17 * n + prompt] for n in range(count)]
        self.new = new
        self.name = f"{count} requests of {prompt} + {new}" if count > 1 else f"one request of {prompt} + {new}"
        self.metrics = ("tokens_s",) if count > 1 else ("ttft", "tpot")


def figures(seconds: float, tokens: int, ttft: float | None, tpot: float | None) -> Figures:
    found = {"tokens_s": tokens / seconds, "ttft": ttft, "tpot": tpot}
    return {name: value for name, value in found.items() if value is not None}


# --- ours -------------------------------------------------------------------------------------------------------------


def ours(llm: LLM, job: Job) -> Figures:
    greedy = SamplingParams(temperature=0, max_tokens=job.new, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(job.prompts, greedy, use_tqdm=False)
    seconds = time.perf_counter() - start
    metrics = outputs[0].metrics
    return figures(seconds, sum(len(output.outputs[0].token_ids) for output in outputs), metrics.ttft_s, metrics.tpot_s)


# --- transformers, in a child process ---------------------------------------------------------------------------------


class Peer:
    """The child: one line of JSON in, one line of figures out."""

    def __init__(self, stack: contextlib.ExitStack, model: Path, dtype: str) -> None:
        command = [sys.executable, "-m", "tests.bench.generate", "--peer", str(model), dtype]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        self.child = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        )
        stack.callback(self.child.kill)

    def __call__(self, job: Job) -> Figures:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(json.dumps({"prompts": job.prompts, "new": job.new}) + "\n")
        self.child.stdin.flush()
        answer: Figures = json.loads(self.child.stdout.readline())
        return answer


def serve_peer(model: str, dtype: str) -> None:
    """Answer jobs from stdin until it closes."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):  # type: ignore[misc]
        """Notes when each token came; the first call is the prompt's."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    for line in sys.stdin:
        job = json.loads(line)
        ids = torch.tensor(job["prompts"])
        clock = Clock() if len(ids) == 1 else None
        new = {"max_new_tokens": job["new"], "min_new_tokens": job["new"]}
        start = time.perf_counter()
        out = network.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, streamer=clock, **new)
        seconds = time.perf_counter() - start
        ttft = tpot = None
        if clock is not None:
            _, first, *_, last = clock.times
            ttft, tpot = first - start, (last - first) / (job["new"] - 1)
        print(json.dumps(figures(seconds, len(ids) * (out.shape[1] - ids.shape[1]), ttft, tpot)), flush=True)


# --- the run ----------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each job, metric and contestant."""
    jobs = [Job(options.requests, 64, options.new), Job(1, options.long, max(2, options.new // 4))]
    model = asyncio.run(resolve()).path
    with contextlib.ExitStack() as stack:
        contestants: dict[str, Callable[[Job], Figures]] = {}
        for stages in options.stages:
            llm = stack.enter_context(LLM(model, stages=stages, dtype=options.dtype, use_tqdm_on_load=False))
            contestants[f"actorpp, {stages} stage{'s' if stages > 1 else ''}"] = lambda job, llm=llm: ours(llm, job)
        contestants["transformers generate"] = Peer(stack, model, options.dtype)
        found: dict[tuple[str, str, str], list[float]] = {
            (job.name, metric, who): [] for job in jobs for metric in job.metrics for who in contestants
        }
        for run in contestants.values():  # first uses: threads, kernels, caches
            run(Job(2, 64, 4))
        for _ in range(options.rounds):
            for job in jobs:
                for who, run in contestants.items():
                    values = run(job)
                    for metric in job.metrics:
                        found[job.name, metric, who].append(values[metric])
                    shown = ", ".join(f"{UNITS[name][1] * values[name]:.4g} {UNITS[name][0]}" for name in job.metrics)
                    print(f"{job.name}, {who}: {shown}", file=sys.stderr, flush=True)  # what an interrupt leaves
    rows = []
    for (job_name, metric, who), values in found.items():
        unit, factor = UNITS[metric]
        scaled = [factor * value for value in values]
        spread = {"median": statistics.median(scaled), "lowest": min(scaled), "highest": max(scaled)}
        rows.append({"job": job_name, "metric": unit, "who": who, **spread})
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2], help="pipelines to measure (default 1 2)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all cases (default 5)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="default float32")
    parser.add_argument("--requests", type=int, default=16, help="requests of the batch (default 16)")
    parser.add_argument("--new", type=int, default=64, help="new tokens of each request of the batch (default 64)")
    parser.add_argument("--long", type=int, default=4000, help="prompt tokens of the one long request (default 4000)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--peer", nargs=2, metavar=("MODEL", "DTYPE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        serve_peer(*options.peer)
        return
    load = os.getloadavg()[0]
    rows = measure(options)
    machine = {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "load": [load, os.getloadavg()[0]]}
    if options.json:
        print(json.dumps({"rounds": options.rounds, "dtype": options.dtype, "results": rows, **machine}))
        return
    print(f"{machine['cpu']}, {machine['cores']} cores; load average {load:.1f} before, {machine['load'][1]:.1f} after")
    print(f"{'job':<28}{'metric':<18}{'':<24}{'median':>9}{'lowest':>9}{'highest':>9}")
    for row in rows:
        values = "".join(f"{row[key]:>9.2f}" for key in ("median", "lowest", "highest"))
        print(f"{row['job']:<28}{row['metric']:<18}{row['who']:<24}{values}")


if __name__ == "__main__":
    main()
