"""The fuzzers: what malformed messages do to the codecs, to the inner sockets, and to the socket of clients.

A run raises AssertionError at the first message that does what no message may, with its number; with the seed it comes
again. Memory is this process's own, the client in it included.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import zmq

from actorpp.config import EngineConfig
from actorpp.errors import ProtocolError
from actorpp.serving.gateway import Gateway
from actorpp.serving.jobs import JobLimits
from actorpp.serving.protocol import WIRE_LIMITS, RequestHeader
from actorpp.serving.zmq_server import ZmqServer
from actorpp.stages.codecs import driver_to_stage, stage_to_driver, stage_to_stage
from actorpp.transport.sockets import Router
from actorpp.transport.wire import MAGIC, Codec
from tests.fuzz.messages import Malformed
from tests.unit.serving.fakes import FakeEngine

BATCH = 50  # messages under way at once; after each batch nothing but the replies to them may have come
TIMEOUT_MS = 60_000  # a ceiling: a reply that never comes fails the run
GROWTH_BYTES = 48 << 20  # of memory from a tenth of the run on: allocators keep some
JOB_LIMITS = JobLimits(max_finished=64)


class Report:
    """Counts of one run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()
        self.started = time.monotonic()
        self.seconds = 0.0
        self.grown = 0

    def end(self, grown: int) -> Report:
        self.seconds = time.monotonic() - self.started
        self.grown = grown
        return self

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))
        return f"{self.name}: {counts}; {self.seconds:.1f} s, memory {self.grown / 1e6:+.1f} MB"


class Footprint:
    """Memory and descriptors, from the moment ``take`` is called; before that caches and pools fill."""

    def __init__(self) -> None:
        self._memory = 0
        self._descriptors = 0

    def take(self) -> None:
        self._memory, self._descriptors = _memory(), len(os.listdir("/proc/self/fd"))

    def check(self) -> int:
        """Bytes grown since. Raises AssertionError when memory or descriptors leak."""
        grown = _memory() - self._memory
        assert grown < GROWTH_BYTES, f"memory grew by {grown} bytes"
        descriptors = len(os.listdir("/proc/self/fd"))
        assert descriptors <= self._descriptors, f"{descriptors - self._descriptors} descriptors leaked"
        return grown


def _memory() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def fuzz_codecs(seed: int, count: int) -> Report:
    """Every codec with every message: a message of its own, or a ProtocolError, and nothing else."""
    report, malformed, footprint = Report("codecs"), Malformed(seed), Footprint()
    clients: Codec[RequestHeader, dict[str, Any]] = Codec(dict[str, Any], RequestHeader, WIRE_LIMITS)
    codecs: list[Codec[Any, Any]] = [clients, driver_to_stage(), stage_to_driver(), stage_to_stage()]
    for number in range(count):
        if number == count // 10:
            footprint.take()
        frames = [b"", *malformed.client_message()] if number % 2 else malformed.inner_message()
        for codec in codecs:
            try:
                codec.decode(frames)
                report.counts["decoded"] += 1
            except ProtocolError:
                report.counts["refused"] += 1
            except Exception as error:
                raise AssertionError(f"message {number}: {error!r} from {frames!r}") from error
    return report.end(footprint.check())


async def fuzz_inner_sockets(seed: int, count: int) -> Report:
    """A ROUTER as driver and inlets have it: each message is handed over, or its error reported, and none stops it."""
    report, footprint = Report("inner sockets"), Footprint()
    codecs: list[Codec[Any, Any]] = [stage_to_driver(), stage_to_stage()]
    heard = asyncio.Event()
    errors: list[BaseException] = []

    def on_message(peer: bytes, frames: list[bytes]) -> None:
        heard.set()
        number = sum(report.counts.values())
        report.counts["refused"] += 1
        codecs[number % 2].decode(frames)
        report.counts["refused"] -= 1
        report.counts["decoded"] += 1

    router = Router(
        "tcp://127.0.0.1:*", on_message, lambda *letter: None, on_error=errors.append, limits=codecs[0].limits
    )

    def flood() -> None:
        malformed = Malformed(seed)
        with zmq.Context() as context, context.socket(zmq.DEALER) as client:
            client.linger = TIMEOUT_MS
            client.connect(router.endpoint)
            for _ in range(count):
                client.send_multipart(malformed.inner_message())

    flooding = asyncio.create_task(asyncio.to_thread(flood))
    async with asyncio.timeout(TIMEOUT_MS / 1000 + count / 100):
        while (total := sum(report.counts.values())) < count:
            if total > count // 10 and not footprint._memory:
                footprint.take()
            heard.clear()
            await heard.wait()
            other = [error for error in errors if not isinstance(error, ProtocolError)]
            assert not other, repr(other[0])
            errors.clear()
    await flooding
    grown = footprint.check()
    await router.close()
    return report.end(grown)


