"""What vLLM for CPUs does when one of two pipeline stages is killed in mid-prefill; for a Python that has it.

    VENV/bin/python tests/faults/peer_vllm.py MODEL

One prompt is timed; then four are asked for, and half that time later the second stage's process gets SIGKILL. Printed:
what the caller was told and after how long, whether the engine takes another request, and which processes are left.
docs/performance.md says how vLLM is installed; the only things needed besides are what it requires itself.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time

import psutil

TOKENS = 8000
PATIENCE_S = 120.0
LEFT_S = 10.0


def say(words: str) -> None:
    print(f"OBSERVED {words}", flush=True)


def children() -> dict[int, str]:
    """By process id, what each child of this process calls itself."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        try:
            found[child.pid] = " ".join(child.cmdline())[:60] or child.name()
        except psutil.Error:
            continue
    return found


def main(model: str) -> None:
    """Start, kill, look."""
    os.environ.update(
        VLLM_CPU_OMP_THREADS_BIND="0|1", VLLM_CPU_KVCACHE_SPACE="2", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
    )  # fmt: skip
    import vllm

    llm = vllm.LLM(
        model=model,
        dtype="bfloat16",
        pipeline_parallel_size=2,
        max_model_len=8192,
        max_num_batched_tokens=1024,
        enable_chunked_prefill=True,
        enable_prefix_caching=False,
        distributed_executor_backend="mp",
    )
    source = random.Random(0)
    prompts = [{"prompt_token_ids": source.choices(range(100, 40000), k=TOKENS)} for _ in range(4)]
    params = vllm.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    began = time.monotonic()
    llm.generate(prompts[:1], params, use_tqdm=False)
    alone = time.monotonic() - began
    say(f"vLLM {vllm.__version__}: a prompt of {TOKENS} tokens alone takes {alone:.1f} s")
    workers = {pid: name for pid, name in children().items() if "Worker" in name}
    say(f"processes: {children()}")
    struck = [0.0]

    def strike() -> None:
        struck[0] = time.monotonic()
        os.kill(max(workers), signal.SIGKILL)

    threading.Timer(alone / 2, strike).start()
    threading.Timer(alone / 2 + PATIENCE_S, give_up).start()
    for asked in ("the four requests in flight", "another request"):
        try:
            llm.generate(prompts if struck[0] == 0 else prompts[:1], params, use_tqdm=False)
            say(f"{asked}: answered")
        except BaseException as error:
            after = time.monotonic() - struck[0]
            say(f"{asked}: {after:.1f} s after the kill {type(error).__name__}: {str(error).splitlines()[0][:200]}")
    time.sleep(LEFT_S)
    say(f"processes left {LEFT_S:.0f} s later: {children()}")
    os._exit(0)


def give_up() -> None:
    """Nobody was told anything."""
    say(f"no answer and no error within {PATIENCE_S:.0f} s of the kill; processes: {children()}")
    for pid in children():
        os.kill(pid, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
