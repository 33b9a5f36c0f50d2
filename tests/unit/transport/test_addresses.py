"""Which endpoints may be bound."""

from __future__ import annotations

import pytest

from actorpp.errors import ConfigError
from actorpp.transport.addresses import check_bind, is_loopback, tcp_endpoint


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", "", "10.0.0.1", "localhost.example.org", "eth0", "lo"])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("host", "port", "endpoint"),
    [
        ("127.0.0.1", 0, "tcp://127.0.0.1:*"),
        ("localhost", 80, "tcp://127.0.0.1:80"),
        ("::1", 80, "tcp://[::1]:80"),
        ("[::1]", 0, "tcp://[::1]:*"),
    ],
)
def test_tcp_endpoint(host: str, port: int, endpoint: str) -> None:
    assert tcp_endpoint(host, port) == endpoint
    check_bind(endpoint, allow_remote=False)


@pytest.mark.parametrize("port", [-1, 65536])
def test_impossible_ports(port: int) -> None:
    with pytest.raises(ConfigError, match=f"port {port}"):
        tcp_endpoint("127.0.0.1", port)


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:*", "tcp://*:80", "tcp://[::]:80", "tcp://eth0:*"])
def test_other_machines_only_by_permission(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="neither encrypted nor authenticated"):
        check_bind(endpoint, allow_remote=False)
    check_bind(endpoint, allow_remote=True)


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("ipc:///tmp/" + "x" * 200, "205 bytes, the system allows 107"),
        ("ipc://@name", "no file permissions"),
        ("udp://127.0.0.1:1", "tcp:// or ipc://"),
        ("127.0.0.1:1", "tcp:// or ipc://"),
    ],
)
def test_endpoints_that_cannot_work(endpoint: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_bind(endpoint, allow_remote=True)
