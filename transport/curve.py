"""CURVE on ZeroMQ sockets: every byte encrypted, both sides known by their keys, strangers turned away unheard.

A listening socket has a key pair of its own and the list of public keys that may connect; a connecting socket knows
the listener's public key. The list is asked through ZAP, by pyzmq's own authenticator: one thread for the process's
context, from the first such socket to the last. Nothing here opens the sockets themselves, and key files are read, not
made: ``zmq.auth.create_certificates`` makes them.
"""

from __future__ import annotations

import itertools
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from actorpp.errors import ConfigError

_OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO

_lock = threading.Lock()  # engines may start in several threads at once
_authenticator: ThreadAuthenticator | None = None
_domains = itertools.count(1)


@dataclass(frozen=True)
class CurveKeys:
    """A key pair, each key in the 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> CurveKeys:
        """A new pair."""
        return cls(*zmq.curve_keypair())

    @classmethod
    def of_secret(cls, secret: bytes) -> CurveKeys:
        """The pair of a secret key."""
        return cls(zmq.curve_public(secret), secret)

    @classmethod
    def load(cls, path: Path) -> CurveKeys:
        """From a certificate file with a secret key, ``*.key_secret``.

        Raises:
            ConfigError: It cannot be read, holds no secret key, or others may read it too.
        """
        try:
            mode = path.stat().st_mode
            public, secret = zmq.auth.load_certificate(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"key file {path}: {_reason(error)}", param="curve_key") from None
        if secret is None:
            raise ConfigError(f"key file {path}: it holds no secret key; give the .key_secret file", param="curve_key")
        if mode & _OPEN_TO_OTHERS:
            raise ConfigError(
                f"key file {path}: others may read it (mode {stat.S_IMODE(mode):o}); chmod 600 it, or make new keys",
                param="curve_key",
            )
        return cls(public, secret)


@dataclass(frozen=True)
class CurveServer:
    """What a listening socket needs: its keys, and the public keys that may connect."""

    keys: CurveKeys
    allowed: frozenset[bytes]

    @classmethod
    def load(cls, key: Path, allow: Path) -> CurveServer:
        """From the server's secret key file and a folder with a ``*.key`` file for each client that may connect.

        Raises:
            ConfigError: Either cannot be read, or nobody is allowed.
        """
        keys = CurveKeys.load(key)
        try:
            allowed = frozenset(zmq.auth.load_certificate(path)[0] for path in sorted(allow.glob("*.key")))
        except (OSError, ValueError) as error:
            raise ConfigError(f"allowed keys in {allow}: {_reason(error)}", param="curve_allow") from None
        if not allowed:
            raise ConfigError(
                f"allowed keys in {allow}: no *.key file there, so nobody could connect", param="curve_allow"
            )
        return cls(keys, allowed)


@dataclass(frozen=True)
class CurveClient:
    """What a connecting socket needs: its own keys, and the public key of the socket it connects to."""

    keys: CurveKeys
    server: bytes


class _AllowList:
    """Answers pyzmq's authenticator for one listening socket."""

    def __init__(self, allowed: frozenset[bytes]) -> None:
        self._allowed = allowed

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._allowed


def secure_server(socket: zmq.Socket[bytes], curve: CurveServer) -> Callable[[], None]:
    """Turns CURVE on for a socket that will be bound. Returns what to call once that socket is closed."""
    global _authenticator
    domain = f"actorpp-{next(_domains)}"
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, curve.keys.secret)
    socket.set(zmq.ZAP_DOMAIN, domain.encode())
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an authenticator nobody gets in
    with _lock:
        if _authenticator is None:
            _authenticator = ThreadAuthenticator(socket.context)
            _authenticator.start()
        _authenticator.configure_curve_callback(domain, _AllowList(curve.allowed))
    return lambda: _release(domain)


def secure_client(socket: zmq.Socket[bytes], curve: CurveClient) -> None:
    """Turns CURVE on for a socket that will connect."""
    socket.set(zmq.CURVE_PUBLICKEY, curve.keys.public)
    socket.set(zmq.CURVE_SECRETKEY, curve.keys.secret)
    socket.set(zmq.CURVE_SERVERKEY, curve.server)


def _release(domain: str) -> None:
    global _authenticator
    with _lock:
        if _authenticator is None:
            return
        _authenticator.credentials_providers.pop(domain, None)
        if not _authenticator.credentials_providers:
            _authenticator.stop()
            _authenticator = None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
