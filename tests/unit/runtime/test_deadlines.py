"""Ask timeouts share timers, and are as exact as if they did not."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from actorpp.errors import AskTimeoutError
from actorpp.runtime import ActorSystem
from actorpp.testing import run
from tests.unit.runtime.support import Double, Factory, Hold, Recorder


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([1.0, 2.0, 0.25])), min_size=1, max_size=12)
)
def test_every_ask_expires_at_its_own_time(asks: list[tuple[float, float]]) -> None:
    """Each ask is sent some seconds after the one before, with a timeout of its own, to an actor that is busy."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        expired: list[tuple[float, float]] = []

        async def ask(timeout: float) -> None:  # noqa: ASYNC109
            due = loop.time() + timeout
            try:
                await ref[Recorder.data].ask(Double(1), timeout=timeout)
            except AskTimeoutError:
                expired.append((due, loop.time()))

        async with ActorSystem() as system:
            factory = Factory()
            ref = await system.spawn(factory)
            hold = asyncio.create_task(ref[Recorder.data].ask(Hold()))
            await factory.last.holding.wait()
            async with asyncio.TaskGroup() as group:
                for pause, timeout in asks:
                    await asyncio.sleep(pause)
                    group.create_task(ask(timeout))
                await asyncio.sleep(3)
            factory.last.gate.set()
            await hold
        assert len(expired) == len(asks)
        assert all(abs(due - at) < 1e-6 for due, at in expired)

    run(main)


def test_answered_asks_leave_nothing_behind() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            factory = Factory()
            ref = await system.spawn(factory)
            for n in range(100):
                await ref[Recorder.data].ask(Double(n), timeout=1 + n / 100)
            assert len(factory.last._cell.deadlines) == 100
            await asyncio.sleep(5)
            assert factory.last._cell.deadlines == {}

    run(main)
