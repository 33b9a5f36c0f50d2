"""Many clients at once over both doors, some slow, some vanishing; and a long prompt among short ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgpack
import zmq
import zmq.asyncio

from actorpp.serving.gateway import Gateway
from actorpp.serving.looplag import LoopLag
from actorpp.serving.zmq_server import ZmqServer
from tests.unit.engine.support import served
from tests.unit.serving.http.support import client_of, events_of

CLIENTS = 64
TOKENS = 6


def fields_of(client: int) -> dict[str, Any]:
    """A request whose answer can be no one else's: the one token that it makes likely."""
    own = 40 + client
    return {"prompt": [own, 5, 9, 30], "max_tokens": TOKENS, "logit_bias": {str(own): 100}, "ignore_eos": True,
            "temperature": 0}  # fmt: skip


@asynccontextmanager
async def both_doors(gateway: Gateway) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    async with client_of(gateway) as http, ZmqServer("127.0.0.1", 0) as server:
        serving = asyncio.create_task(server.serve(gateway))
        try:
            yield http, server.endpoint
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


async def over_http(http: httpx.AsyncClient, client: int, own: str, others: asyncio.Event, kind: str) -> None:
    """``slow``: reads no further than the first event until the others are done. ``gone``: leaves after it."""
    request = fields_of(client) | {"stream": True}
    async with http.stream("POST", "/v1/completions", json=request) as response:
        text = ""
        async for part in response.aiter_text():
            text += part
            if kind == "gone":
                return
            if kind == "slow":
                await others.wait()
    chunks = events_of(text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == own * TOKENS


def zmq_message(client: int, **header: Any) -> list[bytes]:
    fields = fields_of(client)
    fields["prompt_tokens"] = fields.pop("prompt")
    header = {"id": f"client-{client}", "op": "generate", **header}
    return [b"ACTORPP1", msgpack.packb(header), msgpack.packb(fields)]


async def over_zmq(context: zmq.asyncio.Context, endpoint: str, client: int, own: int) -> None:
    with context.socket(zmq.REQ) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        await socket.send_multipart(zmq_message(client))
        _, reply, answer, *_ = await socket.recv_multipart()
        assert msgpack.unpackb(reply)["status"] == "ok", msgpack.unpackb(answer)
        assert msgpack.unpackb(answer)["token_ids"] == [own] * TOKENS


async def over_zmq_stream(
    context: zmq.asyncio.Context, endpoint: str, client: int, own: int, others: asyncio.Event, kind: str
) -> None:
    """A DEALER with credit for one reply: ``slow`` gives more once the others are done, ``gone`` leaves after it."""
    with context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        await socket.send_multipart([b"", *zmq_message(client, credit=1)])
        ids: list[int] = []
        status = "more"
        while status == "more":
            _, _, reply, answer, *_ = await socket.recv_multipart()
            header, body = msgpack.unpackb(reply), msgpack.unpackb(answer)
            if header["id"] != f"client-{client}":
                continue  # credit was taken
            status = header["status"]
            assert status in ("more", "end"), body
            ids += body["token_ids"]
            if kind == "gone":
                return
            if kind == "slow":
                await others.wait()
            if status == "more":
                more = {"id": f"more-{client}", "op": "credit", "credit": 1}
                request = {"request": f"client-{client}"}
                await socket.send_multipart([b"", b"ACTORPP1", msgpack.packb(more), msgpack.packb(request)])
        assert ids == [own] * TOKENS


def test_every_client_gets_its_own_answer_and_pages_return_to_zero(model: Path) -> None:
    async def body(gateway: Gateway) -> None:
        lag = LoopLag()
        measuring = asyncio.create_task(lag.run())
        others, done = asyncio.Event(), 0
        context = zmq.asyncio.Context()
        async with both_doors(gateway) as (http, endpoint):

            async def ask(client: int) -> None:
                nonlocal done
                own = 40 + client
                kind = {0: "slow", 1: "slow", 2: "gone", 3: "gone"}.get(client % 16, "")
                if client % 2 == 0:
                    await over_http(http, client, gateway.token_text(own), others, kind)
                elif client % 4 == 1 or kind:
                    await over_zmq_stream(context, endpoint, client, own, others, kind)
                else:
                    await over_zmq(context, endpoint, client, own)
                if kind == "slow":
                    return
                done += 1
                if done == CLIENTS - CLIENTS // 8:  # all but the slow
                    others.set()

            async with asyncio.TaskGroup() as clients:
                for client in range(CLIENTS):
                    clients.create_task(ask(client))
        context.term()
        measuring.cancel()
        await asyncio.gather(measuring, return_exceptions=True)
        # Stages and clients run in this process too: tests/bench/load.py measures the driver alone.
        print(f"longest stall of the loop: {1000 * lag.longest_s:.1f} ms")

    served(model, body, max_queued_requests=CLIENTS)


def test_a_long_prompt_holds_up_short_requests_by_a_few_chunks(model: Path) -> None:
    async def body(gateway: Gateway) -> None:
        long = {"prompt": [(7 * n) % 300 + 5 for n in range(1000)], "max_tokens": 1, "stream": True}
        async with client_of(gateway) as client:
            lines: asyncio.Queue[str] = asyncio.Queue()

            async def ask_long() -> None:
                request = long | {"return_progress": True, "temperature": 0}
                async with client.stream("POST", "/v1/completions", json=request) as response:
                    async for line in response.aiter_lines():
                        lines.put_nowait(line)

            asking = asyncio.create_task(ask_long())
            first = json.loads((await lines.get()).removeprefix("data: "))["prompt_progress"]
            assert first["processed"] < first["total"] == 1000
            before = gateway.stats().steps
            short = {"prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0}
            assert (await client.post("/v1/completions", json=short)).status_code == 200
            stats = gateway.stats()
            assert stats.steps - before <= 4 * stats.window  # of the 125 chunks of the long one
            assert not asking.done()
            await asking

    served(model, body, chunked_prefill_size=8, max_running_requests=4, context_length=1010)
