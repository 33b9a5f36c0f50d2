"""Random crashes, stops, kills and messages on a group: whatever happens, it ends, and everything is accounted for."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from actorpp.errors import ActorError
from actorpp.runtime import Actor, ActorSystem, Inbox, OneForAll, OneForOne, Request, RestForOne, Strategy
from actorpp.testing import rng, run
from tests.unit.runtime.support import Boom


class Work(Request[int], frozen=True, tag="work"):
    """Takes some seconds, and perhaps fails."""

    n: int
    seconds: float = 0.0
    fails: bool = False


class Order(Request[int], frozen=True, tag="order"):
    """The same on the control lane, at once."""

    n: int
    fails: bool = False


class Member(Actor):
    """Also takes its time to start and to stop, and has a child actor."""

    control = Inbox[Order](capacity=4, priority=0)
    data = Inbox[Work](capacity=4)

    def __init__(self, handled: list[int], children: bool) -> None:
        self.handled = handled
        self.children = children

    async def started(self) -> None:
        await asyncio.sleep(rng().choice([0, 0.1]))
        if self.children:
            await self.spawn(lambda: Member(self.handled, False), name=f"{self.name}/child")

    async def stopping(self) -> None:
        await asyncio.sleep(rng().choice([0, 0.1]))

    @control.handler
    def on_control(self, message: Order) -> int:
        self.handled.append(message.n)
        if message.fails:
            raise Boom
        return message.n

    @data.handler
    async def on_data(self, message: Work) -> int:
        self.handled.append(message.n)
        await asyncio.sleep(message.seconds)
        if message.fails:
            raise Boom
        return message.n


NAMES = ("a", "b", "c")
ACTIONS = st.tuples(
    st.sampled_from(
        ["tell", "ask", "impatient ask", "order", "crash", "crash in control", "child", "stop", "kill", "wait"]
    ),
    st.sampled_from(NAMES),
)
STRATEGIES: list[Strategy] = [
    OneForOne(max_restarts=3),
    OneForAll(max_restarts=3, backoff=0.1),
    RestForOne(max_restarts=3, backoff=0.3),
]


@settings(max_examples=150, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=30), strategy=st.sampled_from(STRATEGIES), seed=st.integers(0, 99))
def test_storm(actions: list[tuple[str, str]], strategy: Strategy, seed: int) -> None:
    async def main() -> None:
        handled: list[int] = []
        tells: dict[int, asyncio.Task[None]] = {}
        asks: dict[int, asyncio.Task[int]] = {}
        ends: list[asyncio.Task[Any]] = []
        async with ActorSystem(grace=1000) as system:
            members = {name: lambda: Member(handled, True) for name in NAMES}
            group = await system.spawn_group(members, supervision=strategy)
            joins = [asyncio.create_task(ref.join()) for ref in group.values()]
            for n, (action, name) in enumerate(actions):
                ref = group[name]
                match action:
                    case "tell" | "crash":
                        work = Work(n, seconds=0.05, fails=action == "crash")
                        tells[n] = asyncio.create_task(ref[Member.data].tell(work))
                    case "ask" | "impatient ask":
                        patience = 0.2 if action == "impatient ask" else None
                        asks[n] = asyncio.create_task(ref[Member.data].ask(Work(n, seconds=0.1), timeout=patience))
                    case "order" | "crash in control":
                        order = Order(n, fails=action == "crash in control")
                        asks[n] = asyncio.create_task(ref[Member.control].ask(order))
                    case "child":
                        try:
                            child = system.get(f"{name}/child")
                        except KeyError:
                            continue
                        tells[n] = asyncio.create_task(child[Member.data].tell(Work(n, fails=True)))
                    case "stop" | "kill":
                        ends.append(asyncio.create_task(system.stop(ref) if action == "stop" else system.kill(ref)))
                    case "wait":
                        await asyncio.sleep(0.15)
        for task in (*joins, *ends):
            await task
        outcomes = await asyncio.gather(*asks.values(), return_exceptions=True)
        await asyncio.gather(*tells.values(), return_exceptions=True)
        dead = [letter.message.n for letter in system.dead_letters.recent if isinstance(letter.message, Work | Order)]
        failed = {n for n, outcome in zip(asks, outcomes, strict=True) if isinstance(outcome, ActorError)}
        assert len(set(handled)) == len(handled), "something was handled twice"
        assert not set(dead) & set(handled)
        assert set(handled) | set(dead) | failed == asks.keys() | tells.keys()
        assert all(outcome == n or n in failed for n, outcome in zip(asks, outcomes, strict=True))
        assert system.cells() == []
        assert asyncio.get_running_loop().time() < 100, "something ended only because of its grace"

    run(main, seed=seed)
