"""What clients can make the server keep is bounded, and so is where it listens."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from typing import Any

import pytest

from actorpp.errors import ConfigError
from actorpp.serving import zmq_server
from actorpp.serving.jobs import JobLimits
from actorpp.serving.zmq_server import ZmqServer
from tests.unit.serving.zmq_client import PROMPT, Setup, serve


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


@pytest.mark.parametrize(
    ("op", "fields"), [("no such operation", {}), ("generate", {}), ("submit", {"prompt_tokens_buffer": 0})]
)
def test_a_message_that_was_refused_is_let_go_at_once(op: str, fields: dict[str, Any]) -> None:
    """Python's collector does not know how large it is, and may take long to come."""
    big = bytes(4 << 20)

    async def body(setup: Setup) -> None:
        client = setup.client()
        await setup.ask(client, "ping")
        gc.disable()
        tracemalloc.start()
        try:
            header, _, _ = await setup.ask(client, op, fields, big)
            for _ in range(100):  # the thread that decoded it may still have it in hand
                await setup.ask(client, "ping")
            held, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            gc.enable()
        assert header["status"] == "error"
        assert held < len(big) <= most

    serve(body)


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
