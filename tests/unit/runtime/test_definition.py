"""What an actor class may look like: wrong ones are refused when they are made."""

from __future__ import annotations

import msgspec
import pytest

from actorpp.errors import ActorDefinitionError
from actorpp.runtime import Actor, ActorSystem, Inbox, Overflow
from actorpp.testing import run
from tests.unit.runtime.support import Note, Recorder, Seen


class Loose(msgspec.Struct):
    n: int


def test_inbox_knows_its_union() -> None:
    class Both(Actor):
        inbox = Inbox[Note | Seen](capacity=1)

        @inbox.handler
        async def on_both(self, message: Note | Seen) -> None: ...

    assert Both.inbox.types == (Note, Seen)
    assert (Both.inbox.name, Both.inbox.kind) == ("inbox", "serial")


@pytest.mark.parametrize("bad", [Loose, int, Note | str])
def test_messages_are_frozen_structs(bad: type) -> None:
    with pytest.raises(ActorDefinitionError, match="frozen msgspec Structs"):

        class Bad(Actor):
            inbox = Inbox[bad](capacity=1)  # type: ignore[valid-type]


def test_the_message_type_must_be_written() -> None:
    with pytest.raises(ActorDefinitionError, match="write the message type"):

        class Bad(Actor):
            inbox = Inbox(capacity=1)  # type: ignore[var-annotated]


def test_handled_and_pulled_is_refused() -> None:
    with pytest.raises(ActorDefinitionError, match="also pulled"):

        class Bad(Actor):
            inbox = Inbox[Note](capacity=1)

            @inbox.handler
            async def on_inbox(self, message: Note) -> None: ...

            async def run(self) -> None:
                await self.inbox.next()


def test_handled_and_pulled_through_an_alias_is_refused_at_the_call() -> None:
    class Sly(Actor):
        inbox = Inbox[Note](capacity=1)

        @inbox.handler
        async def on_inbox(self, message: Note) -> None: ...

        async def run(self) -> None:
            mailbox = self.inbox
            with pytest.raises(ActorDefinitionError, match="driven by its handler"):
                await mailbox.next()

    async def main() -> None:
        async with ActorSystem() as system:
            await (await system.spawn(Sly)).join()

    run(main)


def test_neither_handled_nor_pulled_is_refused() -> None:
    with pytest.raises(ActorDefinitionError, match="no handler, and no method"):

        class Bad(Actor):
            inbox = Inbox[Note](capacity=1)


def test_two_handlers_are_refused() -> None:
    with pytest.raises(ActorDefinitionError, match="one handler"):

        class Bad(Actor):
            inbox = Inbox[Note](capacity=1)

            @inbox.handler
            async def first(self, message: Note) -> None: ...

            @inbox.handler
            async def second(self, message: Note) -> None: ...


def test_control_must_be_atomic() -> None:
    with pytest.raises(ActorDefinitionError, match="plain def"):

        class Slow(Actor):
            control = Inbox[Note](capacity=1, priority=0)

            @control.handler
            async def on_control(self, message: Note) -> None: ...

    with pytest.raises(ActorDefinitionError, match="plain def"):

        class Pulled(Actor):
            control = Inbox[Note](capacity=1, priority=0)

            async def run(self) -> None:
                await self.control.next()


def test_keyed_inboxes_have_no_handler_and_drop_nothing() -> None:
    with pytest.raises(ActorDefinitionError, match="cannot have a handler"):

        class Handled(Actor):
            inbox = Inbox[Note](capacity=1, key=lambda note: note.n)

            @inbox.handler
            async def on_inbox(self, message: Note) -> None: ...

    with pytest.raises(ActorDefinitionError, match="cannot drop"):
        Inbox[Note](capacity=1, overflow=Overflow.DROP_OLDEST, key=lambda note: note.n)


@pytest.mark.parametrize(("capacity", "priority"), [(0, 1), (1, -1)])
def test_bounds_are_positive(capacity: int, priority: int) -> None:
    with pytest.raises(ActorDefinitionError):
        Inbox[Note](capacity=capacity, priority=priority)


def test_a_subclass_overrides_the_handler_by_name() -> None:
    class Loud(Recorder):
        def on_control(self, message: object) -> list[int]:
            return [42]

    async def main() -> list[int]:
        async with ActorSystem() as system:
            ref = await system.spawn(Loud)
            return await ref[Recorder.control].ask(Seen())

    assert run(main) == [42]

    with pytest.raises(ActorDefinitionError, match="finished class"):

        class Bad(Recorder):
            @Recorder.control.handler
            def other(self, message: object) -> None: ...


def test_a_keyed_inbox_smaller_than_the_window_is_refused() -> None:
    class Stage(Actor):
        steps = Inbox[Note](capacity=4, key=lambda note: note.n)

        async def run(self) -> None:
            await self.steps.take(0)

    Stage.steps.require_capacity(4)
    Stage.steps.require_capacity(8, capacity=8)
    with pytest.raises(ActorDefinitionError, match=r"Stage\.steps holds 4 messages, but 5 can be in flight"):
        Stage.steps.require_capacity(5)


def test_an_actor_outside_a_system_has_no_mailboxes() -> None:
    with pytest.raises(ActorDefinitionError, match="not in a system"):
        _ = Recorder().data


def test_an_override_keeps_the_kind_of_its_handler() -> None:
    with pytest.raises(ActorDefinitionError, match="must stay serial"):

        class Bad(Recorder):
            def on_data(self, message: object) -> None: ...  # type: ignore[override]
