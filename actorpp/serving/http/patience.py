"""uvicorn's connection, but not for ever: a client that stands still loses it, and what it asked for is aborted."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import structlog
from uvicorn.protocols.http.h11_impl import H11Protocol

_log = structlog.get_logger(__name__)


class PatientProtocol(H11Protocol):
    """A client stands still when it sends no more of a request that it has begun, or reads nothing of an answer.

    What it does not read waits in buffers of a bounded size, the system's and uvicorn's 64 KiB, and then in the request
    itself. An idle connection between two requests is uvicorn's to end.

    Args:
        patience_s: Seconds for which it may.
    """

    def __init__(self, *args: Any, patience_s: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._patience_s = patience_s
        self._sending: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._sending = self._timer("sends nothing")

    def data_received(self, data: bytes) -> None:
        self._cancel(self._sending)
        super().data_received(data)
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing():
            self._sending = self._timer("sends nothing more of its request")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = self._timer("reads nothing of its answer")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel(self._reading)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel(self._sending)
        self._cancel(self._reading)
        super().connection_lost(exc)

    def _timer(self, what: str) -> asyncio.TimerHandle:
        return self.loop.call_later(self._patience_s, self._give_up, what)

    def _give_up(self, what: str) -> None:
        _log.info(f"connection ended: its client {what}", client=self.client, after_s=self._patience_s)
        self.transport.abort()  # closing it would wait for what was written to be read

    def _cancel(self, timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