async def fuzz_client_socket(seed: int, count: int) -> Report:
    """A server over a fake engine: one last reply to each message, for REQ and for DEALER, and nothing left behind."""
    report = Report("socket of clients")
    engine = FakeEngine(EngineConfig())
    async with ZmqServer("127.0.0.1", 0, job_limits=JOB_LIMITS) as server, engine, Gateway(engine, "fake") as gateway:
        serving = asyncio.create_task(server.serve(gateway))
        try:
            grown = await asyncio.to_thread(_attack, server.endpoint, seed, count, report)
            assert not engine.running, "requests are left in the engine"
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
    return report.end(grown)


def _attack(endpoint: str, seed: int, count: int, report: Report) -> int:
    malformed, footprint = Malformed(seed), Footprint()
    with zmq.Context() as context, context.socket(zmq.REQ) as req, context.socket(zmq.DEALER) as dealer:
        for socket in (req, dealer):
            socket.linger, socket.rcvtimeo = 0, TIMEOUT_MS
            socket.connect(endpoint)
        done = 0
        while done < count:
            if done >= count // 10 and not footprint._memory:
                footprint.take()
            batch = min(BATCH, count - done)
            attack = _as_req if done // BATCH % 2 else _as_dealer
            attack(req if attack is _as_req else dealer, malformed, batch, done, report.counts)
            done += batch
        _, stats = _ping(req, [], "stats")
        server = stats["server"]
        assert server["outstanding"] == 1, server
        assert server["streams"] == 0, server
        assert server["requests_kept"] <= JOB_LIMITS.max_finished, server
        assert server["undeliverable"] == 0, server
        return footprint.check()


def _as_req(socket: zmq.Socket[bytes], malformed: Malformed, batch: int, done: int, counts: Counter[str]) -> None:
    for number in range(batch):
        socket.send_multipart(malformed.client_message())
        header, _ = _reply(socket.recv_multipart(), done + number)
        assert header["seq"] == 0, f"message {done + number}: a REQ got reply {header['seq']}"
        counts[f"REQ: {header['status']}"] += 1
    _ping(socket, [], "ping")


def _as_dealer(socket: zmq.Socket[bytes], malformed: Malformed, batch: int, done: int, counts: Counter[str]) -> None:
    for _ in range(batch):
        socket.send_multipart([b"", *malformed.client_message()])
    last = 0
    while last < batch:
        header, body = _reply(_after_delimiter(socket.recv_multipart()), done)
        if header["status"] == "more" and "cursor" in body and header["seq"] == 0:
            counts["DEALER: more"] += 1
        if header["status"] != "more" or _is_poll(header, body):
            counts[f"DEALER: {header['status']}"] += 1
            last += 1
    _ping(socket, [b""], "ping")  # nothing more has come before its answer


def _is_poll(header: dict[str, Any], body: dict[str, Any]) -> bool:
    return bool(header["id"] != body.get("request"))


def _after_delimiter(frames: list[bytes]) -> list[bytes]:
    return frames[frames.index(b"") + 1 :]


def _ping(socket: zmq.Socket[bytes], delimiter: list[bytes], op: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """An operation whose answer must be the next that comes."""
    identity = os.urandom(8).hex()
    header = msgpack.packb({"id": identity, "op": op})
    socket.send_multipart([*delimiter, MAGIC, header, b"\x80"])
    frames = socket.recv_multipart()
    header, body = _reply(_after_delimiter(frames) if delimiter else frames, -1)
    assert header["id"] == identity, f"a reply too many: {header}"
    return header, body


def _reply(frames: list[bytes], number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    assert len(frames) in (3, 4), f"message {number}: replied with {frames!r}"
    assert frames[0] == MAGIC, f"message {number}: replied with {frames!r}"
    header, body = msgpack.unpackb(frames[1]), msgpack.unpackb(frames[2], strict_map_key=False)
    assert set(header) == {"id", "status", "seq", "boot"}, header
    if header["status"] == "error":
        assert set(body) == {"code", "message", "param", "retryable", "retry_after_ms", "stage"}, body
        assert body["code"] != "internal", f"message {number}: {body['message']}"
    return header, body


RUNS: dict[str, Callable[[int, int], Report]] = {
    "codecs": fuzz_codecs,
    "inner": lambda seed, count: asyncio.run(fuzz_inner_sockets(seed, count)),
    "clients": lambda seed, count: asyncio.run(fuzz_client_socket(seed, count)),
}
