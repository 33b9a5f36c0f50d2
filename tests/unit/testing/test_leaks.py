"""What a test leaves behind is found, and nothing else."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading

import pytest

from actorpp.runtime import Actor, ActorSystem
from actorpp.testing import LeakError, leaks, no_leaks


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "PATIENCE", 0.05)


def test_nothing_left_is_fine() -> None:
    async def main() -> None:
        class Thinker(Actor):
            async def run(self) -> None:
                await self.offload(int)

        async with ActorSystem() as system:
            await (await system.spawn(Thinker)).join()
        await asyncio.to_thread(int)

    with no_leaks():
        asyncio.run(main())
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
        subprocess.run([sys.executable, "-c", ""], check=True)
        with socket.socket():
            pass


def test_a_task() -> None:
    async def main() -> None:
        asyncio.get_running_loop().create_task(asyncio.Event().wait(), name="forgotten")

    with pytest.raises(LeakError, match="task forgotten"), no_leaks():
        asyncio.run(main())


def test_a_thread() -> None:
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, name="lost-1")
    with pytest.raises(LeakError, match="thread lost-1"), no_leaks():
        thread.start()
    with no_leaks(ignore_threads=["lost"]):
        pass
    gate.set()
    thread.join()


def test_ignored_threads() -> None:
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, name="monitor-1")
    with no_leaks(ignore_threads=["monitor"]):
        thread.start()
    gate.set()
    thread.join()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are seen through /proc")
def test_a_socket_and_a_pipe() -> None:
    with pytest.raises(LeakError, match=r"socket:.*socket:"), no_leaks():
        pair = socket.socketpair()
    for end in pair:
        end.close()
    with pytest.raises(LeakError, match="pipe:"), no_leaks():
        fds = os.pipe()
    for fd in fds:
        os.close(fd)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="processes are seen through /proc")
def test_a_child_process() -> None:
    with pytest.raises(LeakError, match=r"process \d+"), no_leaks():
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child.communicate()


def test_an_error_in_the_block_comes_first() -> None:
    with pytest.raises(KeyError), no_leaks():
        raise KeyError
