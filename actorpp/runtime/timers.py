"""Timers that put a message into the actor's own inbox, so that time arrives like everything else."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from actorpp.errors import ActorError, ActorStoppedError, MailboxFullError
from actorpp.runtime.clock import guard_later
from actorpp.runtime.mailbox import Mailbox
from actorpp.runtime.messages import DeadLetter

if TYPE_CHECKING:
    from actorpp.runtime.cell import Cell


class Timer:
    """Made by ``self.after`` and ``self.every``; cancelled with its incarnation, or with ``cancel()``.

    A message that finds its inbox full is a dead letter. A periodic timer keeps to its grid: after a delay it skips the
    ticks that have passed.
    """

    def __init__(
        self, cell: Cell, box: Mailbox[Any], message: object, delay: float, period: float | None, guard: bool
    ) -> None:
        if period is not None and period <= 0:
            raise ValueError(f"the period of a timer must be positive, not {period}")
        box.check(message)
        self._cell = cell
        self._box = box
        self._message = message
        self._period = period
        self._guard = guard
        self._due = cell.loop.time() + delay
        cell.timers.add(self)
        self._handle = self._schedule()

    def cancel(self) -> None:
        """No more messages. Those already queued stay."""
        self._handle.cancel()
        self._cell.timers.discard(self)

    def _schedule(self) -> asyncio.TimerHandle:
        loop = self._cell.loop
        if self._guard:
            return guard_later(max(0.0, self._due - loop.time()), self._fire)
        return loop.call_at(self._due, self._fire)

    def _fire(self) -> None:
        now = self._cell.loop.time()
        if self._period is None:
            self._cell.timers.discard(self)
        else:
            self._due += self._period * max(1, -(-(now - self._due) // self._period))
            self._handle = self._schedule()
        try:
            if not self._box.offer(self._message):
                raise self._box.full_error()
        except MailboxFullError:
            letter = DeadLetter(self._cell.name, self._box.inbox.name, self._message, "overflow")
            self._cell.system.dead_letters.add(letter)
        except ActorStoppedError:
            self.cancel()  # the mailbox has made it a dead letter
        except ActorError as error:  # a key that is there already
            self._cell.crash(error)
