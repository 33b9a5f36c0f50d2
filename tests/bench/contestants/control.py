"""The control of tests.bench.peers: the same matrix products every time, on as many threads as there are cores. What it
takes longer in one round than in another, the machine does. python control.py CORES"""

from __future__ import annotations

import json
import os
import sys
import time


def main(cores: list[int]) -> None:
    """Say that it is ready, then answer every line with the seconds that the work took."""
    os.sched_setaffinity(0, set(cores))
    import torch

    torch.set_num_threads(len(cores))
    left, right = torch.ones(1024, 1024), torch.ones(1024, 1024)
    print("ANSWER", json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        for _ in range(40):
            torch.mm(left, right)
        print("ANSWER", json.dumps({"seconds": time.perf_counter() - begin}), flush=True)


if __name__ == "__main__":
    main([int(core) for core in sys.argv[1].split(",")])
