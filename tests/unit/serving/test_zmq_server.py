"""Conformance of the ROUTER to protocol ACTORPP/1, spoken as a foreign client would: pyzmq and msgpack only."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import struct
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from actorpp.config import EngineConfig
from actorpp.errors import ConfigError, StageFailedError
from actorpp.serving import zmq_server
from actorpp.serving.gateway import Gateway
from actorpp.serving.jobs import JobLimits
from actorpp.serving.tokenizer import TextCodec
from actorpp.serving.zmq_server import ZmqServer
from tests.unit.serving.fakes import ANSWER, FakeCheckpoint, FakeEngine

MAGIC = b"ACTORPP1"
TIMEOUT_MS = 20_000  # a ceiling: an answer that never comes fails the test

_numbers = itertools.count()


class Client:
    """A blocking foreign client; its methods run in threads."""

    def __init__(self, endpoint: str, kind: int = zmq.REQ, **options: int) -> None:
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

    def client(self, kind: int = zmq.REQ, **options: int) -> Client:
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
) -> None:
    async def main() -> None:
        engine = FakeEngine(EngineConfig(), checkpoint=FakeCheckpoint(tokenizer))
        async with (
            ZmqServer("127.0.0.1", 0, job_limits=job_limits) as server,
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


# --- operations -------------------------------------------------------------------------------------------------------


def test_hello_ping_stats() -> None:
    async def body(setup: Setup) -> None:
        client = setup.client()
        header, hello, _ = await setup.ask(client, "hello", id="h")
        assert header == {"id": "h", "status": "ok", "seq": 0, "boot": setup.server.boot}
        assert (hello["protocol"], hello["version"], hello["minor"]) == ("ACTORPP", 1, 0)
        assert (hello["model"], hello["context_length"], hello["stages"]) == ("fake", 512, 2)
        assert {"hello", "ping", "submit", "poll", "generate", "abort", "stats"} <= set(hello["features"])
        assert hello["limits"]["max_body_bytes"] == 16 << 20
        assert hello["limits"]["finished_ttl_s"] > 0
        header, pong, _ = await setup.ask(client, "ping", id=7)
        assert (header["id"], header["status"], pong) == (7, "ok", {})
        _, stats, _ = await setup.ask(client, "stats")
        assert stats["engine"]["window"] == 4
        assert stats["server"]["messages"] == 3
        assert stats["server"]["outstanding"] == 1  # this one

    serve(body)


def test_generate_returns_the_whole_result(tokenizer_file: Path) -> None:
    async def body(setup: Setup) -> None:
        ids = TextCodec(tokenizer_file).encode(ANSWER, add_special_tokens=False)
        setup.engine.answer = lambda prompt_ids: ids
        header, result, _ = await setup.once("generate", {"prompt": "the cat", "max_tokens": 90, "unknown": 1})
        assert header["status"] == "ok"
        assert result["text"] == ANSWER
        assert result["token_ids"] == ids
        assert result["finish_reason"] == "stop"
        assert sum(result["metrics"]["chunks"]) == result["prompt_tokens"]

    serve(body, tokenizer=tokenizer_file)


def test_token_ids_travel_as_little_endian_buffers() -> None:
    async def body(setup: Setup) -> None:
        prompt = struct.pack("<4i", 1, 2, 300, 4)
        asked = {"prompt_tokens_buffer": 0, "raw_tokens": True}
        _, result, buffers = await setup.once("generate", asked, prompt)
        assert setup.engine.submitted[0].prompt_ids == [1, 2, 300, 4]
        assert result["token_ids_buffer"] == 0
        assert "token_ids" not in result
        assert struct.unpack("<3i", buffers[0]) == (7, 8, 9)
        for bad, buffer in (({"prompt_tokens_buffer": 1}, prompt), ({"prompt_tokens_buffer": 0}, prompt[:-1])):
            header, error, _ = await setup.once("generate", bad, buffer)
            assert (header["status"], error["param"]) == ("error", "prompt_tokens_buffer")
        header, error, _ = await setup.once("generate", {"prompt_tokens_buffer": 0}, struct.pack("<i", -1))
        assert (header["status"], error["param"]) == ("error", "prompt_tokens")

    serve(body)


def test_submit_then_poll_with_a_cursor() -> None:
    async def body(setup: Setup) -> None:
        setup.engine.hold = frozenset({"decode"})
        client = setup.client()
        header, accepted, _ = await setup.ask(client, "submit", PROMPT, id="job")
        assert (header["status"], accepted) == ("ok", {"request": "job", "prompt_tokens": 4})
        await setup.engine.reached["decode"].wait()
        header, first, _ = await setup.ask(client, "poll", {"request": "job", "wait_ms": 10_000})
        assert header["status"] == "more"
        assert first["token_ids"] == [7, 8]
        assert first["progress"] == {"computed": 4, "total": 4}
        _, again, _ = await setup.ask(client, "poll", {"request": "job"})
        assert again == first  # the cursor is the client's: a lost answer can be asked for again
        header, empty, _ = await setup.ask(client, "poll", {"request": "job", "cursor": first["cursor"], "wait_ms": 1})
        assert (header["status"], empty["token_ids"]) == ("more", [])
        later = {"request": "job", "cursor": first["cursor"], "wait_ms": 60_000}
        waiting = asyncio.create_task(setup.ask(client, "poll", later))
        while (await setup.once("stats"))[1]["server"]["outstanding"] < 2:
            pass
        assert not waiting.done()
        setup.engine.release()
        header, rest, _ = await waiting  # a long poll returns when there is something
        while header["status"] == "more":
            header, rest, _ = await setup.ask(client, "poll", {"request": "job", "cursor": rest["cursor"]})
        assert header["status"] == "end"
        assert rest["finish_reason"] == "stop"
        _, everything, _ = await setup.ask(client, "poll", {"request": "job"})
        assert everything["token_ids"] == [7, 8, 9]
        assert everything["metrics"]["stage_busy"] == [0.9, 0.8]
        header, error, _ = await setup.ask(client, "poll", {"request": "job", "cursor": 99})
        assert (header["status"], error["param"]) == ("error", "cursor")

    serve(body)


def test_log_probabilities_come_with_generate_and_with_poll() -> None:
    async def body(setup: Setup) -> None:
        asked = {**PROMPT, "logprobs": 1, "prompt_logprobs": 0}
        _, result, _ = await setup.once("generate", asked, id="job")
        best = [[0, -0.5]]
        expected = [{"token_id": token, "logprob": -0.5 * token, "rank": 1 + token, "top": best} for token in (7, 8, 9)]
        assert result["logprobs"] == expected
        of_prompt = result["prompt_logprobs"]
        assert of_prompt[0] is None
        assert [(row["token_id"], row["top"]) for row in of_prompt[1:]] == [(2, []), (3, []), (4, [])]
        header, polled, _ = await setup.once("poll", {"request": "job"})
        assert (header["status"], polled["logprobs"], polled["prompt_logprobs"]) == ("end", expected, of_prompt)
        _, plain, _ = await setup.once("generate", PROMPT)
        assert not {"logprobs", "prompt_logprobs"} & set(plain)

    serve(body)


def test_several_outputs_come_with_generate_and_with_poll() -> None:
    async def body(setup: Setup) -> None:
        asked = {**PROMPT, "n": 2, "temperature": 1.0}
        _, result, _ = await setup.once("generate", asked, id="job")
        assert set(result) == {"outputs", "prompt_tokens"}
        assert [output["token_ids"] for output in result["outputs"]] == [[7, 8, 9], [7, 8, 9]]
        header, polled, _ = await setup.once("poll", {"request": "job"})
        assert header["status"] == "end"
        assert "token_ids" not in polled
        for output in polled["outputs"]:
            assert (output["token_ids"], output["finish_reason"]) == ([7, 8, 9], "stop")
        for op, raw in (("generate", {**asked, "raw_tokens": True}), ("poll", {"request": "job", "raw_tokens": True})):
            header, error, _ = await setup.once(op, raw)
            assert (header["status"], error["code"], error["param"]) == ("error", "invalid_request", "raw_tokens")

    serve(body)


def test_abort_in_the_middle_ends_generate_and_poll() -> None:
    async def body(setup: Setup) -> None:
        setup.engine.hold = frozenset({"decode"})
        waiting = asyncio.create_task(setup.once("generate", PROMPT, id="job"))
        await setup.engine.reached["decode"].wait()
        header, reply, _ = await setup.once("abort", {"request": "job"})
        assert (header["status"], reply["request"]) == ("ok", "job")
        header, result, _ = await waiting
        assert (header["status"], result["finish_reason"], result["token_ids"]) == ("ok", "abort", [7, 8])
        header, ended, _ = await setup.once("poll", {"request": "job"})
        assert (header["status"], ended["finish_reason"]) == ("end", "abort")
        _, reply, _ = await setup.once("abort", {"request": "job"})
        assert reply["ended"]
        header, error, _ = await setup.once("abort", {"request": "another"})
        assert (header["status"], error["code"], error["param"]) == ("error", "invalid_request", "request")

    serve(body)


def test_a_deadline_ends_the_wait_with_its_own_error() -> None:
    async def body(setup: Setup) -> None:
        setup.engine.hold = frozenset({"prefill"})
        header, error, _ = await setup.once("generate", PROMPT, deadline_ms=50)
        assert (header["status"], error["code"], error["param"]) == ("error", "deadline_exceeded", "deadline_ms")
        deadline_s = setup.engine.submitted[0].params.deadline_s
        assert deadline_s is not None
        assert deadline_s <= 0.05
        setup.engine.release()

    serve(body)


def test_many_clients_each_get_their_own_answer() -> None:
    def many(client: Client, first: int) -> None:
        numbers = range(first, first + 20)
        for number in numbers:  # all outstanding at once
            client.socket.send(b"", zmq.SNDMORE)
            client.send("generate", {"prompt_tokens": [number]}, id=number)
        for _ in numbers:
            assert client.socket.recv() == b""
            header, result, _ = client.receive()
            assert result["token_ids"] == [header["id"], header["id"] + 1]

    async def body(setup: Setup) -> None:
        setup.engine.capacity = 1000
        setup.engine.answer = lambda prompt_ids: [prompt_ids[0], prompt_ids[0] + 1]
        clients = [setup.client(zmq.DEALER) for _ in range(8)]
        await asyncio.gather(*(asyncio.to_thread(many, client, 100 * n) for n, client in enumerate(clients)))
        assert len(setup.engine.submitted) == 160

    serve(body)


# --- errors -----------------------------------------------------------------------------------------------------------


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


# --- asking again -----------------------------------------------------------------------------------------------------


def test_an_id_used_again_asks_for_the_same_answer() -> None:
    async def body(setup: Setup) -> None:
        first = await setup.once("generate", PROMPT, id="same")
        second = await setup.once("generate", PROMPT, id="same")
        assert first == second
        assert len(setup.engine.submitted) == 1
        header, error, _ = await setup.once("generate", {"prompt_tokens": [9]}, id="same")
        assert (header["status"], error["param"]) == ("error", "id")

    serve(body)


def test_a_req_client_that_timed_out_recovers_and_gets_the_answer() -> None:
    async def body(setup: Setup) -> None:
        setup.engine.hold = frozenset({"decode"})
        client = setup.client(REQ_RELAXED=1, REQ_CORRELATE=1)
        client.send("generate", PROMPT, id="job")
        await setup.engine.reached["decode"].wait()
        client.socket.rcvtimeo = 1
        with pytest.raises(zmq.Again):
            client.receive()
        client.socket.rcvtimeo = TIMEOUT_MS
        assert (await setup.ask(client, "ping", id="alive"))[0]["id"] == "alive"
        client.send("generate", PROMPT, id="job")
        setup.engine.release()
        header, result, _ = await asyncio.to_thread(client.receive)
        assert (header["id"], result["token_ids"]) == ("job", [7, 8, 9])
        assert len(setup.engine.submitted) == 1

    serve(body)


def test_a_new_connection_gets_the_answer_that_the_lost_one_asked_for() -> None:
    async def body(setup: Setup) -> None:
        setup.engine.hold = frozenset({"decode"})
        lost = setup.client()
        lost.send("generate", PROMPT, id="job")
        await setup.engine.reached["decode"].wait()
        lost.close()
        waiting = asyncio.create_task(setup.once("generate", PROMPT, id="job"))
        setup.engine.release()
        header, result, _ = await waiting
        assert (header["status"], result["token_ids"]) == ("ok", [7, 8, 9])
        assert len(setup.engine.submitted) == 1

    serve(body)


def test_a_refused_or_retryable_request_may_be_tried_again_under_its_id() -> None:
    async def body(setup: Setup) -> None:
        setup.engine.capacity = 0
        _, error, _ = await setup.once("generate", PROMPT, id="job")
        assert (error["code"], error["retryable"], error["retry_after_ms"]) == ("overloaded", True, 1000)
        setup.engine.capacity = 1
        setup.engine.failure = StageFailedError("stage 0 died", stage=0)
        header, error, _ = await setup.once("generate", PROMPT, id="job")
        assert (error["code"], error["retryable"], error["stage"]) == ("stage_failed", True, 0)
        header, error, _ = await setup.once("poll", {"request": "job"})
        assert (header["status"], error["message"]) == ("error", "stage 0 died")
        setup.engine.failure = None
        header, result, _ = await setup.once("generate", PROMPT, id="job")
        assert (header["status"], result["token_ids"]) == ("ok", [7, 8, 9])

    serve(body)


def test_a_request_that_was_refused_leaves_its_id_free() -> None:
    async def body(setup: Setup) -> None:
        header, _, _ = await setup.once("generate", {"prompt_tokens": [1] * 600}, id="job")
        assert header["status"] == "error"
        assert (await setup.once("stats"))[1]["server"]["requests_kept"] == 0
        assert (await setup.once("generate", PROMPT, id="job"))[0]["status"] == "ok"

    serve(body)


def test_an_abort_before_the_engine_has_the_request_counts(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def encode(self: TextCodec, text: str, *, add_special_tokens: bool = True) -> list[int]:
        entered.set()
        assert leave.wait(30)
        return [1]

    async def body(setup: Setup) -> None:
        monkeypatch.setattr(TextCodec, "encode", encode)
        waiting = asyncio.create_task(setup.once("generate", {"prompt": "long"}, id="job"))
        assert await asyncio.to_thread(entered.wait, 30)
        assert not (await setup.once("abort", {"request": "job"}))[1]["ended"]
        leave.set()
        _, result, _ = await waiting
        assert (result["finish_reason"], result["token_ids"]) == ("abort", [])

    serve(body, tokenizer=tokenizer_file)


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_unfinished_requests_are_bounded() -> None:
    async def body(setup: Setup) -> None:
        setup.engine.hold = frozenset({"prefill"})
        for _ in range(2):
            assert (await setup.once("submit", PROMPT))[0]["status"] == "ok"
        header, error, _ = await setup.once("submit", PROMPT)
        assert (header["status"], error["code"], error["retryable"]) == ("error", "overloaded", True)
        setup.engine.release()

    serve(body, job_limits=JobLimits(max_unfinished=2))


@pytest.mark.parametrize("limits", [JobLimits(max_finished=2), JobLimits(max_finished_bytes=450)])
def test_finished_requests_are_bounded(limits: JobLimits) -> None:
    async def body(setup: Setup) -> None:
        for number in range(5):  # 216 bytes each
            await setup.once("generate", PROMPT, id=number)
        statuses = [(await setup.once("poll", {"request": number}))[0]["status"] for number in range(5)]
        assert statuses == ["error", "error", "error", "end", "end"]
        assert (await setup.once("stats"))[1]["server"]["requests_kept"] == 2

    serve(body, job_limits=limits)


def test_finished_requests_are_forgotten_in_time() -> None:
    async def body(setup: Setup) -> None:
        await setup.once("generate", PROMPT, id="job")
        while (await setup.once("stats"))[1]["server"]["requests_kept"]:
            pass
        assert (await setup.once("poll", {"request": "job"}))[0]["status"] == "error"

    serve(body, job_limits=JobLimits(finished_ttl_s=0.05))


def test_a_request_that_nobody_polls_is_aborted() -> None:
    async def body(setup: Setup) -> None:
        setup.engine.hold = frozenset({"decode"})
        await setup.once("submit", PROMPT, id="job")
        await setup.engine.submitted[0].aborted.wait()

    serve(body, job_limits=JobLimits(abandoned_s=0.05))


def test_messages_being_answered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_server, "MAX_OUTSTANDING", 1)

    async def body(setup: Setup) -> None:
        setup.engine.hold = frozenset({"decode"})
        waiting = asyncio.create_task(setup.once("generate", PROMPT))
        await setup.engine.reached["decode"].wait()
        header, error, _ = await setup.once("ping")
        assert (header["status"], error["code"], error["retryable"]) == ("error", "overloaded", True)
        setup.engine.release()
        assert (await waiting)[0]["status"] == "ok"

    serve(body)


def test_a_client_that_vanishes_leaves_nothing() -> None:
    async def body(setup: Setup) -> None:
        setup.engine.hold = frozenset({"decode"})
        gone = setup.client()
        gone.send("generate", PROMPT)
        await setup.engine.reached["decode"].wait()
        gone.close()
        setup.engine.release()
        stats: dict[str, Any] = {"requests_kept": 1}
        while stats["requests_kept"]:
            _, both, _ = await setup.once("stats")
            stats = both["server"]
        assert stats["outstanding"] == 1
        assert not setup.engine.running

    serve(body, job_limits=JobLimits(finished_ttl_s=0.05))


def test_a_taken_port_and_an_open_address_are_refused() -> None:
    async def main() -> None:
        async with ZmqServer("127.0.0.1", 0) as first:
            port = int(first.endpoint.rpartition(":")[2])
            with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is already in use"):
                await ZmqServer("127.0.0.1", port).__aenter__()
        with pytest.raises(ConfigError, match="other machines"):
            await ZmqServer("0.0.0.0", 0).__aenter__()
        async with ZmqServer("0.0.0.0", 0, allow_remote=True) as open_server:
            assert open_server.endpoint.startswith("tcp://0.0.0.0:")

    asyncio.run(main())
