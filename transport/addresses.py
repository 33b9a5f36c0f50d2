"""Which addresses may be listened on: ``tcp://host:port`` or ``ipc:///path``. Resolves no names and opens nothing."""

from __future__ import annotations

import ipaddress

import zmq

from actorpp.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach a listener on ``host``: a literal address, or localhost."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def tcp_endpoint(host: str, port: int) -> str:
    """The endpoint of a TCP listener; port 0 lets the system choose one."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"port {port} is not between 0 and 65535", param="port")
    if host == "localhost":
        host = "127.0.0.1"
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"tcp://{host}:{port or '*'}"


def check_bind(endpoint: str, allow_remote: bool) -> None:
    """Refuses endpoints that cannot work, or that would be open to other machines without ``allow_remote``.

    Raises:
        ConfigError: With the reason.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc":
        size = len(rest.encode())
        if size > zmq.IPC_PATH_MAX_LEN:
            raise ConfigError(f"ipc path of {size} bytes, the system allows {zmq.IPC_PATH_MAX_LEN}: {rest}")
        if rest.startswith("@"):
            raise ConfigError(f"abstract ipc names have no file permissions, any user could connect: {rest}")
    elif scheme == "tcp":
        host = rest.rpartition(":")[0]
        if not allow_remote and not is_loopback(host):
            raise ConfigError(
                f"{host} can be reached from other machines, and messages are neither encrypted nor authenticated: "
                "turn CURVE on, or allow it explicitly, on a trusted network only",
                param="host",
            )
    else:
        raise ConfigError(f"endpoint must begin with tcp:// or ipc://, got {endpoint!r}")
