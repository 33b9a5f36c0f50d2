"""Virtual time, and the deadlock report."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorpp.errors import AskTimeoutError, DeadlockError
from actorpp.runtime import (
    Actor,
    ActorSystem,
    Address,
    Channel,
    Inbox,
    Request,
    guard_later,
    guard_sleep,
    guard_timeout,
)
from actorpp.testing import LeakError, rng, run


class Ping(Request[int], frozen=True):
    """Asks a node for its number."""

    n: int = 0


def test_time_jumps_and_starts_at_zero() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        times = [loop.time()]
        async with asyncio.TaskGroup() as group:
            for delay in (3600, 60, 1):
                group.create_task(asyncio.sleep(delay)).add_done_callback(lambda _: times.append(loop.time()))
        return times

    before = time.monotonic()
    assert run(main) == [0, 1, 60, 3600]
    assert time.monotonic() - before < 60


def test_errors_come_out_as_they_are() -> None:
    async def main() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        run(main)


def test_rng_is_seeded() -> None:
    async def main() -> list[float]:
        return [rng().random() for _ in range(3)]

    assert run(main, seed=1) == run(main, seed=1)
    assert run(main, seed=1) != run(main, seed=2)

    async def outside() -> None:
        with pytest.raises(RuntimeError, match=r"needs actorpp\.testing\.run"):
            rng()

    asyncio.run(outside())


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20))
def test_it_works_under_hypothesis(delays: list[float]) -> None:
    async def main() -> float:
        await asyncio.gather(*(asyncio.sleep(delay) for delay in delays))
        return asyncio.get_running_loop().time()

    assert run(main) == pytest.approx(max(delays), abs=1e-8)  # timers closer than the clock's resolution fire together


def test_time_waits_for_threads_of_any_executor() -> None:
    """The thread returns after a timer of 1000 virtual seconds would have fired, if time had gone on."""
    gate = threading.Event()

    async def main() -> float:
        loop = asyncio.get_running_loop()
        late = loop.call_later(1000, lambda: None)
        loop.call_later(0, gate.set)
        await asyncio.to_thread(gate.wait)
        late.cancel()
        return loop.time()

    assert run(main) == 0


class Node(Actor):
    """Asks the next node before it answers."""

    inbox = Inbox[Ping](capacity=4)

    def __init__(self) -> None:
        self.next: Address[Ping] | None = None

    @inbox.handler
    async def on_ping(self, message: Ping) -> int:
        return message.n if self.next is None else await self.next.ask(message, timeout=30)


def test_a_cycle_of_asks_is_reported_with_its_graph() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            nodes = {name: Node() for name in ("alpha", "beta", "gamma")}
            refs = {name: await system.spawn(lambda node=node: node, name=name) for name, node in nodes.items()}  # type: ignore[misc]
            for name, after in (("alpha", "beta"), ("beta", "gamma"), ("gamma", "alpha")):
                nodes[name].next = refs[after][Node.inbox]
            await refs["alpha"][Node.inbox].ask(Ping(), timeout=60)

    with pytest.raises(DeadlockError) as caught:
        run(main)
    assert caught.value.graph.cycles() == [("alpha", "beta", "gamma")]
    text = str(caught.value)
    assert "nothing can happen any more at 0 s" in text
    assert "cycle: alpha -> beta -> gamma -> alpha" in text
    assert "(outside) waits for alpha to answer Ping in inbox" in text
    assert "gamma waits for alpha to answer Ping in inbox" in text


def test_waits_for_messages_room_conditions_and_channels_are_reported() -> None:
    class Waiter(Actor):
        steps = Inbox[Ping](capacity=1, key=lambda ping: ping.n)
        plain = Inbox[Ping](capacity=1)

        async def run(self) -> None:
            self.start(self.plain.next())
            self.start(Channel[int](1).get())
            self.start(self.until(lambda: False))
            await self.steps.take(7)

    class Teller(Actor):
        unused = Inbox[Ping](capacity=1)

        def __init__(self, target: Address[Ping]) -> None:
            self.target = target

        async def run(self) -> None:
            for n in range(3):
                await self.target.tell(Ping(n))
            await self.unused.next()

    async def main() -> None:
        async with ActorSystem() as system:
            waiter = await system.spawn(Waiter, name="waiter")
            await system.spawn(lambda: Teller(waiter[Waiter.steps]), name="teller")
            await asyncio.Event().wait()

    with pytest.raises(DeadlockError) as caught:
        run(main)
    text = str(caught.value)
    assert "waiter waits for a message in steps with key 7" in text
    assert "waiter waits for a message in plain" in text
    assert "waiter waits for an item in a channel" in text
    assert "waiter waits for a condition (" in text
    assert "test_clock.py:" in text
    assert "teller waits for room in waiter.steps" in text
    assert caught.value.graph.cycles() == []


def test_guard_timers_do_not_keep_time_going() -> None:
    async def watchdog() -> None:
        while True:
            await guard_sleep(1)

    async def main() -> None:
        guard_later(5, lambda: None)
        dog = asyncio.create_task(watchdog())
        async with guard_timeout(100):
            await asyncio.Event().wait()
        await dog

    with pytest.raises(DeadlockError, match="at 0 s"):
        run(main)


def test_guard_timers_fire_while_something_else_can_happen() -> None:
    class Slow(Node):
        async def on_ping(self, message: Ping) -> int:
            await asyncio.sleep(10)
            return 1

    async def main() -> float:
        async with ActorSystem() as system:
            ref = await system.spawn(Slow)
            with pytest.raises(AskTimeoutError):
                await ref[Node.inbox].ask(Ping(), timeout=2)
            return asyncio.get_running_loop().time()

    assert run(main) == 2


def test_a_deadlock_ends_the_actors_too() -> None:
    ended: list[str] = []

    class Member(Node):
        async def stopping(self) -> None:
            ended.append(self.name)

    async def main() -> None:
        async with ActorSystem() as system:
            await system.spawn(Member, name="m")
            await asyncio.Event().wait()

    with pytest.raises(DeadlockError):
        run(main)
    assert ended == ["m"]


def test_an_error_in_a_callback_is_not_only_logged() -> None:
    def fail() -> None:
        raise KeyError("in a callback")

    async def main() -> None:
        asyncio.get_running_loop().call_later(1, fail)
        await asyncio.sleep(2)

    async def stuck() -> None:
        asyncio.get_running_loop().call_later(1, fail)
        await asyncio.Event().wait()

    for function in (main, stuck):
        with pytest.raises(ExceptionGroup, match="nobody handled") as caught:
            run(function)
        assert caught.group_contains(KeyError)


def test_a_task_left_behind_is_an_error() -> None:
    async def main() -> None:
        asyncio.get_running_loop().create_task(asyncio.Event().wait(), name="forgotten")

    with pytest.raises(LeakError, match="task forgotten"):
        run(main)
