"""Ask and tell against their targets, beside pykka and xoscar in the same interleaved run.

    python -m tests.bench.actors [--rounds 7] [--json]

Every round measures all cases one after the other, so that all meet the same noise; the table shows the median over
rounds and the range. Targets are printed beside the numbers; missing one is no error here. A peer that is not
installed is named as missing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from actorpp.runtime import Actor, ActorRef, ActorSystem, Inbox, Request
from actorpp.transport.sockets import Dealer, Router
from actorpp.transport.wire import Codec

ASKS = 2_000
TELLS = 50_000
SLOW_ASKS = 300
"""For what takes more than 0.1 ms each."""
PEERS = ("pykka", "xoscar")


class Add(Request[int], frozen=True, tag="add"):
    """Asks for n + 1."""

    n: int


class Count(msgspec.Struct, frozen=True, tag="count"):
    """Is counted."""


class Header(msgspec.Struct, frozen=True):
    """Pairs a reply with its request on the wire."""

    id: int


class Result(msgspec.Struct, frozen=True, tag="result"):
    """The reply on the wire."""

    n: int


CODEC: Codec[Header, Add | Result] = Codec(Add | Result, Header)


@dataclass
class Case:
    """One line of the table. ``measure`` returns µs per ask, or thousands of tells per second."""

    name: str
    unit: str
    measure: Callable[[], float]
    target: float | None = None

    def met(self, value: float) -> bool | None:
        if self.target is None:
            return None
        return value <= self.target if self.unit == "us" else value >= self.target


# --- actorpp ----------------------------------------------------------------------------------------------------------


class Counter(Actor):
    """Answers Add and counts Count, in the main task."""

    inbox = Inbox[Add | Count](capacity=1024)

    def __init__(self) -> None:
        self.count = 0

    @inbox.handler
    async def on_message(self, message: Add | Count) -> int | None:
        if isinstance(message, Add):
            return message.n + 1
        self.count += 1
        return None


class InProcess:
    """One system with one Counter on one loop, kept between rounds."""

    def __init__(self, stack: contextlib.ExitStack, loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self.runner = stack.enter_context(asyncio.Runner(loop_factory=loop_factory))
        self.system = ActorSystem()
        self.ref = self.runner.run(self._open())
        stack.callback(lambda: self.runner.run(self.system.__aexit__(None, None, None)))

    async def _open(self) -> ActorRef:
        await self.system.__aenter__()
        return await self.system.spawn(Counter)

    def ask(self) -> float:
        address = self.ref[Counter.inbox]
        return self.runner.run(time_asks(lambda n: address.ask(Add(n), timeout=10.0), ASKS))

    def tell(self) -> float:
        async def tells() -> float:
            address, message = self.ref[Counter.inbox], Count()
            start = time.perf_counter()
            for _ in range(TELLS):
                await address.tell(message)
            await address.ask(Add(0))
            return TELLS / (time.perf_counter() - start) / 1e3

        return self.runner.run(tells())


async def time_asks(ask: Callable[[int], Awaitable[int]], count: int) -> float:
    """Microseconds per ask, one after the other."""
    for n in range(count // 10):
        await ask(n)
    start = time.perf_counter()
    for n in range(count):
        if await ask(n) != n + 1:
            raise RuntimeError("a wrong answer")
    return (time.perf_counter() - start) / count * 1e6


class TwoProcesses:
    """A Counter in a child process, asked through the project's own sockets and wire format over ipc."""

    def __init__(self, stack: contextlib.ExitStack, loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self.folder = stack.enter_context(tempfile.TemporaryDirectory())
        self.runner = stack.enter_context(asyncio.Runner(loop_factory=loop_factory))
        self.endpoint = f"ipc://{Path(self.folder, 'bench')}"
        command = [sys.executable, "-m", "tests.bench.actors", "--serve", self.endpoint]
        child = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE))
        stack.callback(child.kill)
        self.waiting: dict[int, asyncio.Future[int]] = {}
        self.dealer = self.runner.run(self._connect())
        stack.callback(lambda: self.runner.run(self.dealer.close()))

    async def _connect(self) -> Dealer:
        return Dealer(self.endpoint, b"bench#1", self._on_reply, lambda frames, reason: None)

    def _on_reply(self, frames: list[bytes]) -> None:
        reply = CODEC.decode(frames)
        self.waiting.pop(reply.header.id).set_result(reply.message.n)

    async def _ask(self, n: int) -> int:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.waiting[n] = future
        self.dealer.send(CODEC.encode(Add(n), Header(n)))
        return await future

    def ask(self) -> float:
        return self.runner.run(time_asks(self._ask, ASKS))


