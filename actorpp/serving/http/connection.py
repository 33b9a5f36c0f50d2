"""Work for a client that may go away: it is cancelled as soon as the connection closes. And server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has closed the connection: nobody is left to answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``. Call it when the request's body has been read.

    Raises:
        ClientGoneError: The client left first; ``work`` has been cancelled and has ended.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return await working
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of server-sent events, each written as soon as it is there.

    Args:
        frames: Events, whole; closed when the client leaves.
        keep_alive_s: Seconds of silence after which a comment is sent, again and again; 0 sends none.
        on_end: Called once, however it ends.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes], *, keep_alive_s: float, on_end: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._keep_alive_s = keep_alive_s
        self._on_end = on_end
        self._written = 0.0  # when, on the loop's clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._write_all(send))
        except ClientGoneError:
            pass  # what it asked for is aborted by ``on_end``
        finally:
            self._on_end()

    async def _write_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        now = asyncio.get_running_loop().time
        self._written = now()
        keeping = asyncio.create_task(self._keep_alive(send)) if self._keep_alive_s else None
        try:
            async with aclosing(self._frames) as frames:
                async for frame in frames:
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
                    self._written = now()
        finally:
            if keeping is not None:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        """A frame is handed to the socket whole before ``send`` first waits, so a comment never falls into one."""
        now = asyncio.get_running_loop().time
        while True:
            silent = now() - self._written
            if silent >= self._keep_alive_s:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                self._written, silent = now(), 0.0
            await asyncio.sleep(self._keep_alive_s - silent)
