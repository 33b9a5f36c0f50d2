"""What bounds a step: its products, its attention and the rest, each beside what the machine could do.

    python -m tests.bench.roofline [--rounds 7] [--dtype float32]

The whole default model as one stage of one thread, with the memory that stage processes have. Right before each step
the machine's own peaks are measured: the rate of a large torch product, and that of reading memory in a matrix-vector
product over more than the caches hold. The roofline of a part (Williams, Waterman and Patterson, 2009) is the time in
which its operations and bytes could be done at these, whichever takes longer; its share is that time over what it took.
Operations are multiplications and additions: attention's exponentials and the rest's work are none. Bytes are those
that have to be read or written once: weights, hidden states, keys and values.

Products and attention are timed call by call, in a step of their own, for the library may compute all layers in one.
The rest is what the step right before it took outside of that one call and of products elsewhere, or outside of all
products and attention where there is no such call. All times are CPU time of the thread. A kernel that is better than
torch's product has a share above 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn

from actorpp.cli.machine import cpu_name
from actorpp.coordinator.ports import compute_environment
from actorpp.stages import native
from actorpp.stages.backends import AttentionBackend, Scoring
from actorpp.stages.checkpoint import resolve
from actorpp.stages.history import LayerKV
from actorpp.stages.linears import PackedLinear
from tests.bench.steps import Job, Way

JOBS = [
    Job("prefill of 512", 1, 0, 512),
    Job("prefill of 512 after 7500", 1, 7500, 512),
    Job("decode, 8 requests after 96", 8, 96, 1),
    Job("decode, 16 requests after 96", 16, 96, 1),
]
PRODUCTS = ("forward", "silu", "times", "plus", "gated")
"""Methods of linear layers that compute a product of the hidden states with the weight."""
READ_BYTES = 1 << 29


@dataclass
class Part:
    """What one part of a step took and did. ``flop`` and ``bytes`` stay 0 where they are not counted."""

    seconds: float = 0.0
    flop: int = 0
    bytes: int = 0

    def add(self, seconds: float, flop: int, nbytes: int) -> None:
        self.seconds += seconds
        self.flop += flop
        self.bytes += nbytes

    def take(self) -> Part:
        """All of it; afterwards it is empty."""
        taken = replace(self)
        self.seconds, self.flop, self.bytes = 0.0, 0, 0
        return taken


class Peaks(NamedTuple):
    """Of this machine, at this moment: operations and bytes a second."""

    flop_s: float
    bytes_s: float

    def roofline_s(self, part: Part) -> float:
        """Seconds that the part would take at the peaks."""
        return max(part.flop / self.flop_s, part.bytes / self.bytes_s)


class Machine:
    """Measures the peaks.

    Args:
        read_bytes: Read for the memory's; more than the caches hold.
    """

    def __init__(self, dtype: str, read_bytes: int = READ_BYTES) -> None:
        self._square = torch.randn(1024, 1024).to(getattr(torch, dtype))
        self._matrix = torch.ones(read_bytes // (4 * 8192), 8192)
        self._vector = torch.ones(8192)

    def peaks(self) -> Peaks:
        """The best of a few tries each."""
        product = min(_cpu_seconds(lambda: self._square @ self._square) for _ in range(5))
        read = min(_cpu_seconds(lambda: self._matrix @ self._vector) for _ in range(2))
        return Peaks(2 * 1024**3 / product, self._matrix.nbytes / read)


def _cpu_seconds(function: Callable[[], object]) -> float:
    start = time.thread_time()
    function()
    return time.thread_time() - start


class TimedAttention:
    """The stage's backend, with an account of its calls."""

    def __init__(self, backend: AttentionBackend, account: Part) -> None:
        self._backend = backend
        self._account = account

    def attend_step(
        self, query: torch.Tensor, kv: LayerKV, scoring: Scoring, *, with_lse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``AttentionBackend``."""
        start = time.thread_time()
        out, lse = self._backend.attend_step(query, kv, scoring, with_lse=with_lse)
        seconds = time.thread_time() - start
        widths = kv.keys.shape[-1] + kv.values.shape[-1]
        scores = sum(s.length * s.keys - s.length * (s.length - 1) // 2 for s in kv.layout.segments)  # causal
        read = sum(s.keys for s in kv.layout.segments) * len(kv.keys) * widths * kv.keys.element_size()
        self._account.add(seconds, 2 * scores * len(query) * widths, read + query.nbytes + out.nbytes)
        return out, lse


@contextlib.contextmanager
def timed_products(account: Part) -> Iterator[None]:
    """Linear layers that are loaded inside keep an account of their products, for as long as this holds."""

    def timed(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def product(layer: Any, hidden_states: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            start = time.thread_time()
            out = method(layer, hidden_states, *others)
            seconds = time.thread_time() - start
            size, weights = hidden_states.element_size(), layer.in_features * layer.out_features
            read = size * weights + hidden_states.nbytes + sum(other.nbytes for other in others)
            rows = hidden_states.numel() // layer.in_features
            account.add(seconds, 2 * rows * weights, read + out.nbytes)
            return out

        return product

    with contextlib.ExitStack() as stack:
        for layer in (nn.Linear, PackedLinear, *PackedLinear.__subclasses__()):
            for name in PRODUCTS:
                if name in vars(layer):
                    stack.enter_context(patch.object(layer, name, timed(vars(layer)[name])))
        yield


class Sample(NamedTuple):
    """One step: its parts by name, and the peaks right before it."""

    parts: dict[str, Part]
    peaks: Peaks


def measure(model: Path, dtype: str, jobs: Sequence[Job], *, rounds: int, machine: Machine) -> dict[str, list[Sample]]:
    """Samples of each job, ``rounds`` of them, the jobs in turn; one round more goes before, to warm up."""
    products, attention, layers = Part(), Part(), Part()

    def compute_layers(*arguments: Any) -> None:
        layers.seconds += _cpu_seconds(lambda: compute(*arguments))

    compute = native.compute_layers
    with timed_products(products), patch.object(native, "compute_layers", compute_layers):
        way = Way(model, dtype, contextlib.nullcontext)
        backend = way.host._backend
        found: dict[str, list[Sample]] = {job.name: [] for job in jobs}
        for _ in range(rounds + 1):
            for job in jobs:
                peaks = machine.peaks()
                way.host._backend = backend
                whole, alone, in_one = way.run(job), products.take().seconds, layers.take().seconds
                way.host._backend = TimedAttention(backend, attention)
                way.run(job)
                rest = Part(whole - alone - (in_one or attention.seconds))
                parts = {"products": products.take(), "attention": attention.take(), "rest": rest}
                found[job.name].append(Sample(parts, peaks))
    return {name: samples[1:] for name, samples in found.items()}


def report(found: dict[str, list[Sample]]) -> Iterator[str]:
    """The table: medians over the rounds, the lowest time in brackets, and the roofline's share in each round."""
    yield (
        f"{'step':<30}{'part':<11}{'CPU ms':>16}{'GFLOP':>9}{'MB':>8}{'FLOP/byte':>11}"
        f"{'GFLOP/s':>9}{'GB/s':>7}{'bound by':>12}{'share of roofline':>22}"
    )
    for name, samples in found.items():
        for part in samples[0].parts:
            of_part = [(sample.parts[part], sample.peaks) for sample in samples]
            times = [own.seconds for own, _ in of_part]
            seconds, own = statistics.median(times), of_part[0][0]
            line = f"{name:<30}{part:<11}{f'{1e3 * seconds:.1f} ({1e3 * min(times):.1f})':>16}"
            if own.bytes:
                intensity = own.flop / own.bytes
                ridge = statistics.median(peaks.flop_s / peaks.bytes_s for _, peaks in of_part)
                shares = [peaks.roofline_s(own) / own.seconds for own, peaks in of_part]
                line += f"{1e-9 * own.flop:>9.2f}{1e-6 * own.bytes:>8.0f}{intensity:>11.1f}"
                line += f"{1e-9 * own.flop / seconds:>9.0f}{1e-9 * own.bytes / seconds:>7.1f}"
                line += f"{'memory' if intensity < ridge else 'operations':>12}"
                line += f"{f'{statistics.median(shares):.2f} ({min(shares):.2f}-{max(shares):.2f})':>22}"
            yield line
            name = ""
    peaks = [sample.peaks for samples in found.values() for sample in samples]
    for what, unit, values in (
        ("product of 1024 x 1024 x 1024", "GFLOP/s", [1e-9 * peak.flop_s for peak in peaks]),
        ("memory read", "GB/s", [1e-9 * peak.bytes_s for peak in peaks]),
    ):
        yield f"peak of this run, {what}: {statistics.median(values):.4g} {unit} ({min(values):.4g}-{max(values):.4g})"


def main() -> None:
    """Measure and print, in a process with a stage's environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"], help="default bfloat16")
    parser.add_argument("--rounds", type=int, default=7, help="after one to warm up (default 7)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.child:
        command = [sys.executable, "-m", "tests.bench.roofline", *sys.argv[1:], "--child"]
        raise SystemExit(subprocess.run(command, env=os.environ | compute_environment(1)).returncode)
    print(f"{cpu_name()}, {options.dtype}, one thread, load average {os.getloadavg()[0]:.1f} before", flush=True)
    model, machine = asyncio.run(resolve()).path, Machine(options.dtype)
    found = measure(model, options.dtype, JOBS, rounds=options.rounds, machine=machine)
    print(*report(found), sep="\n")


if __name__ == "__main__":
    main()
