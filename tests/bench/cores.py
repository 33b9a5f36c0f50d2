"""Do two cores compute matrix products as fast together as each alone? What two stages on one machine can gain at most.

    python -m tests.bench.cores [--cores 0 1] [--rounds 5]

Virtual cores may be the two threads of one core, with one unit for products between them. One process on each core, one
thread each, repeats a product of a prefill step in bfloat16; alone and both at once, in turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

SECONDS = 2.0
ROWS, INNER, COLUMNS = 512, 576, 1536


def products(core: int) -> float:
    """TFLOP/s of this process on the core."""
    import torch

    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    left, right = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((ROWS, INNER), (INNER, COLUMNS)))
    for _ in range(20):
        left @ right
    print("ready", flush=True)
    sys.stdin.readline()
    count, start = 0, time.perf_counter()
    while time.perf_counter() < start + SECONDS:
        left @ right
        count += 1
    return 2e-12 * count * ROWS * INNER * COLUMNS / (time.perf_counter() - start)


def together(cores: list[int]) -> list[float]:
    """TFLOP/s on each of the cores, all at once."""
    command = [sys.executable, "-m", "tests.bench.cores", "--child"]
    children = [
        subprocess.Popen([*command, str(core)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for core in cores
    ]
    for child in children:
        child.stdout.readline()  # type: ignore[union-attr]
    for child in children:
        child.stdin.write("go\n")  # type: ignore[union-attr]
        child.stdin.flush()  # type: ignore[union-attr]
    return [float(child.communicate()[0]) for child in children]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, nargs=2, default=sorted(os.sched_getaffinity(0))[:2], metavar="N")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        print(products(options.child))
        return
    alone, both = [], []
    for _ in range(options.rounds):
        alone.append(together(options.cores[:1])[0])
        both.append(sum(together(options.cores)))
    ratios = [two / one for one, two in zip(alone, both, strict=True)]
    for name, values in (("one core, TFLOP/s", alone), ("both, TFLOP/s", both), ("both / one", ratios)):
        print(f"{name:<20}{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})")


if __name__ == "__main__":
    main()
