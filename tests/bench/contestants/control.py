"""The control of tests.bench.peers for one core: a small matrix product, again and again, while others are measured.

What it takes longer at one time than at another, the machine does. It counts CPU time, so it does not matter that it
shares the core with what is measured, from which it takes about 2%. python control.py CORE
"""

from __future__ import annotations

import json
import os
import select
import sys
import time

PERIOD_S = 0.025
PRODUCTS = 3  # 0.15 ms
CAP = 4.0  # times the quickest: a sample that an interrupt hit says nothing more


def main(core: int) -> None:
    """Say that it is ready, then answer every line with the mean seconds of a sample since the line before."""
    os.sched_setaffinity(0, {core})
    import torch

    torch.set_num_threads(1)
    left, right = torch.ones(128, 256, dtype=torch.bfloat16), torch.ones(128, 256, dtype=torch.bfloat16).t()

    def sample() -> float:
        torch.mm(left, right)  # its caches
        begin = time.thread_time()
        for _ in range(PRODUCTS):
            torch.mm(left, right)
        return time.thread_time() - begin

    quickest = min(sample() for _ in range(1000))
    print("ANSWER", json.dumps({"ready": True}), flush=True)
    samples: list[float] = []
    while True:
        if select.select([sys.stdin], [], [], PERIOD_S)[0]:
            if not sys.stdin.readline():
                return
            samples = samples or [sample()]
            print("ANSWER", json.dumps({"seconds": sum(samples) / len(samples)}), flush=True)
            samples.clear()
        samples.append(min(sample(), CAP * quickest))


if __name__ == "__main__":
    main(int(sys.argv[1]))
