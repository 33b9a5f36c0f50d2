"""The file by which a server's owner, and nobody else, finds it: endpoint, protocol, boot id, keys and token."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path

import msgspec

from actorpp.errors import ConfigError


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds, as a JSON object.

    Attributes:
        endpoint: Where the server listens.
        boot: Another value after each start.
        curve_server_key: The server's public key in Z85, if it has CURVE on.
        token: Shows that its sender may read this file: for the operations of administrators.
    """

    protocol: str
    version: int
    minor: int
    endpoint: str
    boot: str
    pid: int
    curve_server_key: str | None
    token: str

    def write(self, path: Path) -> None:
        """Write it so that only its owner can read it, all of it at once. Raises ConfigError."""
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
                os.replace(partial, path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise ConfigError(f"--connection-file {path}: {error.strerror}", param="connection_file") from None

    def remove(self, path: Path) -> None:
        """Remove it, unless a later server has written its own there."""
        with contextlib.suppress(OSError, ValueError, AttributeError):  # gone, or something else by now
            if json.loads(path.read_bytes()).get("boot") == self.boot:
                path.unlink()