class BareFrames:
    """What the frames alone cost: blocking pyzmq on both sides, without loop, codec or actor."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        endpoint = f"ipc://{Path(folder, 'bare')}"
        child = stack.enter_context(subprocess.Popen([sys.executable, "-m", "tests.bench.actors", "--echo", endpoint]))
        stack.callback(child.kill)
        context = stack.enter_context(zmq.Context())
        self.socket = stack.enter_context(context.socket(zmq.DEALER))
        self.socket.linger = 0
        self.socket.connect(endpoint)
        self.frames = CODEC.encode(Add(0), Header(0))

    def ask(self) -> float:
        start = time.perf_counter()
        for _ in range(ASKS):
            self.socket.send_multipart(self.frames)
            self.socket.recv_multipart()
        return (time.perf_counter() - start) / ASKS * 1e6


def echo(endpoint: str) -> None:
    """The child of BareFrames, until it is killed."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(endpoint)
        while True:
            socket.send_multipart(socket.recv_multipart())


async def serve(endpoint: str) -> None:
    """The child: a Router whose reader asks the actor, which sends its answer back, until stdin closes."""
    async with ActorSystem() as system:
        address = (await system.spawn(Counter))[Counter.inbox]
        failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_message(peer: bytes, frames: list[bytes]) -> None:
            request = CODEC.decode(frames)
            if isinstance(request.message, Add):

                def reply(n: int) -> None:
                    router.send(peer, CODEC.encode(Result(n), request.header))

                address.ask_nowait(request.message, reply, failure.set_exception, timeout=10.0)

        router = Router(endpoint, on_message, lambda peer, frames, reason: None)
        closing = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
        await asyncio.wait({closing, failure}, return_when=asyncio.FIRST_COMPLETED)
        await router.close()
        if failure.done():
            failure.result()


# --- peers ------------------------------------------------------------------------------------------------------------


