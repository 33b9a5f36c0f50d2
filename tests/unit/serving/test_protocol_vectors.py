"""The golden bytes of docs/protocol.md: they say what stands beside them, and the server answers with just them."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import msgpack
import pytest

from tests.unit.serving.zmq_client import MAGIC, Setup, serve

PAGE = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
VECTORS = re.findall(r"^(\w[^\n]*):\n\n```vector\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
LINE = re.compile(r"^(request|reply) (header|body|buffer) ([0-9a-f]+)$(?:\n    (.*)$)?", re.MULTILINE)


def frames(vector: str, who: str) -> list[bytes]:
    return [bytes.fromhex(match[3]) for match in LINE.finditer(vector) if match[1] == who]


def test_there_are_vectors_and_each_line_is_read() -> None:
    assert len(VECTORS) == 5
    for _, vector in VECTORS:
        assert LINE.sub("", vector).strip() == ""


@pytest.mark.parametrize("vector", [vector for _, vector in VECTORS], ids=[name for name, _ in VECTORS])
def test_the_bytes_say_what_stands_beside_them(vector: str) -> None:
    for match in LINE.finditer(vector):
        if match[2] != "buffer":
            assert msgpack.unpackb(bytes.fromhex(match[3])) == json.loads(match[4])


def test_the_server_answers_with_these_bytes() -> None:
    async def body(setup: Setup) -> None:
        setup.server.boot = "0123456789abcdef"
        setup.engine.hold = frozenset({"decode"})
        client = setup.client()
        for name, vector in VECTORS:
            if name.startswith("Polling"):
                await setup.engine.reached["decode"].wait()
            client.socket.send_multipart([MAGIC, *frames(vector, "request")])
            reply = await asyncio.to_thread(client.socket.recv_multipart)
            assert reply == [MAGIC, *frames(vector, "reply")], name
        setup.engine.release()

    serve(body)
