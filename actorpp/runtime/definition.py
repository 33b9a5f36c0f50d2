"""Checks of an actor class when it is made. Nothing here runs later.

An inbox is driven by a handler or pulled with ``take``/``next``, never both, and never neither. Python cannot say in
general what a method will do, so the checks read the class's bytecode for the direct forms ``self.<inbox>.take`` and
``self.<inbox>``; what they cannot see (an alias of the mailbox) is refused when it is called.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from typing import Any

from actorpp.errors import ActorDefinitionError
from actorpp.runtime.inbox import CONTROL, Inbox, handler_kind


def inboxes_of(cls: type) -> dict[str, Inbox[Any]]:
    """All inboxes of a class by name, inherited ones first, each group in the order of the class body."""
    found: dict[str, Inbox[Any]] = {}
    for base in reversed(cls.__mro__):
        found.update({name: value for name, value in vars(base).items() if isinstance(value, Inbox)})
    return found


def check(cls: type, root: type) -> None:
    """Raise ActorDefinitionError when an inbox of ``cls`` (a subclass of ``root``) has two owners, or none."""
    code = [block for base in cls.__mro__ if base not in root.__mro__ for block in _code_of(base)]
    pulled = {name for block in code for name in _pulled_names(block)}
    mentioned = {name for block in code for name in block.co_names}
    for name, inbox in inboxes_of(cls).items():
        inbox.resolve_types()
        where = f"{cls.__qualname__}.{name}"
        if inbox.handler_name is not None:
            if name in pulled:
                raise ActorDefinitionError(f"{where} has the handler {inbox.handler_name!r} and is also pulled")
            if handler_kind(getattr(cls, inbox.handler_name)) != inbox.kind:
                raise ActorDefinitionError(f"{where}: an override of {inbox.handler_name!r} must stay {inbox.kind}")
        elif inbox.priority == CONTROL:
            raise ActorDefinitionError(f"{where} is a control inbox (priority 0): it needs a plain def handler")
        elif name not in mentioned:
            raise ActorDefinitionError(f"{where} has no handler, and no method of the class takes from it")


def _code_of(cls: type) -> Iterator[types.CodeType]:
    """Code objects of a class's methods and properties, with everything nested in them."""
    for value in vars(cls).values():
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        value = getattr(value, "__wrapped__", value)
        if isinstance(value, types.FunctionType):
            yield from _nested(value.__code__)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _nested(const)


def _pulled_names(code: types.CodeType) -> Iterator[str]:
    """The X of every ``<something>.X.take`` and ``<something>.X.next`` in a code object."""
    previous: str | None = None
    for instruction in dis.get_instructions(code):
        if instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            previous = None
            continue
        if instruction.argval in ("take", "next") and previous is not None:
            yield previous
        previous = instruction.argval
