"""A client that lost an answer asks again under the same id and gets it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import zmq

from actorpp.errors import StageFailedError
from actorpp.serving.tokenizer import TextCodec
from tests.unit.serving.zmq_client import PROMPT, TIMEOUT_MS, Setup, serve


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
