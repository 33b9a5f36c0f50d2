"""Threaded links, with transfers that the test holds back: waiters, deadlines and what closing leaves behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from actorpp.errors import EpochEndedError, ProtocolError, TransportError
from actorpp.transport.links import ThreadedLink, abandoned_waiters, in_daemon_thread
from actorpp.transport.streams import NullStreams

Run = Callable[[Any], None]
F32 = torch.float32


class HeldLink(ThreadedLink):
    """The middle one of three stages. Each transfer waits for a permit, or for the interrupt if it heeds that."""

    def __init__(self, *, deadline_s: float = 30.0, heeds_interrupt: bool = True, capacity: int = 4) -> None:
        self.failures: list[TransportError] = []
        self.failed = asyncio.Event()
        self.permits = {"send": threading.Semaphore(0), "receive": threading.Semaphore(0)}
        self.log: list[tuple[str, int]] = []
        self.error: Exception | None = None
        self.released = False
        self._heeds_interrupt = heeds_interrupt
        super().__init__(
            1, 3, streams=NullStreams(), capacity=capacity, deadline_s=deadline_s, on_failure=self._note_failure
        )

    def _note_failure(self, error: TransportError) -> None:
        self.failures.append(error)
        self.failed.set()

    def _transfer(self, what: str, link_index: int) -> None:
        self.permits[what].acquire()
        self.log.append((what, link_index))
        if self.error is not None:
            raise self.error

    def _send(self, link_index: int, tensor: torch.Tensor, mark: object) -> torch.Tensor:
        self._transfer("send", link_index)
        return tensor

    def _receive(self, link_index: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self._transfer("receive", link_index)
        return torch.full(shape, link_index, dtype=dtype)

    def _interrupt(self) -> None:
        if self._heeds_interrupt:
            self.free()

    def free(self) -> None:
        for permits in self.permits.values():
            permits.release(100)

    def _release(self) -> None:
        self.released = True


def waiters() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("actorpp-"))


def test_directions_are_independent_and_each_keeps_its_order(run: Run) -> None:
    async def main() -> None:
        link = HeldLink()
        tensors = [torch.zeros(2) for _ in range(3)]
        sends = [link.post_send(i, tensor) for i, tensor in enumerate(tensors)]
        receives = [link.post_recv(i, (2,), F32) for i in range(3)]
        link.permits["receive"].release(3)
        assert [(await work)[0].item() for work in receives] == [0, 1, 2]
        assert not any(work.done for work in sends)
        link.permits["send"].release(3)
        assert all([await work is tensor for work, tensor in zip(sends, tensors, strict=True)])
        assert link.log == [(what, i) for what in ("receive", "send") for i in range(3)]
        await link.close()
        assert waiters() == []
        assert abandoned_waiters() == 0
        assert link.released
        assert link.failures == []

    run(main())


def test_a_sent_tensor_lives_until_it_has_gone_and_no_longer(run: Run) -> None:
    async def main() -> None:
        link = HeldLink()
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        tensor = torch.zeros(3)
        alive = weakref.ref(tensor, lambda _: loop.call_soon_threadsafe(gone.set))
        work = link.post_send(0, tensor)
        del tensor
        gc.collect()
        assert alive() is not None
        link.permits["send"].release()
        await work
        del work
        await gone.wait()  # not even the thread, once it is idle again, may hold it
        await link.close()

    run(main())


def test_bounds(run: Run) -> None:
    async def main() -> None:
        link = HeldLink(capacity=2)
        for i in range(2):
            link.post_recv(i, (1,), F32)
        with pytest.raises(ProtocolError, match="receive 2 is over the 2 that may be under way"):
            link.post_recv(2, (1,), F32)
        with pytest.raises(ProtocolError, match="send 3 was posted, expected 0"):
            link.post_send(3, torch.zeros(1))
        with pytest.raises(ProtocolError, match="not contiguous"):
            link.post_send(0, torch.zeros(2, 2).t())
        await link.close()

    run(main())


def test_a_failed_transfer_ends_the_link_once(run: Run) -> None:
    async def main() -> None:
        link = HeldLink()
        link.error = RuntimeError("connection closed by peer")
        works = [link.post_recv(0, (1,), F32), link.post_recv(1, (1,), F32), link.post_send(0, torch.zeros(1))]
        link.free()
        await link.failed.wait()
        for work in works:
            with pytest.raises(TransportError, match="failed: connection closed by peer"):
                await work
        with pytest.raises(EpochEndedError, match="connection closed by peer"):
            link.post_send(1, torch.zeros(1))
        await link.close()
        assert len(link.failures) == 1
        assert waiters() == []

    run(main())


def test_a_transfer_without_progress_ends_the_link(run: Run) -> None:
    async def main() -> None:
        link = HeldLink(deadline_s=0.05, heeds_interrupt=False)
        stuck = link.post_recv(0, (1,), F32)
        with pytest.raises(TransportError, match=r"receive 0 made no progress within 0\.05 s"):
            await stuck
        assert [error.message for error in link.failures] == ["receive 0 made no progress within 0.05 s"]
        await link.close(grace_s=0.01)
        assert abandoned_waiters() == 1
        assert waiters() == ["actorpp-recv-1"]
        other = HeldLink()  # a new epoch does not mind
        other.permits["receive"].release()
        assert (await other.post_recv(0, (1,), F32)).item() == 0
        await other.close()
        link.free()  # what the library's own timeout does
        for thread in threading.enumerate():
            if thread.name == "actorpp-recv-1":
                thread.join()
        assert abandoned_waiters() == 0

    run(main())


def test_progress_renews_the_deadline(run: Run) -> None:
    async def main() -> None:
        link = HeldLink(deadline_s=0.3)
        loop = asyncio.get_running_loop()
        started = loop.time()
        works = [link.post_recv(i, (1,), F32) for i in range(4)]
        for work in works:  # four transfers take longer than one deadline, none of them longer than it
            loop.call_later(0.1, link.permits["receive"].release)
            await work
        assert loop.time() - started > 0.3
        assert link.failures == []
        await link.close()

    run(main())


def test_no_deadline_runs_while_nothing_is_under_way(run: Run) -> None:
    async def main() -> None:
        link = HeldLink(deadline_s=0.02)
        link.permits["receive"].release()
        await link.post_recv(0, (1,), F32)
        quiet = asyncio.Event()
        asyncio.get_running_loop().call_later(0.06, quiet.set)
        await quiet.wait()
        assert link.failures == []
        await link.close()

    run(main())


def test_close_fails_what_is_under_way(run: Run) -> None:
    async def main() -> None:
        link = HeldLink()
        works = [link.post_recv(0, (1,), F32), link.post_recv(1, (1,), F32)]
        await link.close()
        await link.close()
        for work in works:
            with pytest.raises(EpochEndedError, match="closed"):
                await work
        assert link.failures == []
        assert link.log in ([("receive", 0)], [])  # what had not begun never begins
        assert waiters() == []

    run(main())


def test_a_daemon_thread_that_is_given_up_is_counted(run: Run) -> None:
    async def main() -> None:
        permit = threading.Event()
        with pytest.raises(TimeoutError):
            await in_daemon_thread("actorpp-x", permit.wait, 0.01)
        assert abandoned_waiters() == 1
        waiting = asyncio.create_task(in_daemon_thread("actorpp-y", permit.wait, 30))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert abandoned_waiters() == 2
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("actorpp-")]
        permit.set()
        for thread in threads:
            thread.join()
        assert abandoned_waiters() == 0
        with pytest.raises(ZeroDivisionError):
            await in_daemon_thread("actorpp-z", lambda: 1 // 0, 30)
        assert await in_daemon_thread("actorpp-z", lambda: 7, 30) == 7
        assert waiters() == []

    run(main())
