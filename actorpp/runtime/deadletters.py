"""Dead letters: the messages that nobody will handle, counted and kept for a look. They are never sent again."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable

from actorpp.runtime.messages import DeadLetter

log = logging.getLogger("actorpp.runtime")

KEPT = 1000


class DeadLetters:
    """All dead letters of a system: every one is counted and logged, the last ones are kept.

    Args:
        kept: How many. They hold their messages, whatever those hold.

    Attributes:
        count: How many there have been.
        by_reason: The same by DeadLetter.reason.
        recent: The last ones, oldest first.
        observers: Called with each.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self.count = 0
        self.by_reason: Counter[str] = Counter()
        self.recent: deque[DeadLetter] = deque(maxlen=kept)
        self.observers: list[Callable[[DeadLetter], object]] = []

    def observe(self, callback: Callable[[DeadLetter], object]) -> None:
        """Call ``callback`` with each dead letter from now on; it must not wait or raise."""
        self.observers.append(callback)

    def forget(self, callback: Callable[[DeadLetter], object]) -> None:
        """Call it no more, if it is called."""
        if callback in self.observers:
            self.observers.remove(callback)

    def add(self, letter: DeadLetter) -> None:
        """Count a dead letter. For the runtime, and for whoever refuses messages on an actor's behalf."""
        self.count += 1
        self.by_reason[letter.reason] += 1
        self.recent.append(letter)
        log.debug("dead letter (%s) for %s.%s: %r", letter.reason, letter.actor, letter.inbox, letter.message)
        for observer in self.observers:
            observer(letter)
