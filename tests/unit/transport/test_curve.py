"""CURVE: the allowed get through encrypted, everybody else is turned away in the handshake, and keys stay private."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth
from zmq.utils.monitor import recv_monitor_message

from actorpp.errors import ConfigError
from actorpp.transport.curve import CurveClient, CurveKeys, CurveServer
from actorpp.transport.sockets import Dealer, Router

SERVER, FRIEND, STRANGER = (CurveKeys.generate() for _ in range(3))
TIMEOUT_MS = 20_000  # a ceiling

REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 30))


def handshake(endpoint: str, keys: CurveKeys | None, server: bytes) -> int:
    """How a plain client's handshake ends: the monitor's event."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        if keys is not None:
            client.curve_publickey, client.curve_secretkey, client.curve_serverkey = keys.public, keys.secret, server
        with client.get_monitor_socket(REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
            monitor.rcvtimeo = TIMEOUT_MS
            client.connect(endpoint)
            event = int(recv_monitor_message(monitor)["event"])
            client.disable_monitor()
            return event


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:*", "ipc"])
def test_an_allowed_key_gets_through(bind: str, tmp_path: Path) -> None:
    async def main() -> None:
        heard: asyncio.Queue[Any] = asyncio.Queue()
        endpoint = f"ipc://{tmp_path}/curve" if bind == "ipc" else bind
        curve = CurveServer(SERVER, frozenset({FRIEND.public}))

        def echo(peer: bytes, frames: list[bytes]) -> None:
            router.send(peer, frames)

        router = Router(endpoint, echo, print, curve=curve)
        dealer = Dealer(router.endpoint, b"a", heard.put_nowait, print, curve=CurveClient(FRIEND, SERVER.public))
        dealer.send([b"x", bytes(100_000)])
        assert await heard.get() == [b"x", bytes(100_000)]
        await dealer.close()
        await router.close()

    run(main())


@pytest.mark.parametrize(
    ("keys", "server", "refused"),
    [
        (FRIEND, SERVER.public, False),
        (STRANGER, SERVER.public, True),
        (None, SERVER.public, True),
        (FRIEND, STRANGER.public, True),  # who does not know the server's key
    ],
    ids=["allowed", "unknown key", "no key", "wrong server key"],
)
def test_others_are_turned_away_in_the_handshake(keys: CurveKeys | None, server: bytes, refused: bool) -> None:
    async def main() -> None:
        heard: list[Any] = []
        curve = CurveServer(SERVER, frozenset({FRIEND.public}))
        router = Router("tcp://127.0.0.1:*", lambda *message: heard.append(message), print, curve=curve)
        event = await asyncio.to_thread(handshake, router.endpoint, keys, server)
        assert bool(event & REFUSED) == refused
        assert heard == []
        await router.close()

    run(main())


def test_each_socket_has_an_allow_list_of_its_own_until_it_is_closed() -> None:
    async def main() -> None:
        routers = [
            Router("tcp://127.0.0.1:*", print, print, curve=CurveServer(SERVER, frozenset({keys.public})))
            for keys in (FRIEND, STRANGER)
        ]
        for router, allowed in zip(routers, (FRIEND, STRANGER), strict=True):
            for keys in (FRIEND, STRANGER):
                event = await asyncio.to_thread(handshake, router.endpoint, keys, SERVER.public)
                assert bool(event & REFUSED) == (keys is not allowed)
        await routers[0].close()
        event = await asyncio.to_thread(handshake, routers[1].endpoint, STRANGER, SERVER.public)
        assert not event & REFUSED
        await routers[1].close()

    run(main())


def test_curve_allows_a_bind_beyond_loopback_and_nothing_else_does_by_itself() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="turn CURVE on"):
            Router("tcp://0.0.0.0:*", print, print)
        router = Router("tcp://0.0.0.0:*", print, print, curve=CurveServer(SERVER, frozenset({FRIEND.public})))
        await router.close()

    run(main())


def test_keys_come_from_files_that_only_their_owner_can_read(tmp_path: Path) -> None:
    allow = tmp_path / "clients"
    allow.mkdir()
    public, secret = zmq.auth.create_certificates(tmp_path, "server")
    Path(secret).chmod(0o644)
    with pytest.raises(ConfigError, match="others may read it"):
        CurveKeys.load(Path(secret))
    Path(secret).chmod(0o600)
    with pytest.raises(ConfigError, match="nobody could connect"):
        CurveServer.load(Path(secret), allow)
    client_public, client_secret = zmq.auth.create_certificates(allow, "alice")
    Path(client_secret).chmod(0o600)
    curve = CurveServer.load(Path(secret), allow)
    assert curve.keys == CurveKeys.of_secret(curve.keys.secret)
    assert curve.allowed == {CurveKeys.load(Path(client_secret)).public}
    assert curve.keys.secret.decode() not in repr(curve)
    with pytest.raises(ConfigError, match="no secret key"):
        CurveKeys.load(Path(public))
    with pytest.raises(ConfigError, match="no-such"):
        CurveKeys.load(tmp_path / "no-such")
    Path(client_public).write_text("nothing")
    with pytest.raises(ConfigError, match="allowed keys"):
        CurveServer.load(Path(secret), allow)
