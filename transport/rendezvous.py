"""Where the ranks of a group meet: a store named by a URL. Holds no tensors and starts no group.

``file:///path`` is a file store: on one host, in a directory that only this user can enter, it needs no listener at
all. ``tcp://host:port`` is a client of a TCP store that somebody hosts. A TCP store has no authentication: whoever can
connect can read, write and block it. On other than loopback that takes a network whose every host is trusted.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from urllib.parse import urlsplit

from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from actorpp.errors import ConfigError, TransportError
from actorpp.transport.addresses import is_loopback
from actorpp.transport.tensors import reason


def open_store(url: str, size: int, timeout_s: float) -> Store:
    """Opens the store at a URL. Blocks while a TCP store is not there yet.

    Args:
        url: ``file:///path`` or ``tcp://host:port``.
        size: Number of ranks that will open it; the last one to close a file store removes the file.
        timeout_s: Seconds that this and each later read of a missing key may take.

    Raises:
        ConfigError: If the URL is none of the two.
        TransportError: If the store cannot be reached.
    """
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r}: {error}") from None
    try:
        store: Store
        if parts.scheme == "file" and parts.path and not parts.netloc:
            store = FileStore(parts.path, size)
        elif parts.scheme == "tcp" and parts.hostname and port:
            store = TCPStore(parts.hostname, port, is_master=False, timeout=timedelta(seconds=timeout_s))
        else:
            raise ConfigError(f"a rendezvous is file:///path or tcp://host:port, got {url!r}")
        store.set_timeout(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise TransportError(f"cannot reach the rendezvous {url}: {reason(error)}") from None
    return store


def host_store(host: str = "127.0.0.1", *, allow_remote: bool = False) -> tuple[TCPStore, str]:
    """Hosts a TCP store on a free port; returns it and its URL. It serves for as long as the object lives.

    The listening socket is bound here and handed over: given a name and a port, the store would listen on every
    interface.

    Raises:
        ConfigError: If the address cannot be bound, or is open to other machines without ``allow_remote``.
    """
    if not allow_remote and not is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines, and the store has no authentication", param="host"
        )
    try:
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror}", param="host") from None
    port = listener.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
