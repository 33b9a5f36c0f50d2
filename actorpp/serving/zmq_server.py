"""The ROUTER that clients talk to: the operations of protocol ACTORPP/1 over one Gateway.

One message in, exactly one reply out, whatever the bytes were, so that a REQ peer is never left waiting. Streams of
replies and access control are not here yet. Requests themselves live in ``Jobs``.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
import structlog

from actorpp.errors import (
    AbortedError,
    ActorppError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    ProtocolError,
    TransportError,
)
from actorpp.serving.completion import Delta
from actorpp.serving.gateway import Gateway
from actorpp.serving.jobs import Job, JobId, JobLimits, Jobs
from actorpp.serving.protocol import (
    MAX_DELTAS_PER_POLL,
    MAX_OUTSTANDING,
    MAX_WAIT_MS,
    MINOR,
    VERSION,
    WIRE_LIMITS,
    Message,
    Named,
    Poll,
    RawTokens,
    Reply,
    ReplyHeader,
    RequestHeader,
    fingerprint_of,
    id_of,
    ids_of,
    split_route,
    with_tokens,
)
from actorpp.serving.request import checked, parse_request
from actorpp.transport.addresses import tcp_endpoint
from actorpp.transport.sockets import Router
from actorpp.transport.wire import Codec, Frame

FLUSH_S = 0.5  # for last replies to leave when the server closes

_log = structlog.get_logger(__name__)


class ZmqServer:
    """Listens from ``__aenter__`` on, answers from ``serve`` on; until then every message gets a retryable error.

    Args:
        host, port: Where to listen; port 0 is any free one, see ``endpoint``.
        allow_remote: Let ``host`` be other than loopback.
        job_limits: Bounds of what is kept of requests.
    """

    def __init__(
        self, host: str, port: int, *, allow_remote: bool = False, job_limits: JobLimits | None = None
    ) -> None:
        self._bind = tcp_endpoint(host, port)
        self._allow_remote = allow_remote
        self._job_limits = job_limits or JobLimits()
        self._codec: Codec[RequestHeader, dict[str, Any]] = Codec(dict[str, Any], RequestHeader, WIRE_LIMITS)
        self._replies: Codec[ReplyHeader, Any] = Codec(dict[str, Any], ReplyHeader, WIRE_LIMITS)
        self._answers: asyncio.TaskGroup | None = None
        self._pending: dict[int, tuple[bytes, list[bytes], JobId]] = {}  # messages without their reply
        self._counters = {"messages": 0, "protocol_errors": 0, "undeliverable": 0}
        self.boot = uuid.uuid4().hex
        self._ops: dict[str, Callable[[Message, bytes], Awaitable[Reply]]] = {
            "hello": self._hello,
            "ping": self._ping,
            "submit": self._submit,
            "poll": self._poll,
            "generate": self._generate,
            "abort": self._abort,
            "stats": self._stats,
        }

    async def __aenter__(self) -> ZmqServer:
        """Bind. Raises ConfigError when the port is taken or the address is not allowed."""
        self._router = Router(
            self._bind,
            self._on_message,
            self._on_dead_letter,
            limits=WIRE_LIMITS,
            allow_remote=self._allow_remote,
        )
        self.endpoint = self._router.endpoint
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._router.close(flush_s=FLUSH_S)

    async def serve(self, gateway: Gateway) -> None:
        """Answer until cancelled. What is then unfinished is aborted, and every message still gets its reply."""
        try:
            async with Jobs(gateway, self._job_limits) as jobs, asyncio.TaskGroup() as answers:
                self._gateway, self._jobs, self._answers = gateway, jobs, answers
                try:
                    await asyncio.Event().wait()
                finally:
                    self._answers = None
        finally:
            for peer, route, id in self._pending.values():
                self._reply_error(peer, route, id, AbortedError("the server is stopping"))
            self._pending.clear()

    # --- messages ---

    def _on_message(self, peer: bytes, frames: list[bytes]) -> None:
        self._counters["messages"] += 1
        route, frames = split_route(frames)
        try:
            message = self._codec.decode(frames)
        except ProtocolError as error:
            self._counters["protocol_errors"] += 1
            self._reply_error(peer, route, id_of(frames), error)
            return
        id = message.header.id
        if self._answers is None:
            self._reply_error(peer, route, id, OverloadedError("not serving: still starting, or already stopping"))
        elif len(self._pending) >= MAX_OUTSTANDING:
            self._reply_error(peer, route, id, OverloadedError(f"{MAX_OUTSTANDING} messages wait for their reply"))
        else:
            number = self._counters["messages"]
            self._pending[number] = (peer, route, id)
            self._answers.create_task(self._answer(number, message, fingerprint_of(frames)))

    async def _answer(self, number: int, message: Message, fingerprint: bytes) -> None:
        """Run the operation and reply. When it is cancelled, ``serve`` replies instead."""
        peer, route, id = self._pending[number]
        error: ActorppError
        try:
            operation = self._ops.get(message.header.op)
            if operation is None:
                known = ", ".join(self._ops)
                raise InvalidRequestError(f"unknown op {message.header.op!r}: known are {known}", param="op")
            self._reply(peer, route, id, await operation(message, fingerprint))
            del self._pending[number]
            return
        except ActorppError as raised:
            error = raised
        except Exception as fault:  # of ours: this client is told, the others do not notice
            _log.exception("operation failed", op=message.header.op)
            error = ActorppError(f"internal error: {type(fault).__name__}")
        del self._pending[number]
        self._reply_error(peer, route, id, error)

    def _reply(self, peer: bytes, route: list[bytes], id: JobId | None, reply: Reply) -> None:
        """Raises ProtocolError when the reply is over the limits, before anything is sent."""
        frames = self._replies.encode(reply.body, ReplyHeader(id, reply.status, 0, self.boot), reply.buffers)
        try:
            self._router.send(peer, [*route, *frames])
        except TransportError as error:
            self._on_dead_letter(peer, frames, error.message)

    def _reply_error(self, peer: bytes, route: list[bytes], id: JobId | None, error: ActorppError) -> None:
        self._reply(peer, route, id, Reply(error.as_dict(), "error"))

    def _on_dead_letter(self, peer: bytes, frames: Sequence[Frame], reason: str) -> None:
        self._counters["undeliverable"] += 1
        _log.info("reply not delivered", peer=peer.hex(), reason=reason)

    # --- operations ---

    async def _hello(self, message: Message, fingerprint: bytes) -> Reply:
        limits = {
            **{name: getattr(WIRE_LIMITS, name) for name in WIRE_LIMITS.__dataclass_fields__},
            **msgspec.to_builtins(self._job_limits),
            "max_outstanding": MAX_OUTSTANDING,
            "max_wait_ms": MAX_WAIT_MS,
        }
        return Reply(
            {
                "protocol": "ACTORPP",
                "version": VERSION,
                "minor": MINOR,
                "features": [*self._ops, "raw_tokens"],
                "limits": limits,
                "model": self._gateway.model_name,
                "context_length": self._gateway.context_length,
                "stages": self._gateway.engine.num_stages,
            }
        )

    async def _ping(self, message: Message, fingerprint: bytes) -> Reply:
        return Reply({})

    async def _submit(self, message: Message, fingerprint: bytes) -> Reply:
        job = self._start(message, fingerprint)
        async with _within(message.header.deadline_s):
            await job.wait(accepted=True)
        if job.completion is None:
            raise job.error or AbortedError("the request ended before the engine took it")
        return Reply({"request": job.id, "prompt_tokens": job.completion.prompt_tokens})

    async def _generate(self, message: Message, fingerprint: bytes) -> Reply:
        job = self._start(message, fingerprint)
        async with _within(message.header.deadline_s):
            await job.wait()
        if job.result is None:
            raise job.error or AbortedError("the request was aborted")
        raw = _raw(checked(message.message, RawTokens).raw_tokens, job)
        return with_tokens(job.result.to_builtins(), job.result.token_ids, raw=raw)

    async def _poll(self, message: Message, fingerprint: bytes) -> Reply:
        asked = checked(message.message, Poll)
        job = self._jobs.get(asked.request)
        if asked.cursor > len(job.deltas):
            raise InvalidRequestError(f"cursor: {asked.cursor} is beyond {len(job.deltas)}", param="cursor")
        wait_ms = min(asked.wait_ms, message.header.deadline_ms or asked.wait_ms)
        try:
            async with asyncio.timeout(wait_ms / 1000):
                await job.wait(beyond=asked.cursor)
        except TimeoutError:
            pass  # the answer is then that there is nothing new
        cursor = min(len(job.deltas), asked.cursor + MAX_DELTAS_PER_POLL)
        deltas = job.deltas[asked.cursor : cursor]
        parts = [_news([delta for delta in deltas if delta.index == index]) for index in range(job.n)]
        body: dict[str, Any] = parts[0] if job.n == 1 else {"outputs": parts}
        body |= {"request": job.id, "cursor": cursor, "progress": msgspec.to_builtins(job.progress)}
        reply = with_tokens(body, tuple(body.get("token_ids", ())), raw=_raw(asked.raw_tokens, job))
        if cursor < len(job.deltas) or not job.ended:
            reply.status = "more"
        elif job.result is not None:
            reply.status = "end"
            body["prompt_tokens"] = job.result.prompt_tokens
            for part, output in zip(parts, job.result.outputs, strict=True):
                part["finish_reason"] = output.finish_reason
                part["stop_reason"] = output.stop_reason
                part["metrics"] = msgspec.to_builtins(output.metrics)
            if job.result.prompt_logprobs is not None:
                body["prompt_logprobs"] = msgspec.to_builtins(job.result.prompt_logprobs)
        elif not deltas:  # what was delivered before an error is told first
            raise job.error or AbortedError("the request was aborted")
        else:
            reply.status = "more"
        return reply

    async def _abort(self, message: Message, fingerprint: bytes) -> Reply:
        job = self._jobs.get(checked(message.message, Named).request)
        job.abort()
        return Reply({"request": job.id, "ended": job.ended})

    async def _stats(self, message: Message, fingerprint: bytes) -> Reply:
        server = {**self._counters, "outstanding": len(self._pending), "requests_kept": len(self._jobs)}
        return Reply({"engine": msgspec.to_builtins(self._gateway.stats()), "server": server})

    def _start(self, message: Message, fingerprint: bytes) -> Job:
        fields = message.message
        raw = checked(fields, RawTokens)
        if raw.raw_tokens and fields.get("n", 1) != 1:
            raise InvalidRequestError("raw_tokens: only with n = 1", param="raw_tokens")
        if raw.prompt_tokens_buffer is not None:
            fields = {**fields, "prompt_tokens": ids_of(message.buffers, raw.prompt_tokens_buffer)}
        return self._jobs.start(message.header.id, fingerprint, parse_request(fields), message.header.deadline_s)


def _news(deltas: Sequence[Delta]) -> dict[str, Any]:
    """What is new of one output."""
    news: dict[str, Any] = {
        "text": "".join(delta.text for delta in deltas),
        "token_ids": [token for delta in deltas for token in delta.ids],
    }
    if logprobs := [msgspec.to_builtins(row) for delta in deltas for row in delta.logprobs]:
        news["logprobs"] = logprobs
    return news


def _raw(wanted: bool, job: Job) -> bool:
    if wanted and job.n > 1:
        raise InvalidRequestError("raw_tokens: only with n = 1", param="raw_tokens")
    return wanted


@contextlib.asynccontextmanager
async def _within(seconds: float | None) -> AsyncIterator[None]:
    """``asyncio.timeout`` whose expiry is the protocol's own error."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise DeadlineExceededError("the deadline passed", param="deadline_ms") from None
