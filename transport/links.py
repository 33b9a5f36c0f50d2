"""Tensor links whose transfers block: one waiter thread per direction, so that neither loop nor compute thread waits.

A waiter runs the posted transfers of its direction one after the other and hands each outcome to the loop. The first
failure, or a transfer that makes no progress within the deadline, ends the link for good: the epoch has to be replaced.
A blocked transfer cannot be woken in general, so closing abandons its waiter, a daemon thread that leaves when the
library below times out; ``abandoned_waiters`` counts those that have not yet left. What a transfer does is up to the
subclasses.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from actorpp.errors import EpochEndedError, ProtocolError, TransportError
from actorpp.transport.streams import Streams
from actorpp.transport.tensors import LinkOrder, P2PWork, check_tensor, reason, tensor_nbytes

T = TypeVar("T")

_abandoned: set[threading.Thread] = set()


def abandoned_waiters() -> int:
    """Threads of closed links, or of attempts to connect that were given up, that are still blocked."""
    _abandoned.difference_update([thread for thread in _abandoned if not thread.is_alive()])
    return len(_abandoned)


def leave_past_waiters(code: int) -> None:
    """Ends this process with an exit code if there are abandoned waiters, and returns if there are none.

    For the last line of a program that uses links. The interpreter's own shutdown destroys what those threads are
    blocked in, upon which the C++ runtime aborts the process: it would seem to have crashed.
    """
    if abandoned_waiters():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


async def in_daemon_thread(name: str, function: Callable[[], T], timeout_s: float) -> T:
    """Runs a blocking function that cannot be cancelled. On a timeout or a cancel its thread is abandoned.

    The loop's executor will not do: the interpreter waits for its threads at exit.

    Raises:
        TimeoutError: If it takes longer than ``timeout_s`` seconds.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def report(result: T | None, error: Exception | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]  # without an error it is a T

    def run() -> None:
        result, failure = None, None
        try:
            result = function()
        except Exception as error:  # travels to the caller
            failure = error
        _tell(loop, report, result, failure)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        return await asyncio.wait_for(outcome, timeout_s)
    finally:
        if outcome.cancelled():
            _abandoned.add(thread)
        else:
            thread.join()


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
        loop.call_soon_threadsafe(callback, *args)


class ThreadedLink(ABC):
    """One stage's links of one epoch. Must be made, used and closed on the loop's thread.

    Args:
        rank: This stage's place, from 0.
        size: Number of stages.
        streams: Of the stage's device.
        capacity: Works under way in each direction; more is an error of the caller, who bounds them by credit.
        deadline_s: Seconds that a direction may have works under way without ending one.
        on_failure: Called once with what ended the link, unless ``close`` did.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        streams: Streams,
        capacity: int,
        deadline_s: float,
        on_failure: Callable[[TransportError], None],
    ) -> None:
        self.rank = rank
        self.size = size
        self._streams = streams
        self._on_failure = on_failure
        self._ended: TransportError | None = None
        self._sender = _Waiter(f"actorpp-send-{rank}", "send", capacity, deadline_s, self._fail)
        self._receiver = _Waiter(f"actorpp-recv-{rank}", "receive", capacity, deadline_s, self._fail)

    def post_send(self, link_index: int, tensor: torch.Tensor) -> P2PWork:
        """See ``TensorLink``."""
        if self.rank == self.size - 1:
            raise ProtocolError("the last stage sends no tensors")
        check_tensor(tensor)
        self._check_open()
        mark = self._streams.mark()
        return self._sender.post(link_index, tensor, lambda: self._send(link_index, tensor, mark))

    def post_recv(self, link_index: int, shape: Sequence[int], dtype: torch.dtype) -> P2PWork:
        """See ``TensorLink``."""
        if self.rank == 0:
            raise ProtocolError("the first stage receives no tensors")
        tensor_nbytes(shape, dtype)
        self._check_open()
        return self._receiver.post(link_index, None, lambda: self._receive(link_index, tuple(shape), dtype))

    async def close(self, grace_s: float = 1.0) -> None:
        """See ``TensorLink``."""
        if self._ended is None:
            self._end(EpochEndedError("the tensor link was closed"))
        self._interrupt()
        waiters = (self._sender, self._receiver)
        await asyncio.wait([waiter.left for waiter in waiters], timeout=grace_s)
        for waiter in waiters:
            waiter.join_or_abandon()
        self._release()

    def _check_open(self) -> None:
        if self._ended is not None:
            raise EpochEndedError(f"the tensor link has ended: {self._ended.message}")

    def _fail(self, error: TransportError) -> None:
        if self._ended is None:
            self._end(error)
            self._on_failure(error)

    def _end(self, error: TransportError) -> None:
        self._ended = error
        self._sender.end(error)
        self._receiver.end(error)

    @abstractmethod
    def _send(self, link_index: int, tensor: torch.Tensor, mark: object) -> torch.Tensor:
        """Sends to the next rank and returns the tensor when it may be reused. Runs on the send waiter; blocks."""

    @abstractmethod
    def _receive(self, link_index: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Receives from the previous rank. Runs on the receive waiter; blocks."""

    @abstractmethod
    def _interrupt(self) -> None:
        """Wakes blocked transfers, if the library can."""

    @abstractmethod
    def _release(self) -> None:
        """Lets go of connections; a blocked transfer may go on holding them."""


