"""Streams for DEALER peers: replies as the output comes, as far as credit goes, and one end."""

from __future__ import annotations

import asyncio
from typing import Any

import zmq

from actorpp.errors import StageFailedError
from actorpp.serving.jobs import JobLimits
from tests.unit.serving.fakes import FakeEngine
from tests.unit.serving.zmq_client import PROMPT, Client, Setup, serve

TEN = list(range(20, 30))


def send(client: Client, op: str, body: Any, **header: Any) -> None:
    client.socket.send(b"", zmq.SNDMORE)
    client.send(op, body, **header)


def receive(client: Client) -> tuple[dict[str, Any], dict[str, Any], list[bytes]]:
    assert client.socket.recv() == b""
    return client.receive()


async def step(engine: FakeEngine, point: str | None = None) -> None:
    """Lets the engine go on, to its next point: half the prompt is done; all of it and two tokens; the end."""
    for event in engine.reached.values():
        event.clear()
    engine.released.set()
    engine.released = asyncio.Event()
    if point is not None:
        await engine.reached[point].wait()


def told(replies: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[int]:
    return [token for _, part in replies for token in part["token_ids"]]


async def until_end(client: Client) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    replies = []
    while not replies or replies[-1][0]["status"] == "more":
        header, body, _ = await asyncio.to_thread(receive, client)
        replies.append((header, body))
    return replies


def test_a_stream_has_all_of_the_output_in_order_and_one_end() -> None:
    async def body(setup: Setup) -> None:
        setup.engine.answer = lambda prompt_ids: TEN
        setup.engine.hold = frozenset({"prefill", "decode"})
        client = setup.client(zmq.DEALER)
        send(client, "generate", {**PROMPT, "progress": True}, id="s", credit=64)
        await setup.engine.reached["prefill"].wait()
        replies: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for point, computed, tokens in (("prefill", 2, []), ("decode", 4, TEN[:2])):
            await step(setup.engine, point)
            while not replies or told(replies) != tokens or replies[-1][1]["progress"]["computed"] != computed:
                replies.append((await asyncio.to_thread(receive, client))[:2])
        await step(setup.engine)
        replies += await until_end(client)
        assert [header["seq"] for header, _ in replies] == list(range(len(replies)))
        assert {header["id"] for header, _ in replies} == {"s"}
        assert told(replies) == TEN
        assert [header["status"] for header, _ in replies[:-1]] == ["more"] * (len(replies) - 1)
        last_header, last = replies[-1]
        assert (last_header["status"], last["finish_reason"], last["prompt_tokens"]) == ("end", "stop", 4)

    serve(body)


def test_a_reader_without_credit_is_held_and_gets_the_rest_in_one() -> None:
    async def body(setup: Setup) -> None:
        setup.engine.answer = lambda prompt_ids: TEN
        setup.engine.hold = frozenset({"decode"})
        client = setup.client(zmq.DEALER)
        send(client, "generate", PROMPT, id="s", credit=1)
        header, first, _ = await asyncio.to_thread(receive, client)
        assert (header["status"], header["seq"]) == ("more", 0)
        setup.engine.release()
        others = [setup.once("generate", {"prompt_tokens": [n]}) for n in range(8)]
        assert all(reply[1]["token_ids"] == TEN for reply in await asyncio.gather(*others))  # nobody is held with it
        ((end_header, end),) = await until_end(client)
        assert (end_header["status"], end_header["seq"]) == ("end", 1)
        assert first["token_ids"] + end["token_ids"] == TEN

    serve(body)


def test_credit_lets_the_stream_go_on() -> None:
    async def body(setup: Setup) -> None:
        setup.engine.answer = lambda prompt_ids: TEN
        setup.engine.hold = frozenset({"prefill", "decode"})
        client = setup.client(zmq.DEALER)
        send(client, "generate", {**PROMPT, "progress": True}, id="s", credit=1)
        await setup.engine.reached["prefill"].wait()
        await step(setup.engine, "prefill")
        header, first, _ = await asyncio.to_thread(receive, client)
        assert (header["status"], first["token_ids"]) == ("more", [])
        await step(setup.engine, "decode")
        send(client, "credit", {"request": "s"}, id="c", credit=1)
        replies = [await asyncio.to_thread(receive, client) for _ in range(2)]
        (given,) = [reply for reply in replies if reply[0]["id"] == "c"]
        assert given[1] == {"credit": 1}
        (more,) = [reply for reply in replies if reply[0]["id"] == "s"]
        assert (more[0]["status"], more[0]["seq"]) == ("more", 1)
        await step(setup.engine)
        ((_, end),) = await until_end(client)
        assert more[1]["token_ids"] + end["token_ids"] == TEN
        send(client, "credit", {"request": "s"}, id="late", credit=5)
        header, late, _ = await asyncio.to_thread(receive, client)
        assert (header["status"], late) == ("ok", {"credit": 0})  # it crossed the end
        for bad in ({"id": "n", "credit": 257}, {"id": "n"}):
            send(client, "credit", {"request": "s"}, **bad)
            assert (await asyncio.to_thread(receive, client))[0]["status"] == "error"

    serve(body)


def test_credit_that_never_comes_makes_the_request_an_abandoned_one() -> None:
    async def body(setup: Setup) -> None:
        setup.engine.hold = frozenset({"prefill", "decode"})
        client = setup.client(zmq.DEALER)
        send(client, "generate", {**PROMPT, "progress": True}, id="s", credit=1)
        await setup.engine.reached["prefill"].wait()
        await step(setup.engine, "prefill")
        await asyncio.to_thread(receive, client)
        await step(setup.engine, "decode")
        replies = await until_end(client)
        assert replies[-1][1]["finish_reason"] == "abort"

    serve(body, job_limits=JobLimits(abandoned_s=0.05))


def test_an_error_ends_a_stream_after_the_output_before_it() -> None:
    async def body(setup: Setup) -> None:
        client = setup.client(zmq.DEALER)
        send(client, "generate", {"prompt_tokens": [1] * 600}, id="s", credit=9)
        ((header, error),) = await until_end(client)
        assert (header["status"], header["seq"], error["code"]) == ("error", 0, "context_length_exceeded")
        setup.engine.hold = frozenset({"decode"})
        send(client, "generate", PROMPT, id="t", credit=1)
        header, first, _ = await asyncio.to_thread(receive, client)
        setup.engine.fail(StageFailedError("stage 1 died", stage=1))
        replies = await until_end(client)
        assert (replies[-1][0]["status"], replies[-1][1]["code"]) == ("error", "stage_failed")
        assert first["token_ids"] + told(replies[:-1]) == [7, 8]

    serve(body)


def test_the_same_id_again_streams_from_the_start() -> None:
    async def body(setup: Setup) -> None:
        for _ in range(2):
            client = setup.client(zmq.DEALER)
            send(client, "generate", PROMPT, id="s", credit=64)
            assert [token for _, part in await until_end(client) for token in part["token_ids"]] == [7, 8, 9]
        assert len(setup.engine.submitted) == 1

    serve(body)


def test_ids_of_a_stream_may_come_as_buffers() -> None:
    async def body(setup: Setup) -> None:
        client = setup.client(zmq.DEALER)
        send(client, "generate", {**PROMPT, "raw_tokens": True}, id="s", credit=64)
        ids = b""
        while True:
            header, _, buffers = await asyncio.to_thread(receive, client)
            ids += buffers[0]
            if header["status"] == "end":
                break
        assert ids == b"".join(token.to_bytes(4, "little") for token in (7, 8, 9))

    serve(body)


def test_a_req_peer_cannot_ask_for_a_stream() -> None:
    async def body(setup: Setup) -> None:
        client = setup.client()
        header, error, _ = await setup.ask(client, "generate", PROMPT, credit=3)
        assert (header["status"], error["param"]) == ("error", "credit")
        assert (await setup.ask(client, "ping"))[0]["status"] == "ok"

    serve(body)
