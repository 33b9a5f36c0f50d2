"""Links between stages of one process."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from actorpp.errors import EpochEndedError, ProtocolError
from actorpp.transport.inproc import inproc_links
from actorpp.transport.streams import NullStreams

Run = Callable[[Any], None]
F32 = torch.float32


def test_the_receiver_gets_the_very_tensor(run: Run) -> None:
    async def main() -> None:
        first, middle, last = inproc_links(3)
        tensor = torch.randn(2, 3)
        sent = first.post_send(0, tensor)
        assert not sent.done  # held until it is taken
        received = await middle.post_recv(0, (2, 3), F32)
        assert received is tensor
        assert await sent is tensor
        early = last.post_recv(0, (2, 3), F32)  # a receive may come first
        assert not early.done
        assert await middle.post_send(0, received) is tensor
        assert await early is tensor

    run(main())


def test_what_was_sent_lives_until_it_is_taken_and_no_longer(run: Run) -> None:
    async def main() -> None:
        first, last = inproc_links(2)
        tensor = torch.randn(5)
        alive = weakref.ref(tensor)
        work = first.post_send(0, tensor)
        del tensor, work
        gc.collect()
        assert alive() is not None
        received = await last.post_recv(0, (5,), F32)
        assert received is alive()
        del received
        gc.collect()
        assert alive() is None

    run(main())


def test_order_and_bounds(run: Run) -> None:
    async def main() -> None:
        first, last = inproc_links(2, capacity=2)
        with pytest.raises(ProtocolError, match="send 1 was posted, expected 0"):
            first.post_send(1, torch.zeros(1))
        for i in range(2):
            first.post_send(i, torch.full((1,), i, dtype=F32))
        with pytest.raises(ProtocolError, match="send 2 is over the 2 that may be under way"):
            first.post_send(2, torch.zeros(1))
        assert [(await last.post_recv(i, (1,), F32)).item() for i in range(2)] == [0, 1]
        first.post_send(2, torch.zeros(1))
        for i in range(2, 5):
            last.post_recv(i, (1,), F32)
        with pytest.raises(ProtocolError, match="receive 5 is over the 2"):
            last.post_recv(5, (1,), F32)

    run(main())


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(3, dtype=torch.int64), "tensors of torch.int64 may not travel"),
        (torch.zeros(3, 2).t(), "not contiguous"),
        (torch.empty(0).expand(1 << 20, 1 << 20, 0), None),
    ],
)
def test_tensors_that_may_not_travel(run: Run, tensor: torch.Tensor, reason: str | None) -> None:
    async def main() -> None:
        first, _ = inproc_links(2)
        if reason is None:
            first.post_send(0, tensor.contiguous())
            return
        with pytest.raises(ProtocolError, match=reason):
            first.post_send(0, tensor)
        first.post_send(0, torch.zeros(1))  # the refused one took no index

    run(main())


@pytest.mark.parametrize(("shape", "dtype"), [((4,), F32), ((3, 1), F32), ((3,), torch.float16)])
def test_a_tensor_that_is_not_what_the_header_said(run: Run, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    async def main() -> None:
        first, last = inproc_links(2)
        sent, received = first.post_send(0, torch.zeros(3)), last.post_recv(0, shape, dtype)
        for work in (sent, received):
            with pytest.raises(ProtocolError, match="tensor 0 is"):
                await work

    run(main())


def test_ends_of_the_chain(run: Run) -> None:
    async def main() -> None:
        (only,) = inproc_links(1)
        with pytest.raises(ProtocolError, match="first stage receives no"):
            only.post_recv(0, (1,), F32)
        with pytest.raises(ProtocolError, match="last stage sends no"):
            only.post_send(0, torch.zeros(1))
        await only.close()

    run(main())


def test_close_fails_what_is_under_way_on_both_sides(run: Run) -> None:
    async def main() -> None:
        first, middle, last = inproc_links(3)
        works = [first.post_send(0, torch.zeros(1)), last.post_recv(0, (1,), F32)]
        await middle.close()
        await middle.close()
        for work in works:
            with pytest.raises(EpochEndedError):
                await work
        with pytest.raises(EpochEndedError):
            first.post_send(1, torch.zeros(1))
        with pytest.raises(EpochEndedError):
            last.post_recv(1, (1,), F32)

    run(main())


def test_cancelling_a_wait_leaves_the_transfer_alone(run: Run) -> None:
    async def main() -> None:
        first, last = inproc_links(2)
        received = last.post_recv(0, (1,), F32)

        async def wait() -> torch.Tensor:
            return await received

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not received.done
        tensor = torch.ones(1)
        first.post_send(0, tensor)
        assert await received is tensor

    run(main())


class Recording(NullStreams):
    """Streams that write down what they were asked for."""

    def __init__(self, log: list[Any], name: str) -> None:
        self._log, self._name = log, name

    def mark(self) -> object:
        return f"mark of {self._name}"

    def hand_over(self, tensor: torch.Tensor, mark: object) -> None:
        self._log.append((self._name, mark, tensor))


def test_the_receivers_stream_waits_for_the_senders_mark(run: Run) -> None:
    async def main() -> None:
        log: list[Any] = []
        first, last = inproc_links(2, streams=[Recording(log, "first"), Recording(log, "last")])
        tensor = torch.zeros(1)
        first.post_send(0, tensor)
        await last.post_recv(0, (1,), F32)
        assert log == [("last", "mark of first", tensor)]

    run(main())
