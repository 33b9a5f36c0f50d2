"""Messages between processes over ipc and tcp."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from actorpp.errors import PeerUnreachableError
from actorpp.transport.sockets import Router
from actorpp.transport.wire import Frame

Run = Callable[[Any], None]


class Driver:
    """A Router and a queue of what it hears."""

    def __init__(self, bind: str, **options: Any) -> None:
        self.heard: asyncio.Queue[tuple[bytes, list[bytes]]] = asyncio.Queue()
        self.dead: asyncio.Queue[tuple[bytes, str]] = asyncio.Queue()
        self.router = Router(bind, self._hear, self._dead_letter, **options)

    def _hear(self, peer: bytes, frames: list[bytes]) -> None:
        self.heard.put_nowait((peer, frames))

    def _dead_letter(self, peer: bytes, frames: Sequence[Frame], reason: str) -> None:
        self.dead.put_nowait((peer, reason))


@pytest.fixture(params=["ipc", "tcp"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s" if request.param == "ipc" else "tcp://127.0.0.1:*"


@pytest.mark.parametrize("loop_of_peers", ["uvloop", "asyncio"])
def test_two_processes_answer(run: Run, start: Any, endpoint: str, loop_of_peers: str) -> None:
    async def main() -> None:
        driver = Driver(endpoint, outbox=1000)
        async with start() as program:
            stages = [program("dealer", driver.router.endpoint, f"stage-{i}#1", loop_of_peers) for i in range(2)]
            pids = {}
            for _ in stages:
                peer, (_, pid) = await driver.heard.get()
                pids[peer] = int(pid)
            assert pids == {f"stage-{i}#1".encode(): stage.child.pid for i, stage in enumerate(stages)}
            for i in range(500):  # all at once: outboxes and batches
                for peer in pids:
                    driver.router.send(peer, [str(i).encode(), bytes(i)])
            answers: dict[bytes, list[list[bytes]]] = {peer: [] for peer in pids}
            for _ in range(1000):
                peer, frames = await driver.heard.get()
                answers[peer].append(frames)
            expected = [[str(i).encode(), bytes(i)] for i in range(500)]
            assert answers == dict.fromkeys(pids, expected)
            for i in range(100):  # one by one: each wake-up has to be seen
                for peer in pids:
                    driver.router.send(peer, [str(i).encode()])
                    assert await driver.heard.get() == (peer, [str(i).encode()])
            for peer in pids:
                driver.router.send(peer, [b"stop"])
            for stage in stages:
                assert await stage.child.wait() == 0
                assert stage.lines == ["done"]
        await driver.router.close()
        assert driver.dead.empty()

    run(main())


def test_a_killed_peer_becomes_unreachable_and_its_successor_is_heard(run: Run, start: Any, endpoint: str) -> None:
    async def main() -> None:
        driver = Driver(endpoint, outbox=3)
        async with start() as program:
            first = program("dealer", driver.router.endpoint, "stage-0#1", "uvloop")
            peer, _ = await driver.heard.get()
            first.child.send_signal(signal.SIGSTOP)  # it hangs: its outbox fills, and the limit holds
            with pytest.raises(PeerUnreachableError, match="3 messages wait"):  # noqa: PT012
                for _ in range(1000):
                    driver.router.send(peer, [bytes(1 << 20)])
            first.child.kill()
            for _ in range(3):
                assert await driver.dead.get() == (peer, "no such peer is connected")
            with pytest.raises(PeerUnreachableError, match="no such peer"):
                driver.router.send(peer, [b"x"])
            program("dealer", driver.router.endpoint, "stage-0#2", "uvloop")
            peer, _ = await driver.heard.get()
            driver.router.send(peer, [b"welcome"])
            assert await driver.heard.get() == (b"stage-0#2", [b"welcome"])
        await driver.router.close()

    run(main())


def test_unsent_messages_do_not_hold_up_the_exit(run: Run, start: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with start() as program:
            running = program("unsent", f"ipc://{tmp_path}/nobody")
            assert int(await running.says("sent")) > 0
            await running.says("leaving")
            async with asyncio.timeout(5):
                assert await running.child.wait() == 0

    run(main())


def test_a_flush_delivers_everything_before_the_exit(run: Run, start: Any, endpoint: str) -> None:
    async def main() -> None:
        driver = Driver(endpoint)
        async with start() as program:
            running = program("flush", driver.router.endpoint, 900)
            got = [int((await driver.heard.get())[1][0]) for _ in range(900)]
            assert got == list(range(900))
            assert await running.child.wait() == 0
            assert running.lines == []  # no dead letter
        await driver.router.close()

    run(main())


def test_an_ask_between_two_processes_is_quick(run: Run, start: Any, tmp_path: Path) -> None:
    """150 µs is typical on two busy cores; five times that is a fault, not a slow machine."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        driver = Driver(f"ipc://{tmp_path}/s")
        async with start() as program:
            program("dealer", driver.router.endpoint, "stage-0#1", "uvloop")
            peer, _ = await driver.heard.get()
            times = []
            for _ in range(500):
                asked = loop.time()
                driver.router.send(peer, [b"", b"ask"])
                await driver.heard.get()
                times.append(loop.time() - asked)
            assert sorted(times)[250] < 750e-6
        await driver.router.close()

    run(main())
