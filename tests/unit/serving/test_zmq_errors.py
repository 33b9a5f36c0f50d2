"""What is refused, and that every message, whatever its bytes, gets exactly one last reply."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import msgpack
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from actorpp.config import EngineConfig
from actorpp.serving.gateway import Gateway
from actorpp.serving.zmq_server import ZmqServer
from tests.unit.serving.fakes import FakeEngine
from tests.unit.serving.zmq_client import MAGIC, PROMPT, Setup, serve


@pytest.mark.parametrize(
    ("op", "body", "code", "param"),
    [
        ("fly", {}, "invalid_request", "op"),
        ("generate", {}, "invalid_request", "prompt"),
        ("generate", {"prompt_tokens": [1], "top_p": 7}, "invalid_request", "top_p"),
        ("generate", {"prompt_tokens": []}, "invalid_request", "prompt"),
        ("submit", {"prompt_tokens": [1] * 600}, "context_length_exceeded", "prompt"),
        ("poll", {}, "invalid_request", "request"),
        ("poll", {"request": "nobody"}, "invalid_request", "request"),
        ("poll", {"request": "x", "wait_ms": 10**9}, "invalid_request", "wait_ms"),
        ("abort", {"request": 1.5}, "invalid_request", "request"),
    ],
)
def test_errors_are_objects(op: str, body: dict[str, Any], code: str, param: str) -> None:
    async def check(setup: Setup) -> None:
        header, error, _ = await setup.once(op, body, id="e")
        assert (header["id"], header["status"]) == ("e", "error")
        assert set(error) == {"code", "message", "param", "retryable", "retry_after_ms", "stage"}
        assert (error["code"], error["param"], error["retryable"]) == (code, param, False)
        assert error["retry_after_ms"] is error["stage"] is None

    serve(check)


def good(**changes: Any) -> list[bytes]:
    return [MAGIC, msgpack.packb({"id": "g", "op": "ping", **changes}), msgpack.packb({})]


GARBAGE = {
    "one frame": [b"hello"],
    "an empty frame": [b""],
    "wrong magic": [b"ACTORPP9", *good()[1:]],
    "no body": good()[:2],
    "header not msgpack": [MAGIC, b"\xc1", b"\x80"],
    "header not a map": [MAGIC, msgpack.packb([1]), b"\x80"],
    "body not a map": [*good()[:2], msgpack.packb(5)],
    "body cut off": [*good()[:2], b"\x85\xa1"],
    "no id": [MAGIC, msgpack.packb({"op": "ping"}), b"\x80"],
    "a long id": good(id="x" * 200),
    "id of another type": good(id=[1]),
    "deadline of another type": good(deadline_ms="soon"),
    "too many frames": [*good(), *[b""] * 20],
    "a deep body": [*good()[:2], b"\x81\xa1x" * 500 + b"\xc0"],
    "a header over its limit": [MAGIC, msgpack.packb({"id": "g", "op": "ping", "x": "y" * 5000}), b"\x80"],
    "announced items that do not come": [*good()[:2], b"\xdf\xff\xff\xff\xff"],
    "a pickle": [MAGIC, pickle.dumps({"id": "g", "op": "ping"}), pickle.dumps({})],
    "invalid UTF-8": [MAGIC, b"\x82\xa2id\xa1\xff\xa2op\xa4ping", b"\x80"],
}


def test_a_req_peer_gets_one_error_for_each_undecodable_message() -> None:
    async def body(setup: Setup) -> None:
        client = setup.client()
        for name, frames in GARBAGE.items():
            client.socket.send_multipart(frames)
            header, error, _ = await asyncio.to_thread(client.receive)
            assert header["status"] == "error", name
            assert error["code"] == "protocol_error", name
            assert not error["retryable"]
        assert (await setup.ask(client, "ping"))[0]["status"] == "ok"
        _, stats, _ = await setup.ask(client, "stats")
        assert stats["server"]["protocol_errors"] == len(GARBAGE)

    serve(body)


def test_an_undecodable_message_is_answered_under_its_id_where_that_can_be_read() -> None:
    async def body(setup: Setup) -> None:
        client = setup.client()
        client.socket.send_multipart([*good()[:2], b"\xc1"])
        assert (await asyncio.to_thread(client.receive))[0]["id"] == "g"
        client.socket.send_multipart([MAGIC, b"\xc1", b"\x80"])
        assert (await asyncio.to_thread(client.receive))[0]["id"] is None

    serve(body)


@pytest.mark.parametrize(("routing", "code"), [(8, None), (9, "protocol_error")])
def test_routing_frames_come_back_and_are_bounded(routing: int, code: str | None) -> None:
    async def body(setup: Setup) -> None:
        client = setup.client(zmq.DEALER)
        route = [bytes([65 + hop]) for hop in range(routing)]
        client.socket.send_multipart([*route, b"", *good()])
        *back, _, _, reply = await asyncio.to_thread(client.socket.recv_multipart)
        assert msgpack.unpackb(reply).get("code") == code
        assert back == ([*route, b""] if code is None else [b""])

    serve(body)


@given(st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=6), min_size=1, max_size=20))
@settings(max_examples=25, deadline=None)
def test_any_frames_get_exactly_one_reply_each(messages: list[list[bytes]]) -> None:
    async def body(setup: Setup) -> None:
        client = setup.client(zmq.DEALER)
        for frames in messages:
            client.socket.send_multipart([b"", *frames])
        for _ in messages:
            delimiter, *_ = await asyncio.to_thread(client.socket.recv_multipart)
            assert delimiter == b""
        client.socket.send_multipart([b"", *good(id="last")])
        _, _, header, *_ = await asyncio.to_thread(client.socket.recv_multipart)
        assert msgpack.unpackb(header)["id"] == "last"  # nothing extra came before it

    serve(body)


def test_before_and_after_serving_every_message_gets_a_retryable_error() -> None:
    async def main() -> None:
        engine = FakeEngine(EngineConfig(), hold=frozenset({"decode"}))
        async with ZmqServer("127.0.0.1", 0) as server, engine, Gateway(engine, "fake") as gateway:
            setup = Setup(engine, server)
            header, error, _ = await setup.once("ping")
            assert (header["status"], error["code"], error["retryable"]) == ("error", "overloaded", True)
            serving = asyncio.create_task(server.serve(gateway))
            waiting = asyncio.create_task(setup.once("generate", PROMPT))
            await engine.reached["decode"].wait()
            serving.cancel()
            header, error, _ = await waiting
            assert (header["status"], error["code"]) == ("error", "aborted")
            await asyncio.gather(serving, return_exceptions=True)
            assert not engine.running
            assert (await setup.once("ping"))[1]["retryable"]
            for client in setup.clients:
                client.close()

    asyncio.run(main())


def test_a_fault_of_the_server_is_told_to_its_client_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: FakeEngine) -> None:
        raise RuntimeError("a fault")

    async def body(setup: Setup) -> None:
        monkeypatch.setattr(FakeEngine, "stats", broken)
        client = setup.client()
        header, error, _ = await setup.ask(client, "stats")
        assert (header["status"], error["code"]) == ("error", "internal")
        assert (await setup.ask(client, "ping"))[0]["status"] == "ok"

    serve(body)


def test_very_long_lists_are_refused_in_favour_of_buffers() -> None:
    async def check(setup: Setup) -> None:
        header, error, _ = await setup.once("submit", {"prompt_tokens": [1] * 300_000}, id="list")
        assert (header["status"], error["code"]) == ("error", "protocol_error")
        assert "long lists of ids travel as raw buffers" in error["message"]
        ids = (1).to_bytes(4, "little") * 300_000
        header, error, _ = await setup.once("submit", {"prompt_tokens_buffer": 0}, ids, id="buffer")
        assert (header["status"], error["code"]) == ("error", "context_length_exceeded")
        assert "300000 tokens" in error["message"]

    serve(check)
