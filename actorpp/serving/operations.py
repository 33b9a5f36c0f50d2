"""What each operation of protocol ACTORPP/1 does, over one Gateway and its Jobs. Knows no sockets and no frames."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from actorpp.errors import DeadlineExceededError, InvalidRequestError, PermissionDeniedError
from actorpp.serving.answers import Stream, news, whole
from actorpp.serving.gateway import Gateway
from actorpp.serving.jobs import Job, JobId, JobLimits, Jobs
from actorpp.serving.protocol import (
    HEARTBEAT_MS,
    MAX_CREDIT,
    MAX_OUTSTANDING,
    MAX_WAIT_MS,
    MINOR,
    VERSION,
    WIRE_LIMITS,
    Call,
    Detokenize,
    Generate,
    Named,
    Poll,
    Prompted,
    Reply,
    with_tokens,
)
from actorpp.serving.request import checked, parse_request, parse_tokenize

Operation = Callable[[Call], Awaitable[Reply]]


class Operations:
    """Looks an operation up by its name and does it.

    Args:
        admin_token: What administrators show; without one nobody is an administrator.
        server_stats: Figures of the socket, for ``stats``.
    """

    def __init__(
        self,
        gateway: Gateway,
        jobs: Jobs,
        job_limits: JobLimits,
        *,
        admin_token: str | None,
        server_stats: Callable[[], dict[str, Any]],
    ) -> None:
        self._gateway = gateway
        self._jobs = jobs
        self._job_limits = job_limits
        self._admin_token = admin_token
        self._server_stats = server_stats
        self._streams: dict[tuple[bytes, JobId], Stream] = {}
        self._operations: dict[str, Operation] = {
            "hello": self._hello,
            "ping": self._ping,
            "generate": self._generate,
            "credit": self._give_credit,
            "submit": self._submit,
            "poll": self._poll,
            "abort": self._abort,
            "stats": self._stats,
            "stages": self._stages,
            "models": self._models,
            "plan": self._plan,
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
            "drain": self._drain,
            "trace": self._trace,
        }

    async def do(self, call: Call) -> Reply:
        """The last reply to a message. Raises ActorppError."""
        operation = self._operations.get(call.header.op)
        if operation is None:
            known = ", ".join(self._operations)
            raise InvalidRequestError(f"unknown op {call.header.op!r}: known are {known}", param="op")
        return await operation(call)

    # --- about the server ---

    async def _hello(self, call: Call) -> Reply:
        limits = {
            **{name: getattr(WIRE_LIMITS, name) for name in WIRE_LIMITS.__dataclass_fields__},
            **msgspec.to_builtins(self._job_limits),
            "max_outstanding": MAX_OUTSTANDING,
            "max_wait_ms": MAX_WAIT_MS,
            "max_credit": MAX_CREDIT,
        }
        return Reply(
            {
                "protocol": "ACTORPP",
                "version": VERSION,
                "minor": MINOR,
                "features": [*self._operations, "raw_tokens", "priority"],
                "limits": limits,
                "heartbeat_ms": HEARTBEAT_MS,
                "model": self._gateway.model_name,
                "context_length": self._gateway.context_length,
                "stages": self._gateway.engine.num_stages,
            }
        )

    async def _ping(self, call: Call) -> Reply:
        return Reply({})

    async def _stats(self, call: Call) -> Reply:
        server = {**self._server_stats(), "requests_kept": len(self._jobs), "streams": len(self._streams)}
        return Reply({"engine": msgspec.to_builtins(self._gateway.stats()), "server": server})

    async def _stages(self, call: Call) -> Reply:
        return Reply({"stages": msgspec.to_builtins(self._gateway.stats().stages)})

    async def _models(self, call: Call) -> Reply:
        model = {"id": self._gateway.model_name, "context_length": self._gateway.context_length}
        return Reply({"models": [model]})

    async def _plan(self, call: Call) -> Reply:
        prompt_tokens = checked(call.fields, Prompted).prompt_tokens
        return Reply(msgspec.to_builtins(self._gateway.engine.plan(prompt_tokens)))

    # --- text and ids ---

    async def _tokenize(self, call: Call) -> Reply:
        raw = checked(call.fields, Generate).raw_tokens
        ids = await self._gateway.tokenize(parse_tokenize(call.fields))
        return with_tokens({"token_ids": ids.tolist(), "count": len(ids)}, ids, raw=raw)

    async def _detokenize(self, call: Call) -> Reply:
        ids = checked(call.fields, Detokenize).token_ids if call.ids is None else call.ids
        return Reply({"text": await self._gateway.detokenize(ids)})

    # --- requests ---

    async def _generate(self, call: Call) -> Reply:
        asked = checked(call.fields, Generate)
        if call.header.credit is not None and call.peer_type == "REQ":
            raise InvalidRequestError("credit: a REQ socket takes one reply; use submit and poll", param="credit")
        job = self._start(call, asked)
        async with _within(call.header.deadline_s):
            if call.header.credit is None:
                await job.until()
                return whole(job, raw=asked.raw_tokens)
            stream = Stream(job, call.header.credit, raw=asked.raw_tokens, progress=asked.progress, send=call.send)
            key = (call.peer, job.id)
            if key in self._streams:
                raise InvalidRequestError(f"request {job.id!r} is streamed to this client already", param="id")
            self._streams[key] = stream
            try:
                return await stream.run()
            finally:
                del self._streams[key]

    async def _give_credit(self, call: Call) -> Reply:
        request = checked(call.fields, Named).request
        if call.header.credit is None:
            raise InvalidRequestError("credit: the header says how much", param="credit")
        stream = self._streams.get((call.peer, request))
        # A stream that has ended needs none: its end and this message crossed.
        return Reply({"credit": 0 if stream is None else stream.give(call.header.credit)})

    async def _submit(self, call: Call) -> Reply:
        job = self._start(call, checked(call.fields, Generate))
        async with _within(call.header.deadline_s):
            await job.until(lambda: job.accepted)
        if job.prompt_tokens is None:
            raise job.cause()
        return Reply({"request": job.id, "prompt_tokens": job.prompt_tokens})

    async def _poll(self, call: Call) -> Reply:
        asked = checked(call.fields, Poll)
        job = self._jobs.get(asked.request)
        if asked.cursor > len(job.deltas):
            raise InvalidRequestError(f"cursor: {asked.cursor} is beyond {len(job.deltas)}", param="cursor")
        wait_ms = min(asked.wait_ms, call.header.deadline_ms or asked.wait_ms)
        with contextlib.suppress(TimeoutError):  # the answer is then that there is nothing new
            async with asyncio.timeout(wait_ms / 1000):
                await job.until(lambda: len(job.deltas) > asked.cursor)
        return news(job, asked.cursor, raw=asked.raw_tokens)[0]

    async def _abort(self, call: Call) -> Reply:
        job = self._jobs.get(checked(call.fields, Named).request)
        job.abort()
        return Reply({"request": job.id, "ended": job.ended})

    def _start(self, call: Call, asked: Generate) -> Job:
        fields = call.fields
        if asked.raw_tokens and fields.get("n", 1) != 1:
            raise InvalidRequestError("raw_tokens: only with n = 1", param="raw_tokens")
        if call.header.priority is not None:
            fields = {**fields, "priority": call.header.priority}
        if call.ids is not None:
            fields = {**fields, "prompt_tokens": call.ids}
        return self._jobs.start(call.header.id, call.fingerprint, parse_request(fields), call.header.deadline_s)

    # --- for administrators ---

    async def _drain(self, call: Call) -> Reply:
        """Take no new requests; answered when those under way have ended."""
        self._require_admin(call)
        async with _within(call.header.deadline_s):
            await self._gateway.drain()
        return Reply({"drained": True})

    async def _trace(self, call: Call) -> Reply:
        """The spans of every stage, and after that they are forgotten."""
        self._require_admin(call)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            await self._gateway.engine.write_trace(path)
            return Reply({"trace_buffer": 0}, buffers=(await asyncio.to_thread(path.read_bytes),))

    def _require_admin(self, call: Call) -> None:
        """Raises PermissionDeniedError unless the call shows the token of the connection file."""
        if self._admin_token is None:
            raise PermissionDeniedError(
                f"{call.header.op} is for administrators: start the server with --connection-file, and send its token"
            )
        if not hmac.compare_digest(self._admin_token.encode(), (call.header.token or "").encode()):
            raise PermissionDeniedError(
                f"{call.header.op} is for administrators: send the token of the connection file", param="token"
            )


@contextlib.asynccontextmanager
async def _within(seconds: float | None) -> AsyncIterator[None]:
    """``asyncio.timeout`` whose expiry is the protocol's own error."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise DeadlineExceededError("the deadline passed", param="deadline_ms") from None
