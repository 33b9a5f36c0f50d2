"""Stage processes: started, watched, ended, and gone when their driver is."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Callable
from typing import Any

import pytest

from actorpp.errors import ConfigError
from actorpp.transport.process import MAX_LINE, ChildProcess

Run = Callable[[Any], None]


async def gone(pidfd: int, within_s: float) -> bool:
    """Whether the process of a pidfd ends in time, whoever its parent is."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    events = await asyncio.get_running_loop().run_in_executor(None, poller.poll, within_s * 1000)
    os.close(pidfd)
    return bool(events)


@pytest.mark.parametrize("code", [0, 3, 255])
def test_exit_codes(run: Run, start: Any, code: int) -> None:
    async def main() -> None:
        async with start() as program:
            child = program("child", "exit", code).child
            assert child.returncode is None
            waits = [asyncio.create_task(child.wait()) for _ in range(2)]
            waits.append(asyncio.create_task(child.wait()))
            await asyncio.sleep(0)
            waits.pop().cancel()
            assert [await wait for wait in waits] == [code, code]
            assert child.returncode == code
            with pytest.raises(ProcessLookupError):  # not even a zombie is left
                os.kill(child.pid, 0)
            child.kill()  # harmless by now
            assert await child.stop() == code

    run(main())


def test_output_comes_line_by_line(run: Run, start: Any) -> None:
    async def main() -> None:
        async with start() as program:
            running = program("child", "lines")
            assert await running.child.wait() == 0
            long = [line for line in running.lines if set(line) == {"é"}]
            assert "".join(long) == "é" * 20_000
            assert max(map(len, long)) == MAX_LINE
            assert [line for line in running.lines if line not in long] == [
                "first",
                "second",
                "\ufffd\ufffd broken",
                "no line end",
            ]

    run(main())


def test_what_a_child_inherits(run: Run, start: Any) -> None:
    async def main() -> None:
        async with start() as program:
            held = os.open("/dev/null", os.O_RDONLY)
            first = program("child", "wait")
            running = program("child", "environment", env={"FROM_DRIVER": "value"})
            assert await running.says("variable") == "value"
            assert await running.says("group") == "True"
            assert await running.says("stdin") == "''"
            descriptors = await running.says("descriptors")
            liveness = await running.says("liveness")
            # The liveness pipe, and the one that listing the directory takes.
            assert len(descriptors.split(",")) == 2
            assert liveness in descriptors
            os.close(held)
            await first.says("ready")

    run(main())


def test_sigint_is_left_to_the_driver(run: Run, start: Any) -> None:
    async def main() -> None:
        async with start() as program:
            running = program("child", "sigint")
            await running.says("still here")
            assert await running.child.wait() == 0

    run(main())


def test_stop_terminates_and_then_kills(run: Run, start: Any) -> None:
    async def main() -> None:
        async with start() as program:
            willing, deaf, stopped, slow = (
                program("child", how) for how in ("wait", "ignore-term", "wait", "ignore-term")
            )
            for running, word in ((willing, "ready"), (deaf, "ignoring"), (stopped, "ready"), (slow, "ignoring")):
                await running.says(word)
            assert await willing.child.stop(grace_s=30) == -signal.SIGTERM
            assert await deaf.child.stop(grace_s=0.05) == -signal.SIGKILL
            stopped.child.send_signal(signal.SIGSTOP)
            assert await stopped.child.stop(grace_s=0.05) in (-signal.SIGTERM, -signal.SIGKILL)
            stopping = asyncio.create_task(slow.child.stop(grace_s=1000))
            await asyncio.sleep(0)
            stopping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stopping
            assert await slow.child.wait() == -signal.SIGKILL

    run(main())


def test_an_end_is_noticed_without_being_asked_for(run: Run, start: Any) -> None:
    async def main() -> None:
        async with start() as program:
            running = program("child", "wait")
            await running.says("ready")
            waiting = asyncio.create_task(running.child.wait())
            os.kill(running.child.pid, signal.SIGKILL)
            assert await waiting == -signal.SIGKILL

    run(main())


@pytest.mark.parametrize("how", ["wait", "hold-gil", "thread-only", "ignore-term"])
def test_children_leave_when_their_driver_is_killed(run: Run, start: Any, how: str) -> None:
    """Also from C code that holds the interpreter's lock, also where only the thread watches; two children at once."""

    async def main() -> None:
        async with start() as program:
            driver = program("driver", how, "wait")
            pids = [int(pid) for pid in (await driver.says("children")).split()]
            pidfds = [os.pidfd_open(pid) for pid in pids]
            driver.child.kill()
            assert await asyncio.gather(*(gone(pidfd, 5.0) for pidfd in pidfds)) == [True, True]

    run(main())


def test_a_line_handler_that_raises_is_reported(run: Run) -> None:
    async def main() -> None:
        errors: list[BaseException] = []

        def broken(line: str) -> None:
            raise ValueError(line)

        child = ChildProcess(["/bin/sh", "-c", "echo one; echo two"], on_line=broken, on_error=errors.append)
        assert await child.wait() == 0
        assert [str(error) for error in errors] == ["one", "two"]

    run(main())


def test_without_a_line_handler_nothing_reaches_stdout(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        await ChildProcess(["/bin/sh", "-c", "echo one; echo two >&2"]).wait()

    run(main())
    assert capfd.readouterr() == ("", "one\ntwo\n")


def test_a_program_that_is_not_there(run: Run) -> None:
    async def main() -> None:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ConfigError, match="cannot start /no/such: No such file"):
            ChildProcess(["/no/such"], on_line=print)
        assert len(os.listdir("/proc/self/fd")) == before

    run(main())


def test_no_descriptor_is_left(run: Run) -> None:
    async def main() -> None:
        await ChildProcess(["/bin/true"], on_line=print).wait()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            await ChildProcess(["/bin/true"], on_line=print).wait()
        assert len(os.listdir("/proc/self/fd")) == before

    run(main())
