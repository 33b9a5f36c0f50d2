"""vLLM for CPUs as a contestant of tests.bench.peers, for a Python that has it: peer_vllm.py MODEL DTYPE CORES PP CHUNK

With PP 1 one process has a thread on each core; with more each stage has one. With a text as last argument: complete it
by one token, and end.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time


def main(model: str, dtype: str, cores: list[int], stages: int, chunk: int, text: str | None) -> None:
    """Load, say so, answer jobs from stdin until it closes."""
    os.environ.update(
        VLLM_CPU_OMP_THREADS_BIND=("|" if stages > 1 else ",").join(map(str, cores)),
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
    )
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype=dtype,
        pipeline_parallel_size=stages,
        max_model_len=8192,
        max_num_batched_tokens=chunk,
        enable_chunked_prefill=True,
        enable_prefix_caching=False,
        distributed_executor_backend="mp" if stages > 1 else None,
    )
    if text is not None:
        llm.generate([text], SamplingParams(max_tokens=1, temperature=0))
        print("ANSWER", json.dumps({"ready": True}), flush=True)
        return
    print("ANSWER", json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        source = random.Random(job["seed"])
        prompts = [{"prompt_token_ids": source.choices(range(100, 40000), k=job["isl"])} for _ in range(job["count"])]
        params = SamplingParams(max_tokens=job["osl"], temperature=0, ignore_eos=True)
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        tokens = job["count"] * job["osl"]
        print("ANSWER", json.dumps({"seconds": seconds, "ttft": seconds, "tokens_s": tokens / seconds}), flush=True)


if __name__ == "__main__":
    _, path, kind, bound, pipeline, size, *rest = sys.argv
    main(path, kind, [int(core) for core in bound.split(",")], int(pipeline), int(size), rest[0] if rest else None)
