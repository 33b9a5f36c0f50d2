"""The operations of protocol ACTORPP/1, asked for as a foreign client would."""

from __future__ import annotations

import asyncio
import struct
import threading
from pathlib import Path

import pytest
import zmq

from actorpp.serving import zmq_server
from actorpp.serving.protocol import fingerprint_of
from actorpp.serving.tokenizer import TextCodec
from tests.unit.serving.fakes import ANSWER
from tests.unit.serving.zmq_client import PROMPT, Client, Setup, serve


def test_hello_ping_stats() -> None:
    async def body(setup: Setup) -> None:
        client = setup.client()
        header, hello, _ = await setup.ask(client, "hello", id="h")
        assert header == {"id": "h", "status": "ok", "seq": 0, "boot": setup.server.boot}
        assert (hello["protocol"], hello["version"], hello["minor"]) == ("ACTORPP", 1, 1)
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
        assert (header["status"], error["param"]) == ("error", "prompt_tokens_buffer")

    serve(body)


@pytest.mark.parametrize("raw", [True, False], ids=["buffer", "list"])
def test_a_long_prompt_is_decoded_beside_the_loop(raw: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def fingerprint(frames: list[bytes]) -> bytes:
        threads.append(threading.current_thread())
        return fingerprint_of(frames)

    async def body(setup: Setup) -> None:
        monkeypatch.setattr(zmq_server, "fingerprint_of", fingerprint)
        setup.engine.context_length = 100_000
        ids = [number % 5000 for number in range(50_000)]
        if raw:
            asked = setup.once("generate", {"prompt_tokens_buffer": 0}, struct.pack("<50000i", *ids))
        else:
            asked = setup.once("generate", {"prompt_tokens": ids})
        assert (await asked)[1]["prompt_tokens"] == 50_000
        assert setup.engine.submitted[0].prompt_ids == ids
        assert threads[0] is not threading.main_thread()
        await setup.once("ping")
        assert threads[1] is threading.main_thread()
        header, error, _ = await setup.once("generate", {"prompt_tokens": [*ids, "x"]})
        assert (header["status"], error["param"]) == ("error", "prompt_tokens")

    serve(body)


def test_the_plan_of_a_prompt() -> None:
    async def body(setup: Setup) -> None:
        header, plan, _ = await setup.once("plan", {"prompt_tokens": 101})
        assert header["status"] == "ok"
        assert (plan["prompt_tokens"], plan["chunks"], plan["predicted_ttft_s"]) == (101, [51, 50], 1.5)
        for bad, param in (
            ({}, "prompt_tokens"),
            ({"prompt_tokens": 0}, "prompt_tokens"),
            ({"prompt_tokens": 600}, "prompt"),
        ):
            header, error, _ = await setup.once("plan", bad)
            assert (header["status"], error["param"]) == ("error", param)

    serve(body)


def test_texts_become_ids_and_ids_texts(tokenizer_file: Path) -> None:
    async def body(setup: Setup) -> None:
        ids = TextCodec(tokenizer_file).encode("the cat")
        _, models, _ = await setup.once("models")
        assert models == {"models": [{"id": "fake", "context_length": 512}]}
        _, tokenized, _ = await setup.once("tokenize", {"prompt": "the cat"})
        assert tokenized == {"token_ids": ids, "count": len(ids)}
        _, tokenized, buffers = await setup.once("tokenize", {"prompt": "the cat", "raw_tokens": True})
        assert tokenized == {"token_ids_buffer": 0, "count": len(ids)}
        assert buffers == [struct.pack(f"<{len(ids)}i", *ids)]
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        assert (await setup.once("tokenize", chat))[1]["count"] > 3
        for asked, more in (({"token_ids": ids}, []), ({"token_ids_buffer": 0}, buffers)):
            assert (await setup.once("detokenize", asked, *more))[1] == {"text": "<s>the cat"}
        for op, bad in (("tokenize", {}), ("detokenize", {}), ("detokenize", {"token_ids": [10**6]})):
            header, error, _ = await setup.once(op, bad)
            assert (header["status"], error["code"]) == ("error", "invalid_request")

    serve(body, tokenizer=tokenizer_file)


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
