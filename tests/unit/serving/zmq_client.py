"""A blocking foreign client of protocol ACTORPP/1, of pyzmq and msgpack only, and a served fake engine for it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgpack
import zmq

from actorpp.config import EngineConfig
from actorpp.serving.gateway import Gateway
from actorpp.serving.jobs import JobLimits
from actorpp.serving.zmq_server import ZmqServer
from tests.unit.serving.fakes import FakeCheckpoint, FakeEngine

MAGIC = b"ACTORPP1"
TIMEOUT_MS = 20_000  # a ceiling: an answer that never comes fails the test

_numbers = itertools.count()


class Client:
    """A blocking foreign client; its methods run in threads."""

    def __init__(self, endpoint: str, kind: int = zmq.REQ, **options: Any) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(kind)
        self.socket.linger = 0
        self.socket.rcvtimeo = TIMEOUT_MS
        for name, value in options.items():
            self.socket.set(getattr(zmq, name), value)
        self.socket.connect(endpoint)

    def close(self) -> None:
        self.context.destroy(linger=0)

    def send(self, op: str, body: Any = None, *buffers: bytes, id: str | int | None = None, **header: Any) -> None:
        header = {"id": f"c{next(_numbers)}" if id is None else id, "op": op, **header}
        self.socket.send_multipart([MAGIC, msgpack.packb(header), msgpack.packb(body or {}), *buffers])

    def receive(self) -> tuple[dict[str, Any], dict[str, Any], list[bytes]]:
        magic, header, body, *buffers = self.socket.recv_multipart()
        assert magic == MAGIC
        return msgpack.unpackb(header), msgpack.unpackb(body), buffers

    def call(self, op: str, body: Any = None, *buffers: bytes, **header: Any) -> Any:
        self.send(op, body, *buffers, **header)
        return self.receive()


class Setup:
    """A served fake engine, and clients for it."""

    def __init__(self, engine: FakeEngine, server: ZmqServer) -> None:
        self.engine, self.server = engine, server
        self.clients: list[Client] = []

    def client(self, kind: int = zmq.REQ, **options: Any) -> Client:
        client = Client(self.server.endpoint, kind, **options)
        self.clients.append(client)
        return client

    async def ask(self, client: Client, op: str, body: Any = None, *buffers: bytes, **header: Any) -> Any:
        return await asyncio.to_thread(client.call, op, body, *buffers, **header)

    async def once(self, op: str, body: Any = None, *buffers: bytes, **header: Any) -> Any:
        return await self.ask(self.client(), op, body, *buffers, **header)


def serve(
    body: Callable[[Setup], Coroutine[Any, Any, None]],
    *,
    tokenizer: Path | None = None,
    job_limits: JobLimits | None = None,
    **server_options: Any,
) -> None:
    async def main() -> None:
        engine = FakeEngine(EngineConfig(), checkpoint=FakeCheckpoint(tokenizer))
        async with (
            ZmqServer("127.0.0.1", 0, job_limits=job_limits, **server_options) as server,
            engine,
            Gateway(engine, "fake") as gateway,
        ):
            setup = Setup(engine, server)
            serving = asyncio.create_task(server.serve(gateway))
            await asyncio.sleep(0)
            try:
                async with asyncio.timeout(60):
                    await body(setup)
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
                for client in setup.clients:
                    client.close()
            assert serving.cancelled()
            assert not engine.running

    asyncio.run(main())


PROMPT = {"prompt_tokens": [1, 2, 3, 4]}
