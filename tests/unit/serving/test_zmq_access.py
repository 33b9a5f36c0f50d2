"""Who may connect, how the owner of a server finds it, and what only administrators may do."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from actorpp.errors import ConfigError
from actorpp.serving.zmq_server import ZmqServer
from actorpp.transport.curve import CurveKeys, CurveServer
from tests.unit.serving.zmq_client import PROMPT, Setup, serve

SERVER, FRIEND, STRANGER = (CurveKeys.generate() for _ in range(3))
CURVE = CurveServer(SERVER, frozenset({FRIEND.public}))


def shown(keys: CurveKeys) -> dict[str, Any]:
    """A client's options."""
    return {
        "CURVE_PUBLICKEY": keys.public,
        "CURVE_SECRETKEY": keys.secret,
        "CURVE_SERVERKEY": SERVER.public,
    }


def test_with_curve_only_allowed_clients_are_answered() -> None:
    async def body(setup: Setup) -> None:
        client = setup.client(**shown(FRIEND))
        header, result, _ = await setup.ask(client, "generate", PROMPT)
        assert (header["status"], result["token_ids"]) == ("ok", [7, 8, 9])
        for options in (shown(STRANGER), {}):
            stranger = setup.client(**options)
            stranger.send("ping")
            # While the stranger's message could have come, many of an allowed client do.
            for _ in range(20):
                await setup.ask(client, "ping")
            assert not stranger.socket.poll(0)
        _, stats, _ = await setup.ask(client, "stats")
        assert stats["server"]["messages"] == 42

    serve(body, curve=CURVE)


def test_the_connection_file_is_its_owners_alone_and_goes_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "connection.json"
    path.write_text("of an earlier server")
    path.chmod(0o644)

    async def body(setup: Setup) -> None:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        connection = json.loads(path.read_bytes())
        assert connection["endpoint"] == setup.server.endpoint
        assert (connection["protocol"], connection["version"], connection["minor"]) == ("ACTORPP", 1, 1)
        assert connection["boot"] == setup.server.boot
        assert connection["curve_server_key"] == SERVER.public.decode()
        header, _, _ = await setup.ask(setup.client(**shown(FRIEND)), "ping")
        assert header["boot"] == connection["boot"]
        assert os.listdir(tmp_path) == ["connection.json"]

    serve(body, connection_file=path, curve=CURVE)
    assert not path.exists()


def test_a_connection_file_of_another_server_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "connection.json"

    async def main() -> None:
        async with ZmqServer("127.0.0.1", 0, connection_file=path):
            path.write_text(json.dumps({"boot": "another"}))
        assert path.exists()
        with pytest.raises(ConfigError, match=r"none/c\.json"):
            await ZmqServer("127.0.0.1", 0, connection_file=tmp_path / "none" / "c.json").__aenter__()

    asyncio.run(main())


@pytest.mark.parametrize("op", ["drain", "trace"])
def test_administration_needs_the_token_of_the_connection_file(op: str, tmp_path: Path) -> None:
    async def without(setup: Setup) -> None:
        header, error, _ = await setup.once(op, token="guess")
        assert (header["status"], error["code"]) == ("error", "permission_denied")
        assert "--connection-file" in error["message"]

    async def with_file(setup: Setup) -> None:
        for header in ({}, {"token": "guess"}):
            _, error, _ = await setup.once(op, **header)
            assert (error["code"], error["param"]) == ("permission_denied", "token")

    serve(without)
    serve(with_file, connection_file=tmp_path / "c.json")


def test_a_trace_comes_as_a_buffer(tmp_path: Path) -> None:
    async def body(setup: Setup) -> None:
        header, reply, buffers = await setup.once("trace", token=setup.server.connection.token)
        assert (header["status"], reply, buffers) == ("ok", {"trace_buffer": 0}, [b"[]"])

    serve(body, connection_file=tmp_path / "c.json")


def test_drain_lets_requests_end_and_takes_no_new_ones(tmp_path: Path) -> None:
    async def body(setup: Setup) -> None:
        token = setup.server.connection.token
        setup.engine.hold = frozenset({"decode"})
        running = asyncio.create_task(setup.once("generate", PROMPT))
        await setup.engine.reached["decode"].wait()
        draining = asyncio.create_task(setup.once("drain", token=token))
        while (await setup.once("submit", PROMPT))[1].get("code") != "overloaded":
            pass
        assert not draining.done()
        setup.engine.release()
        assert (await running)[1]["token_ids"] == [7, 8, 9]
        header, reply, _ = await draining
        assert (header["status"], reply) == ("ok", {"drained": True})

    serve(body, connection_file=tmp_path / "c.json")
