"""The ROUTER that clients talk to: frames in and out of protocol ACTORPP/1, and who may connect.

One message in, exactly one last reply out, whatever the bytes were, so that a REQ peer is never left waiting; only who
asks for a stream gets replies before that. What the operations do is in ``operations``, requests live in ``jobs``.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import uuid
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from actorpp.errors import (
    AbortedError,
    ActorppError,
    OverloadedError,
    ProtocolError,
    TransportError,
)
from actorpp.serving.connection_file import Connection
from actorpp.serving.gateway import Gateway
from actorpp.serving.jobs import JobId, JobLimits, Jobs
from actorpp.serving.operations import Operations
from actorpp.serving.protocol import (
    IDS_BUFFERS,
    INLINE_BYTES,
    MAX_OUTSTANDING,
    MINOR,
    VERSION,
    WIRE_LIMITS,
    Call,
    Reply,
    ReplyHeader,
    RequestHeader,
    fingerprint_of,
    id_of,
    ids_of,
    ids_of_list,
    split_route,
)
from actorpp.transport.addresses import tcp_endpoint
from actorpp.transport.curve import CurveServer
from actorpp.transport.sockets import Router
from actorpp.transport.wire import Codec, Frame

FLUSH_S = 0.5  # for last replies to leave when the server closes

_log = structlog.get_logger(__name__)


class Pending(msgspec.Struct):
    """A message that still gets its last reply. ``seq`` is the number of its next reply."""

    peer: bytes
    route: list[bytes]
    id: JobId | None
    seq: int = 0


class ZmqServer:
    """Listens from ``__aenter__`` on, answers from ``serve`` on; until then every message gets a retryable error.

    Args:
        host, port: Where to listen; port 0 is any free one, see ``endpoint``.
        curve: Encrypt, and let only clients connect whose public keys are allowed.
        allow_remote: Let ``host`` be other than loopback without ``curve``.
        connection_file: Where to write how to find and administer this server, for its owner alone.
        job_limits: Bounds of what is kept of requests.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        curve: CurveServer | None = None,
        allow_remote: bool = False,
        connection_file: Path | None = None,
        job_limits: JobLimits | None = None,
    ) -> None:
        self._bind = tcp_endpoint(host, port)
        self._curve = curve
        self._allow_remote = allow_remote
        self._connection_file = connection_file
        self._job_limits = job_limits or JobLimits()
        self._codec: Codec[RequestHeader, dict[str, Any]] = Codec(dict[str, Any], RequestHeader, WIRE_LIMITS)
        self._replies: Codec[ReplyHeader, Any] = Codec(dict[str, Any], ReplyHeader, WIRE_LIMITS)
        self._answers: asyncio.TaskGroup | None = None
        self._pending: dict[int, Pending] = {}
        self._counters = {"messages": 0, "protocol_errors": 0, "undeliverable": 0}
        self.boot = uuid.uuid4().hex

    async def __aenter__(self) -> ZmqServer:
        """Bind. Raises ConfigError when the port is taken or the address is not allowed."""
        self._router = Router(
            self._bind,
            self._on_message,
            self._on_dead_letter,
            limits=WIRE_LIMITS,
            curve=self._curve,
            allow_remote=self._allow_remote,
        )
        self.endpoint = self._router.endpoint
        self.connection = Connection(
            protocol="ACTORPP",
            version=VERSION,
            minor=MINOR,
            endpoint=self.endpoint,
            boot=self.boot,
            pid=os.getpid(),
            curve_server_key=None if self._curve is None else self._curve.keys.public.decode(),
            token=secrets.token_urlsafe(32),
        )
        try:
            if self._connection_file is not None:
                self.connection.write(self._connection_file)
        except BaseException:
            await self._router.close()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._connection_file is not None:
            self.connection.remove(self._connection_file)
        await self._router.close(flush_s=FLUSH_S)

    async def serve(self, gateway: Gateway) -> None:
        """Answer until cancelled. What is then unfinished is aborted, and every message still gets its reply."""
        try:
            async with Jobs(gateway, self._job_limits) as jobs, asyncio.TaskGroup() as answers:
                self._gateway, self._answers = gateway, answers
                self._operations = Operations(
                    gateway,
                    jobs,
                    self._job_limits,
                    admin_token=None if self._connection_file is None else self.connection.token,
                    server_stats=lambda: {**self._counters, "outstanding": len(self._pending)},
                )
                try:
                    await asyncio.Event().wait()
                finally:
                    self._answers = None
        finally:
            for pending in self._pending.values():
                self._reply_error(pending, AbortedError("the server is stopping"))
            self._pending.clear()

    # --- messages ---

    def _on_message(self, peer: bytes, frames: list[bytes]) -> None:
        self._counters["messages"] += 1
        route, frames = split_route(frames)
        try:
            header = self._codec.decode_header(frames)
        except ProtocolError as error:
            self._counters["protocol_errors"] += 1
            self._reply_error(Pending(peer, route, id_of(frames)), error)
            return
        pending = Pending(peer, route, header.id)
        if self._answers is None:
            self._reply_error(pending, OverloadedError("not serving: still starting, or already stopping"))
        elif len(self._pending) >= MAX_OUTSTANDING:
            self._reply_error(pending, OverloadedError(f"{MAX_OUTSTANDING} messages wait for their reply"))
        else:
            number = self._counters["messages"]
            self._pending[number] = pending
            self._answers.create_task(self._answer(number, header, frames, self._router.sender_type()))

    async def _answer(self, number: int, header: RequestHeader, frames: list[bytes], peer_type: str) -> None:
        """Run the operation and reply. When it is cancelled, ``serve`` replies instead.

        An error is let go as soon as it is told: it has this frame, and with it the message.
        """
        pending = self._pending[number]
        try:
            fields, ids, fingerprint = await self._decoded(header.op, frames)
            call = Call(
                header=header,
                fields=fields,
                ids=ids,
                fingerprint=fingerprint,
                peer=pending.peer,
                peer_type=peer_type,
                send=lambda reply: self._send(pending, reply),
            )
            self._reply(pending, await self._operations.do(call))
        except ActorppError as error:
            self._counters["protocol_errors"] += isinstance(error, ProtocolError)
            self._reply_error(pending, error)
        except Exception as fault:  # of ours: this client is told, the others do not notice
            _log.exception("operation failed", op=header.op)
            self._reply_error(pending, ActorppError(f"internal error: {type(fault).__name__}"))
        del self._pending[number]

    async def _decoded(self, op: str, frames: list[bytes]) -> tuple[dict[str, Any], array[int] | None, bytes]:
        """Body, ids in one piece, and fingerprint of a message. A big one is worked on beside the loop."""
        if sum(map(len, frames[3:])) <= INLINE_BYTES:
            return self._decode(op, frames)
        return await asyncio.to_thread(self._decode, op, frames)

    def _decode(self, op: str, frames: list[bytes]) -> tuple[dict[str, Any], array[int] | None, bytes]:
        fields = self._codec.decode_body(frames)
        param = IDS_BUFFERS.get(op, "")
        index = fields.get(param)
        ids = ids_of(frames[4:], index, param) if type(index) is int else None  # other types are refused later
        if ids is None and (ids := ids_of_list(fields.get("prompt_tokens"))) is not None:
            del fields["prompt_tokens"]
        return fields, ids, fingerprint_of(frames)

    def _send(self, pending: Pending, reply: Reply) -> None:
        """Raises ProtocolError when the reply is over the limits, before anything is sent; TransportError."""
        header = ReplyHeader(pending.id, reply.status, pending.seq, self.boot)
        frames = self._replies.encode(reply.body, header, reply.buffers)
        self._router.send(pending.peer, [*pending.route, *frames])
        pending.seq += 1

    def _reply(self, pending: Pending, reply: Reply) -> None:
        try:
            self._send(pending, reply)
        except ProtocolError:
            raise
        except TransportError as error:
            self._on_dead_letter(pending.peer, (), error.message)

    def _reply_error(self, pending: Pending, error: ActorppError) -> None:
        self._reply(pending, Reply(error.as_dict(), "error"))

    def _on_dead_letter(self, peer: bytes, frames: Sequence[Frame], reason: str) -> None:
        self._counters["undeliverable"] += 1
        _log.info("reply not delivered", peer=peer.hex(), reason=reason)
