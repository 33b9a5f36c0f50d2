"""Clients at both doors of a server at once: is every answer its own, and how long is the driver's loop held up?

    python -m tests.bench.load [--stages 2] [--clients 64] [--long-tokens 8000]

Half of the clients come over HTTP, half over ZeroMQ; some read slowly, some vanish. Then a long prompt runs alone, and
short requests come while it does: their times to the first token are compared with those without it. Last comes a body
of 5 MB. Exits with 1 when an answer was not its client's own, pages stayed in use, or the loop was held for 50 ms; how
long it waited for a CPU, which clients and stages use as well, is the machine's affair.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from typing import Any

import httpx
import msgpack
import zmq
import zmq.asyncio

from tests.support.cli import running

STALL_LIMIT_S = 0.05
SHORTS = 12


async def over_http(http: httpx.AsyncClient, own: int, text: str, tokens: int, kind: str) -> bool:
    fields = request_of(own, tokens) | {"stream": True}
    seen = ""
    async with http.stream("POST", "/v1/completions", json=fields) as response:
        async for line in response.aiter_lines():
            if kind == "gone":
                return True
            if kind == "slow":
                await asyncio.sleep(0.05)
            if line.startswith("data: {"):
                seen += json.loads(line[6:])["choices"][0]["text"]
    return seen == text * tokens


async def over_zmq(context: zmq.asyncio.Context, endpoint: str, own: int, tokens: int) -> bool:
    with context.socket(zmq.REQ) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        body: dict[str, Any] = request_of(own, tokens)
        body["prompt_tokens"] = body.pop("prompt")
        header = {"id": f"load-{own}", "op": "generate"}
        await socket.send_multipart([b"ACTORPP1", msgpack.packb(header), msgpack.packb(body)])
        _, _, answer, *_ = await socket.recv_multipart()
        return bool(msgpack.unpackb(answer).get("token_ids") == [own] * tokens)


def request_of(own: int, tokens: int) -> dict[str, Any]:
    """The answer can be no one else's: the one token that it makes likely."""
    return {
        "prompt": [own, 5, 9, 30] * 8, "max_tokens": tokens, "logit_bias": {str(own): 100}, "ignore_eos": True,
        "temperature": 0,
    }  # fmt: skip


async def figures(http: httpx.AsyncClient) -> dict[str, float]:
    lines = (await http.get("/metrics")).text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


async def short_ttfts(http: httpx.AsyncClient, until: asyncio.Task[Any] | None) -> list[float]:
    """Of one request after the other, as many as SHORTS, or until the task is done."""
    times: list[float] = []
    while len(times) < SHORTS and not (until and until.done()):
        began = time.perf_counter()
        await http.post("/v1/completions", json={"prompt": [5, 6, 7, 8], "max_tokens": 1, "temperature": 0})
        times.append(time.perf_counter() - began)
    return times


async def load(url: str, endpoint: str, options: argparse.Namespace) -> int:
    bad = 0
    limits = httpx.Limits(max_connections=2 * options.clients)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        texts = {}
        for own in range(1000, 1000 + options.clients):
            texts[own] = (await http.post("/detokenize", json={"tokens": [own]})).json()["prompt"]
        context = zmq.asyncio.Context()
        began = time.perf_counter()
        kinds = {0: "slow", 8: "gone"}
        answers = await asyncio.gather(
            *(
                over_zmq(context, endpoint, own, options.tokens)
                if own % 2
                else over_http(http, own, texts[own], options.tokens, kinds.get(own % 16, ""))
                for own in texts
            )
        )
        context.term()
        print(f"{options.clients} clients, {options.tokens} tokens each: {time.perf_counter() - began:.1f} s")
        bad += answers.count(False)
        print(f"answers that were not their client's own: {answers.count(False)}")
        alone = await short_ttfts(http, None)
        before, began = await figures(http), time.perf_counter()
        long = {"prompt": [(7 * n) % 30000 + 100 for n in range(options.long_tokens)], "max_tokens": 1}
        running_long = asyncio.create_task(http.post("/v1/completions", json=long))
        beside = await short_ttfts(http, running_long)
        await running_long
        took, after = time.perf_counter() - began, await figures(http)
        steps = after["actorpp_chunk_tokens_count"] - before["actorpp_chunk_tokens_count"]
        print(
            f"short requests: TTFT median {1000 * statistics.median(alone):.0f} ms alone; beside a prompt of "
            f"{options.long_tokens} tokens {1000 * statistics.median(beside):.0f} ms, {1000 * max(beside):.0f} at most "
            f"({len(beside)} of them, in {took:.1f} s of {steps:.0f} steps with prompts, "
            f"{after['actorpp_steps_window']:.0f} of them in flight at most)"
        )
        body = json.dumps({"prompt": "The cat sat on the mat. " * (5 * 2**20 // 24), "max_tokens": 1})
        big = asyncio.create_task(http.post("/v1/completions", content=body))
        beside_big = await short_ttfts(http, big)
        print(
            f"beside a text of 5 MB ({(await big).status_code}): median {1000 * statistics.median(beside_big):.0f} ms, "
            f"{1000 * max(beside_big):.0f} ms at most"
        )
        told = await figures(http)
        stall = told["actorpp_event_loop_longest_held_seconds"]
        print(
            f"longest stall of the driver's loop: {1000 * told['actorpp_event_loop_longest_stall_seconds']:.1f} ms; "
            f"{1000 * stall:.1f} ms without waiting for a CPU (limit {1000 * STALL_LIMIT_S:.0f})"
        )
        print(f"KV pages in use at the end: {told['actorpp_kv_cache_usage_perc']:.0%}")
        return int(bad > 0 or stall >= STALL_LIMIT_S or told["actorpp_kv_cache_usage_perc"] > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default="2")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--long-tokens", type=int, default=8000)
    options = parser.parse_args()
    flags = ["--stages", options.stages, "--json", "--max-queued-requests", "1000"]
    with running("run", *flags, environment=dict(os.environ)) as server:
        server.wait_for("context_length")
        about = json.loads(server.stdout)
        return asyncio.run(load(about["http"], about["endpoint"], options))


if __name__ == "__main__":
    sys.exit(main())
