"""Cycles of BLOCK inboxes are refused when actors are spawned."""

from __future__ import annotations

import pytest

from actorpp.errors import ActorDefinitionError
from actorpp.runtime import Actor, ActorSpec, ActorSystem, Inbox, OneForAll, Overflow
from actorpp.testing import run
from tests.unit.runtime.support import Note


class Stage(Actor):
    """Inboxes that can make a sender wait, and two that cannot."""

    data = Inbox[Note](capacity=1)
    strict = Inbox[Note](capacity=1, overflow=Overflow.FAIL)
    landing = Inbox[Note](capacity=1)

    @data.handler
    async def on_data(self, message: Note) -> None: ...

    @strict.handler
    async def on_strict(self, message: Note) -> None: ...

    @landing.handler
    def on_landing(self, message: Note) -> None: ...


def test_a_ring_of_blocking_inboxes_is_refused_with_its_path() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            a = await system.spawn(Stage, name="a", tells=["c.data"])
            b = await system.spawn(Stage, name="b", tells=[a[Stage.data]])
            with pytest.raises(ActorDefinitionError, match=r"c -> b\.data -> a\.data -> c\.data"):
                await system.spawn(Stage, name="c", tells=[b[Stage.data]])
            with pytest.raises(KeyError):
                system.get("c")
            await system.spawn(Stage, name="c", tells=[b[Stage.strict]])

    run(main)


@pytest.mark.parametrize("inbox", ["strict", "landing"])
def test_a_ring_through_an_inbox_that_never_makes_wait_is_fine(inbox: str) -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            members = {
                "a": ActorSpec(Stage, tells=["b.data"]),
                "b": ActorSpec(Stage, tells=["c.data"]),
                "c": ActorSpec(Stage, tells=[f"a.{inbox}"]),
            }
            await system.spawn_group(members, supervision=OneForAll())

    run(main)


def test_a_ring_within_a_group_and_onto_oneself() -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            ring = {"a": ActorSpec(Stage, tells=["b.data"]), "b": ActorSpec(Stage, tells=["a.data"])}
            with pytest.raises(ActorDefinitionError, match="circle"):
                await system.spawn_group(ring, supervision=OneForAll())
            with pytest.raises(ActorDefinitionError, match=r"self -> self\.data"):
                await system.spawn(Stage, name="self", tells=["self.data"])
            with pytest.raises(ActorDefinitionError, match="has no inbox 'nothing'"):
                await system.spawn(Stage, name="x", tells=["x.nothing"])
            with pytest.raises(ActorDefinitionError, match=r"write 'actor\.inbox'"):
                await system.spawn(Stage, name="x", tells=["nothing"])

    run(main)