def pykka_cases(stack: contextlib.ExitStack) -> Iterator[Case]:
    import pykka

    class Peer(pykka.ThreadingActor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def on_receive(self, message: Any) -> Any:
            if isinstance(message, int):
                return message + 1
            self.count += 1
            return None

    ref = Peer.start()
    stack.callback(ref.stop)

    def ask() -> float:
        start = time.perf_counter()
        for n in range(ASKS):
            ref.ask(n, timeout=10.0)
        return (time.perf_counter() - start) / ASKS * 1e6

    def tell() -> float:
        start = time.perf_counter()
        for _ in range(TELLS):
            ref.tell(None)
        ref.ask(0)
        return TELLS / (time.perf_counter() - start) / 1e3

    yield Case("pykka: ask, between threads", "us", ask)
    yield Case("pykka: tell, between threads", "k/s", tell)


def xoscar_cases(stack: contextlib.ExitStack) -> Iterator[Case]:
    import xoscar

    class Peer(xoscar.Actor):  # type: ignore[misc]
        async def add(self, n: int) -> int:
            return n + 1

    async def ask(ref: Any, n: int) -> int:
        return int(await ref.add(n))

    runner = stack.enter_context(asyncio.Runner())

    async def start() -> tuple[Any, Any, Any]:
        pool = await xoscar.create_actor_pool("127.0.0.1", n_process=1)
        near = await xoscar.create_actor(Peer, address=pool.external_address, uid="near")
        far = await xoscar.create_actor(Peer, address=next(iter(pool.sub_processes)), uid="far")
        return pool, near, far

    pool, near, far = runner.run(start())
    stack.callback(lambda: runner.run(pool.stop()))

    async def tells() -> float:
        start = time.perf_counter()
        for n in range(SLOW_ASKS):
            await near.add.tell(n)
        await near.add(0)
        return SLOW_ASKS / (time.perf_counter() - start) / 1e3

    yield Case("xoscar: ask, in process", "us", lambda: runner.run(time_asks(lambda n: ask(near, n), SLOW_ASKS)))
    yield Case("xoscar: tell, in process", "k/s", lambda: runner.run(tells()))
    yield Case("xoscar: ask, between processes", "us", lambda: runner.run(time_asks(lambda n: ask(far, n), SLOW_ASKS)))


# --- the run ----------------------------------------------------------------------------------------------------------


def all_cases(stack: contextlib.ExitStack, peers: bool) -> tuple[list[Case], list[str]]:
    """The cases that can run here, and what is missing."""
    missing = [name for name in ("uvloop", *PEERS) if importlib.util.find_spec(name) is None]
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if "uvloop" not in missing:
        loops = {"uvloop": importlib.import_module("uvloop").new_event_loop, **loops}
    cases = []
    for name, factory in loops.items():
        local, remote = InProcess(stack, factory), TwoProcesses(stack, factory)
        cases += [
            Case(f"actorpp: ask, in process, {name}", "us", local.ask, 12.0),
            Case(f"actorpp: tell, in process, {name}", "k/s", local.tell, 500.0),
            Case(f"actorpp: ask, between processes over ipc, {name}", "us", remote.ask, 150.0),
        ]
    cases.append(Case("pyzmq: the same frames over ipc, blocking", "us", BareFrames(stack).ask))
    if peers and "pykka" not in missing:
        cases += pykka_cases(stack)
    if peers and "xoscar" not in missing:
        cases += xoscar_cases(stack)
    return cases, missing


def report(rows: list[dict[str, Any]], missing: list[str], load: float) -> None:
    """Print the table."""
    print(f"load average before the run: {load:.1f} on {os.cpu_count()} cores; a busy machine measures its neighbours")
    print(f"{'case':<55}{'median':>9}{'lowest':>9}{'highest':>9}  {'unit':<6}target")
    for row in rows:
        target = "" if row["target"] is None else f"{row['target']:g} ({'met' if row['met'] else 'MISSED'})"
        values = "".join(f"{row[key]:>9.1f}" for key in ("median", "lowest", "highest"))
        print(f"{row['case']:<55}{values}  {row['unit']:<6}{target}")
    for name in missing:
        print(f"{name}: not installed, so not measured")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of all cases (default 7)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--no-peers", action="store_true", help="leave pykka and xoscar out")
    parser.add_argument("--serve", metavar="ENDPOINT", help=argparse.SUPPRESS)
    parser.add_argument("--echo", metavar="ENDPOINT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.echo:
        echo(options.echo)
    if options.serve:
        loop_factory = importlib.import_module("uvloop").new_event_loop if importlib.util.find_spec("uvloop") else None
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(serve(options.serve))
        return
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        cases, missing = all_cases(stack, peers=not options.no_peers)
        values: dict[str, list[float]] = {case.name: [] for case in cases}
        for _ in range(options.rounds):
            for case in cases:
                values[case.name].append(case.measure())
    rows = []
    for case in cases:
        median = statistics.median(values[case.name])
        spread = {"lowest": min(values[case.name]), "highest": max(values[case.name])}
        rows.append(
            {"case": case.name, "unit": case.unit, "median": median, **spread, "target": case.target}
            | {"met": case.met(median)}
        )
    if options.json:
        print(json.dumps({"rounds": options.rounds, "results": rows, "missing": missing, "load": load}))
    else:
        report(rows, missing, load)


if __name__ == "__main__":
    main()
