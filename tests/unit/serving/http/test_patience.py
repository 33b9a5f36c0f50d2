"""Clients that stand still: bounded in time and memory, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from actorpp.config import EngineConfig
from actorpp.serving.gateway import Gateway
from tests.unit.serving.fakes import FakeCheckpoint, FakeEngine
from tests.unit.serving.http.support import client_of

TOKENS = 30_000  # answers of over 6 MB, more than the system buffers
SHORT = {"prompt": [5, 6], "max_tokens": 2}


async def stuck(port: int, path: str, body: bytes, *, sent: int | None = None) -> socket.socket:
    """A client that has sent a request, or the first bytes of one, and does nothing more."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", port))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    await loop.sock_sendall(client, (head.encode() + body)[:sent])
    return client


async def rest_of(client: socket.socket) -> int:
    """Bytes until the connection has ended."""
    received = 0
    with client, contextlib.suppress(ConnectionResetError):
        while data := await asyncio.get_running_loop().sock_recv(client, 1 << 16):
            received += len(data)
    return received


Body = Callable[[httpx.AsyncClient, FakeEngine], Coroutine[Any, Any, None]]


def serve(tokenizer_file: Path, body: Body, *, patience_s: float) -> None:
    async def main() -> None:
        engine = FakeEngine(EngineConfig(), checkpoint=FakeCheckpoint(tokenizer_file), context_length=2 * TOKENS)
        engine.answer = lambda prompt_ids: [7] * (TOKENS if len(prompt_ids) == 1 else 2)
        async with engine, Gateway(engine, "fake") as gateway, client_of(gateway, patience_s=patience_s) as client:
            await body(client, engine)

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_who_does_not_read_loses_the_request(tokenizer_file: Path, stream: bool) -> None:
    async def body(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        fields = {"prompt": [5], "max_tokens": TOKENS, "stream": stream, "logprobs": None if stream else 4}
        port = client.base_url.port or 0
        reader = await stuck(port, "/v1/completions", json.dumps(fields).encode())
        await engine.reached["decode"].wait()
        others = 0
        while engine.running or others < 3:
            answer = await client.post("/v1/completions", json=SHORT)
            assert answer.json()["usage"]["completion_tokens"] == 2
            others += 1
        assert await rest_of(reader) < 6_000_000
        if stream:
            await engine.submitted[0].aborted.wait()

    serve(tokenizer_file, body, patience_s=0.2)


@pytest.mark.parametrize("sent", [0, 20, 90])
def test_who_does_not_finish_the_request_loses_the_connection(tokenizer_file: Path, sent: int) -> None:
    async def body(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        port = client.base_url.port or 0
        sender = await stuck(port, "/v1/completions", b"x" * 1000, sent=sent)
        async with asyncio.timeout(20):
            assert await rest_of(sender) == 0
        assert (await client.post("/v1/completions", json=SHORT)).status_code == 200

    serve(tokenizer_file, body, patience_s=0.2)


def test_who_waits_for_an_answer_stands_not_still(tokenizer_file: Path) -> None:
    async def body(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.hold = frozenset({"prefill"})
        asking = asyncio.create_task(client.post("/v1/completions", json=SHORT))
        await engine.reached["prefill"].wait()
        asyncio.get_running_loop().call_later(0.3, engine.release)
        assert (await asking).status_code == 200

    serve(tokenizer_file, body, patience_s=0.1)
