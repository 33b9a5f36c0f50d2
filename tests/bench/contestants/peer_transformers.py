"""transformers as a contestant of tests.bench.peers, for any Python that has it: peer_transformers.py MODEL DTYPE CORES

One process with a thread on each core; the whole prompt in one forward pass, with SDPA.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time


def main(model: str, dtype: str, cores: list[int]) -> None:
    """Load, say so, answer jobs from stdin until it closes."""
    os.sched_setaffinity(0, set(cores))
    os.environ.update(
        OMP_NUM_THREADS=str(len(cores)),
        OMP_PROC_BIND="close",
        OMP_PLACES=",".join(f"{{{core}}}" for core in cores),
        HF_HUB_OFFLINE="1",
    )
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(cores))
    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    print("ANSWER", json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        source = random.Random(job["seed"])
        ids = torch.tensor([source.choices(range(100, 40000), k=job["isl"]) for _ in range(job["count"])])
        begin = time.perf_counter()
        network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=job["osl"],
            min_new_tokens=job["osl"],
        )
        seconds = time.perf_counter() - begin
        tokens = job["count"] * job["osl"]
        print("ANSWER", json.dumps({"seconds": seconds, "ttft": seconds, "tokens_s": tokens / seconds}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], [int(core) for core in sys.argv[3].split(",")])
