"""The way into a stage for everything that belongs to an epoch: the log, headers, outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

import structlog

from actorpp.errors import ActorppError, ActorStoppedError, MailboxFullError, ProtocolError
from actorpp.runtime import ActorRef
from actorpp.stages.messages import Admit, End, Output, Proxy, Step
from actorpp.stages.session import StageSession

log = structlog.get_logger(__name__)


class EpochSwitch:
    """Delivers what arrives for the running session; an envelope of another epoch is a dead letter, counted."""

    def __init__(self) -> None:
        self.dead_letters = 0
        self._epoch: int | None = None
        self._session: ActorRef | None = None
        self._on_failure: Callable[[ActorppError], None] | None = None
        self._next_seq = 0

    def open(self, epoch: int, session: ActorRef, on_failure: Callable[[ActorppError], None]) -> None:
        self._epoch, self._session, self._on_failure = epoch, session, on_failure
        self._next_seq = 0

    def close(self) -> None:
        self._epoch = self._session = self._on_failure = None

    def deliver(self, message: Admit | Step | End | Proxy | Output) -> None:
        """Never blocks. A gap in the log, or more than a mailbox holds, breaks the protocol: the epoch fails."""
        session = self._session
        if session is None or message.epoch != self._epoch:
            self.dead_letters += 1
            kind = type(message).__name__
            log.info("dead letter of another epoch", kind=kind, epoch=message.epoch, now=self._epoch)
            return
        try:
            match message:
                case Admit() | Step() | End():
                    self._check_contiguous(message.seq)
                    session[StageSession.log].tell_nowait(message)
                case Proxy():
                    session[StageSession.proxy].tell_nowait(message)
                case Output():
                    session[StageSession.output].tell_nowait(message)
                case _:
                    assert_never(message)
        except MailboxFullError as error:
            self._fail(ProtocolError(f"more messages than the credit allows: {error.message}"))
        except ProtocolError as error:
            self._fail(error)
        except ActorStoppedError:
            self.dead_letters += 1  # the session is ending: its end is reported on its own

    def _check_contiguous(self, seq: int) -> None:
        if seq != self._next_seq:
            raise ProtocolError(f"log entry {seq} came, expected {self._next_seq}")
        self._next_seq += 1

    def _fail(self, error: ProtocolError) -> None:
        if self._on_failure is not None:
            self._on_failure(error)