class _Waiter:
    """The thread and the works under way of one direction."""

    def __init__(
        self,
        thread_name: str,
        what: str,
        capacity: int,
        deadline_s: float,
        on_failure: Callable[[TransportError], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._what = what
        self._order = LinkOrder(what, capacity)
        self._deadline_s = deadline_s
        self._on_failure = on_failure
        self._under_way: deque[P2PWork] = deque()
        self._deadline: asyncio.TimerHandle | None = None
        self._transfers: queue.SimpleQueue[Callable[[], torch.Tensor] | None] = queue.SimpleQueue()
        self.left: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name=thread_name, daemon=True)
        self._thread.start()

    def post(self, link_index: int, tensor: torch.Tensor | None, transfer: Callable[[], torch.Tensor]) -> P2PWork:
        self._order.check(link_index, len(self._under_way))
        work = P2PWork(link_index, tensor)
        self._under_way.append(work)
        if self._deadline is None:
            self._start_deadline()
        self._transfers.put(transfer)
        return work

    def end(self, error: TransportError) -> None:
        """Fails the works under way and sends the thread off. What it is blocked in has no effect any more."""
        self._stop_deadline()
        for work in self._under_way:
            work.fail(error)
        self._under_way.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                self._transfers.get_nowait()
        self._transfers.put(None)

    def join_or_abandon(self) -> None:
        if self.left.done():
            self._thread.join()
        elif self._thread.is_alive():
            _abandoned.add(self._thread)

    def _run(self) -> None:
        while (transfer := self._transfers.get()) is not None:
            try:
                tensor = transfer()
            except Exception as error:  # of any kind: the library below raises plain RuntimeErrors
                _tell(self._loop, self._transfer_failed, error)
                break
            _tell(self._loop, self._transfer_done, tensor)
            del transfer, tensor  # while it waits for the next one it must not keep memory
        _tell(self._loop, self._thread_left)

    def _thread_left(self) -> None:
        if not self.left.done():
            self.left.set_result(None)

    def _transfer_done(self, tensor: torch.Tensor) -> None:
        if not self._under_way:
            return  # it ended after the link did
        self._stop_deadline()
        self._under_way.popleft().finish(tensor)
        if self._under_way:
            self._start_deadline()

    def _transfer_failed(self, error: Exception) -> None:
        if self._under_way:
            work = self._under_way[0]
            self._on_failure(TransportError(f"{self._what} {work.link_index} failed: {reason(error)}"))

    def _start_deadline(self) -> None:
        self._deadline = self._loop.call_later(self._deadline_s, self._deadline_passed)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _deadline_passed(self) -> None:
        work = self._under_way[0]
        self._on_failure(
            TransportError(f"{self._what} {work.link_index} made no progress within {self._deadline_s:g} s")
        )
