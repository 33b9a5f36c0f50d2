"""Routes: who tells whom, as declared when spawned, so that a cycle that can block for ever is refused early.

Only the declared is known. A tell can wait for ever when the receiver's main task, which alone makes room in the inbox,
waits likewise; inboxes with a plain ``def`` handler are served meanwhile, and those that fail or drop never make wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from actorpp.errors import ActorDefinitionError
from actorpp.runtime.address import Address
from actorpp.runtime.cell import Cell
from actorpp.runtime.inbox import Overflow

Target = tuple[str, str]
"""Names of an actor and of its inbox."""


class Routes:
    """The declared routes between the living actors of a system."""

    def __init__(self) -> None:
        self._tells: dict[str, list[Target]] = {}

    def add(self, cell: Cell, tells: Iterable[Address[Any] | str]) -> None:
        """Declare what an actor tells."""
        self._tells[cell.name] = [_target(tell) for tell in tells]

    def remove(self, cell: Cell) -> None:
        """Forget an actor that has ended."""
        self._tells.pop(cell.name, None)

    def refuse_cycles(self, cell: Cell, cells: Mapping[str, Cell]) -> None:
        """Raise ActorDefinitionError if BLOCK inboxes lead from this actor back to it."""
        seen: set[str] = set()
        paths: list[tuple[str, str]] = [(cell.name, cell.name)]
        while paths:
            actor, path = paths.pop()
            for name, inbox in self._tells.get(actor, ()):
                if name not in cells or not _blocks(cells[name], inbox):
                    continue
                if name == cell.name:
                    raise ActorDefinitionError(
                        f"tells in a circle of BLOCK inboxes, {path} -> {name}.{inbox}: all could wait for room"
                    )
                if name not in seen:
                    seen.add(name)
                    paths.append((name, f"{path} -> {name}.{inbox}"))


def _target(tell: Address[Any] | str) -> Target:
    if isinstance(tell, Address):
        return tell.ref.name, tell.inbox.name
    actor, dot, inbox = tell.rpartition(".")
    if not dot:
        raise ActorDefinitionError(f"tells={tell!r}: write 'actor.inbox'")
    return actor, inbox


def _blocks(cell: Cell, name: str) -> bool:
    for inbox in cell.mailboxes:
        if inbox.name == name:
            return inbox.overflow is Overflow.BLOCK and inbox.kind != "atomic"
    raise ActorDefinitionError(f"{cell.name} has no inbox {name!r}")
