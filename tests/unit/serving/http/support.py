"""An HTTP server on loopback, over the fake engine or over a real one whose stages run on the same loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from actorpp.serving.gateway import Gateway
from actorpp.serving.http.server import HttpServer


@contextlib.asynccontextmanager
async def serving(gateway: Gateway, **options: Any) -> AsyncIterator[str]:
    """The server's URL, while it serves."""
    with HttpServer("127.0.0.1", 0, **options) as server:
        task = asyncio.create_task(server.serve(gateway))
        try:
            yield server.url
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@contextlib.asynccontextmanager
async def client_of(gateway: Gateway, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(gateway, **options) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        yield client


def events_of(text: str) -> list[Any]:
    """The JSON of every event but the closing [DONE], which must be there; framing is checked."""
    assert text.endswith("\n\n")
    frames = text[:-2].split("\n\n")
    assert all("\n" not in frame for frame in frames)
    datas = [frame.removeprefix("data: ") for frame in frames if not frame.startswith(":")]
    assert datas.pop() == "[DONE]"
    return [json.loads(data) for data in datas]
