"""Who waits for whom: the graph that a deadlock report shows. It looks at actors and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actorpp.runtime.cell import Cell

OUTSIDE = "(outside)"
"""Stands for code that is no actor, such as the program's main coroutine."""

current_cell: ContextVar[Cell | None] = ContextVar("current_cell", default=None)
"""The actor that the running code belongs to."""


@dataclass(frozen=True)
class WaitFor:
    """One wait. ``target`` is the actor that could end it, or None when no one in particular can."""

    waiter: str
    target: str | None
    what: str

    def __str__(self) -> str:
        return f"{self.waiter} waits for {self.what}"


@dataclass(frozen=True)
class WaitGraph:
    """All waits at one moment."""

    waits: tuple[WaitFor, ...]

    def cycles(self) -> list[tuple[str, ...]]:
        """Closed chains of actors that wait for each other, each once, from its first actor by name."""
        targets: dict[str, list[str]] = {}
        for wait in self.waits:
            if wait.target is not None:
                targets.setdefault(wait.waiter, []).append(wait.target)
        found: dict[tuple[str, ...], None] = {}

        def walk(path: tuple[str, ...]) -> None:
            for target in targets.get(path[-1], ()):
                if target == path[0]:
                    found[path] = None
                elif target not in path and target > path[0]:  # a cycle is found from its first name only
                    walk((*path, target))

        for name in sorted(targets):
            walk((name,))
        return list(found)

    def __str__(self) -> str:
        lines = ["cycle: " + " -> ".join([*cycle, cycle[0]]) for cycle in self.cycles()]
        return "\n".join(lines + [str(wait) for wait in self.waits])


def wait_graph(cells: Iterable[Cell]) -> WaitGraph:
    """The waits of these actors, of their children, and of whoever asks or tells them."""
    waits: list[WaitFor] = []
    for cell in cells:
        for item, box in cell.pending_asks():
            what = f"{cell.name} to answer {type(item.message).__name__} in {box.inbox.name}"
            waits.append(WaitFor(_name(item.asker), cell.name, what))
        for box in cell.mailboxes.values():
            for sender in box.senders:
                if sender.filed is not None and not sender.gave_up():
                    waits.append(WaitFor(_name(sender.cell), cell.name, f"room in {cell.name}.{box.inbox.name}"))
        waits.extend(WaitFor(cell.name, None, what) for what in cell.waits())
    return WaitGraph(tuple(waits))


def _name(cell: Cell | None) -> str:
    return OUTSIDE if cell is None else cell.name
