"""Both event loops that actorpp runs on: sockets and processes hang on descriptors, which the two watch differently."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from actorpp.transport.sockets import close_context

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(autouse=True)
def _end_of_context() -> Iterator[None]:
    """The ZeroMQ context lives as long as its process; here each test is to leave nothing behind."""
    yield
    close_context()


@pytest.fixture(params=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine to its end on a new loop; a minute is a hang."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run_on_loop(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(_bounded(main))

    return run_on_loop


async def _bounded(main: Coroutine[Any, Any, None]) -> None:
    async with asyncio.timeout(60):
        await main
