"""Helpers for tests with real processes, which run the small programs beside this file."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from actorpp.transport.process import ChildProcess
from actorpp.transport.sockets import close_context

Run = Callable[[Coroutine[Any, Any, None]], None]
HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@pytest.fixture(autouse=True)
def _end_of_context() -> Iterator[None]:
    """The ZeroMQ context lives as long as its process; here each test is to leave nothing behind."""
    yield
    close_context()


@pytest.fixture(params=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine to its end on a new loop; a minute is a hang."""
    return _runner(uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop)


@pytest.fixture
def run_once() -> Run:
    """As ``run``, for what does not depend on the loop."""
    return _runner(uvloop.new_event_loop)


def _runner(factory: Callable[[], asyncio.AbstractEventLoop]) -> Run:
    def run_on_loop(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(_bounded(main))

    return run_on_loop


async def _bounded(main: Coroutine[Any, Any, None]) -> None:
    async with asyncio.timeout(60):
        await main


class Program:
    """A running program of ``programs/`` and the lines it has written."""

    def __init__(self, name: str, *args: object, env: dict[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self._unread: asyncio.Queue[str] = asyncio.Queue()
        self.child = ChildProcess(
            [sys.executable, str(HERE / "programs" / f"{name}.py"), *map(str, args)],
            env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {})},
            on_line=self._note,
        )

    def _note(self, line: str) -> None:
        self.lines.append(line)
        self._unread.put_nowait(line)

    async def says(self, start: str) -> str:
        """Waits for the next line that begins with ``start`` and returns its rest."""
        while True:
            line = await self._unread.get()
            if line.startswith(start):
                return line.removeprefix(start).strip()


Start = Callable[..., Program]


@pytest.fixture
def start() -> Callable[[], Any]:
    """``async with start() as start_program`` starts programs and ends those that are left at its end."""

    @asynccontextmanager
    async def programs() -> AsyncIterator[Start]:
        started: list[Program] = []

        def start_program(name: str, *args: object, **options: Any) -> Program:
            started.append(Program(name, *args, **options))
            return started[-1]

        try:
            yield start_program
        finally:
            for program in started:
                program.child.kill()
            for program in started:
                await program.child.wait()

    return programs
