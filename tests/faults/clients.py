"""Clients of every kind for a real engine: those that wait, and those that abort, are too late, talk rubbish or vanish.

Half of them come through the socket, as protocol ACTORPP/1; the socket, and the clients, live in this process. Each
checks what it gets; what is left behind when all have gone is for the caller to look at.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from actorpp.engine import Engine
from actorpp.errors import ActorppError
from actorpp.serving.api import Finished, GenerationParams, Tokens
from actorpp.serving.gateway import Gateway
from actorpp.serving.jobs import JobLimits
from actorpp.serving.zmq_server import ZmqServer

KINDS = ("short", "long", "streaming", "aborted", "too late", "bad", "vanishing")

PATIENCE_S = 300.0
"""Ceiling of one client: longer than any recovery."""

KEPT = 64
"""Ended requests that the socket's server remembers, so that what it holds is full soon."""

MOMENT_S = 0.4
"""Aborts and deadlines come within so much of the beginning: before, in and after what a request takes."""

TOO_LONG = [5] * 2_000_000
"""A prompt that must be refused. Made once: the driver's memory, which clients share, is watched."""

ENDS = {"aborted": {"abort", "length"}, "too late": {"deadline_exceeded", "length"}}


class Clients:
    """Args:
    engine: Started.
    endpoint: Of its socket.
    longest: Tokens of the longest prompt.

    Attributes:
        ends: How often which kind of client ended how.
        longest_s: For each kind, the longest time from asking to the end.
        wrong: What should not have happened, in words.
    """

    def __init__(self, engine: Engine, endpoint: str, seed: int, *, longest: int) -> None:
        self.ends: Counter[str] = Counter()
        self.longest_s: dict[str, float] = {}
        self.wrong: list[str] = []
        self._engine = engine
        self._endpoint = endpoint
        self._generator = random.Random(f"clients {seed}")
        self._vocab = engine.checkpoint.vocab_size
        self._longest = longest
        self._context = zmq.asyncio.Context()
        self._numbers = 0

    async def some(self, count: int) -> None:
        """So many at once, of kinds drawn at random; returns when all have gone."""
        await asyncio.gather(*(self.one(kind) for kind in self._generator.choices(KINDS, k=count)))

    async def one(self, kind: str) -> None:
        """One of this kind."""
        tokens, began = 8, asyncio.get_running_loop().time()
        match kind:
            case "short":
                prompt, tokens = self._prompt(4), 2
            case "long":
                prompt = self._prompt(self._longest, self._longest // 2)
            case _:
                prompt = self._prompt(100)
        try:
            async with asyncio.timeout(PATIENCE_S):
                match kind:
                    case "streaming":
                        end = await self._stream(prompt, tokens)
                    case "bad":
                        end = await self._rubbish()
                    case "vanishing":
                        end = await self._vanish(prompt, tokens)
                    case _:
                        end = await self._complete(kind, prompt, tokens)
        except TimeoutError:
            end = "no end"
        self.ends[f"{kind}: {end}"] += 1
        seconds = asyncio.get_running_loop().time() - began
        self.longest_s[kind] = max(seconds, self.longest_s.get(kind, 0.0))
        expected = {"bad": {"refused"}, "vanishing": {"gone"}, **ENDS}.get(kind, {"length"})
        if end not in expected:
            self.wrong.append(f"a client of the kind {kind!r} ended with {end}")

    def summary(self) -> str:
        """A table in Markdown, and what was wrong."""
        rows = (
            f"| {end} | {count} | {self.longest_s[end.partition(':')[0]]:.2f} s |"
            for end, count in sorted(self.ends.items())
        )
        return "\n".join(["| client: end | count | longest of the kind |", "|---|---|---|", *rows, *self.wrong])

    async def ask(self, op: str, **body: Any) -> dict[str, Any]:
        """One question to the socket, and its answer's body."""
        with self._context.socket(zmq.REQ) as socket:
            socket.connect(self._endpoint)
            _, answer = await self._exchange(socket, self._message(op, body))
            return answer

    def close(self) -> None:
        self._context.destroy(linger=0)

    # --- at the engine -----------------------------------------------------------------------------------------------

    async def _complete(self, kind: str, prompt: list[int], tokens: int) -> str:
        moment = self._generator.uniform(0, MOMENT_S)
        params = GenerationParams(
            max_tokens=tokens, ignore_eos=True, deadline_s=max(moment, 1e-3) if kind == "too late" else None
        )
        got = 0
        try:
            handle = self._engine.submit(prompt, params)
            if kind == "aborted":
                asyncio.get_running_loop().call_later(moment, handle.abort)
            async for event in handle:
                match event:
                    case Tokens(ids):
                        got += len(ids)
                    case Finished(reason):
                        return reason if reason != "length" or got == tokens else f"{got} tokens"
        except ActorppError as error:
            return error.code
        return "no last event"

    # --- at the socket -----------------------------------------------------------------------------------------------

    async def _stream(self, prompt: list[int], tokens: int) -> str:
        """To its end, with credit for all of it."""
        got = 0
        with self._context.socket(zmq.DEALER) as socket:
            socket.connect(self._endpoint)
            body = {"prompt_tokens": prompt, "max_tokens": tokens, "ignore_eos": True}
            message = [b"", *self._message("generate", body, credit=64)]
            while True:
                header, part = await self._exchange(socket, message)
                message = []
                if header["status"] == "error":
                    return str(part["code"])
                got += len(part["token_ids"])
                if header["status"] == "end":
                    return str(part["finish_reason"]) if got == tokens else f"{got} tokens"

    async def _rubbish(self) -> str:
        """Something that must be refused, whatever else goes on."""
        prompt = {"prompt_tokens": self._prompt(10)}
        op, body = self._generator.choice(
            [
                ("generate", {}),
                ("generate", {"prompt_tokens": []}),
                ("generate", {"prompt_tokens": [self._vocab]}),
                ("generate", {"prompt_tokens": TOO_LONG}),
                ("generate", prompt | {"max_tokens": 0}),
                ("generate", prompt | {"max_tokens": 10**8}),
                ("generate", prompt | {"temperature": -1}),
                ("generate", prompt | {"stop": ["a stop string, of a model without tokenizer"]}),
                ("poll", {"request": "never seen"}),
                ("no such operation", {}),
            ]
        )
        message = self._message(op, body)
        match self._generator.randrange(4):
            case 0:
                message[0] = self._generator.randbytes(8)
            case 1:
                message[1] = self._generator.randbytes(30)
            case 2:
                message[2] = message[2][:-1] + b"\xc1"  # a byte that MessagePack never uses
        with self._context.socket(zmq.REQ) as socket:
            socket.connect(self._endpoint)
            header, _ = await self._exchange(socket, message)
            return "refused" if header["status"] == "error" else str(header["status"])

    async def _vanish(self, prompt: list[int], tokens: int) -> str:
        """Closes its socket when the server has taken the request, or has told it some of the answer."""
        with self._context.socket(zmq.DEALER) as socket:
            socket.connect(self._endpoint)
            body = {"prompt_tokens": prompt, "max_tokens": tokens, "ignore_eos": True}
            if self._generator.random() < 0.5:
                message = self._message("submit", body)
            else:
                message = self._message("generate", body | {"progress": True}, credit=8)
            header, part = await self._exchange(socket, [b"", *message])
            return str(part["code"]) if header["status"] == "error" else "gone"

    async def _exchange(
        self, socket: zmq.asyncio.Socket, message: list[bytes]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Send the message, if there is one, and wait for a reply."""
        socket.linger = 0
        if message:
            await socket.send_multipart(message)
        header, body, *_ = (await socket.recv_multipart())[2 if socket.type == zmq.DEALER else 1 :]
        return msgpack.unpackb(header), msgpack.unpackb(body)

    def _message(self, op: str, body: dict[str, Any], **header: Any) -> list[bytes]:
        self._numbers += 1
        return [b"ACTORPP1", msgpack.packb({"id": self._numbers, "op": op, **header}), msgpack.packb(body)]

    def _prompt(self, longest: int, shortest: int = 1) -> list[int]:
        length = self._generator.randint(shortest, longest)
        return [self._generator.randrange(5, self._vocab) for _ in range(length)]


@asynccontextmanager
async def clients_of(engine: Engine, seed: int, *, longest: int) -> AsyncIterator[Clients]:
    """Clients for this engine, through a socket of its own on loopback."""
    async with (
        ZmqServer("127.0.0.1", 0, job_limits=JobLimits(max_finished=KEPT)) as server,
        Gateway(engine, "tiny") as gateway,
    ):
        serving = asyncio.create_task(server.serve(gateway))
        clients = Clients(engine, server.endpoint, seed, longest=longest)
        try:
            await asyncio.sleep(0)
            yield clients
        finally:
            clients.close()
            serving.cancel()
            await asyncio.wait([serving])
