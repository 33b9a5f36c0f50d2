"""Tensor links between stages on one event loop: nothing is copied, the receiver gets the very tensor that was sent.

So the sender gives it up: it must not write to it afterwards, not even once its work is done. What was sent stays on
the link, and the send is not done, until the next stage has taken it; there is room for ``capacity`` of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from actorpp.errors import EpochEndedError, ProtocolError
from actorpp.transport.streams import NullStreams, Streams
from actorpp.transport.tensors import LinkOrder, P2PWork, check_tensor, tensor_nbytes


class InprocLink:
    """One stage's links to its neighbours; made by ``inproc_links``."""

    def __init__(self, previous: _Hop | None, following: _Hop | None, streams: Streams) -> None:
        self._previous = previous
        self._following = following
        self._streams = streams

    def post_send(self, link_index: int, tensor: torch.Tensor) -> P2PWork:
        """See ``TensorLink``."""
        if self._following is None:
            raise ProtocolError("the last stage sends no tensors")
        return self._following.send(link_index, tensor, self._streams)

    def post_recv(self, link_index: int, shape: Sequence[int], dtype: torch.dtype) -> P2PWork:
        """See ``TensorLink``."""
        if self._previous is None:
            raise ProtocolError("the first stage receives no tensors")
        return self._previous.receive(link_index, shape, dtype, self._streams)

    async def close(self, grace_s: float = 1.0) -> None:
        """See ``TensorLink``. The neighbours' works with this stage fail as well: nobody is left to end them."""
        for hop in (self._previous, self._following):
            if hop is not None:
                hop.close()


class _Hop:
    """What lies between two neighbours: tensors sent and not yet taken, receives posted and not yet served."""

    def __init__(self, capacity: int) -> None:
        self._closed = False
        self._send_order = LinkOrder("send", capacity)
        self._recv_order = LinkOrder("receive", capacity)
        self._sent: dict[int, tuple[P2PWork, object]] = {}
        self._expected: dict[int, tuple[P2PWork, tuple[int, ...], torch.dtype, Streams]] = {}

    def send(self, link_index: int, tensor: torch.Tensor, streams: Streams) -> P2PWork:
        check_tensor(tensor)
        self._check_open()
        self._send_order.check(link_index, len(self._sent))
        work = P2PWork(link_index, tensor)
        self._sent[link_index] = (work, streams.mark())
        self._match(link_index)
        return work

    def receive(self, link_index: int, shape: Sequence[int], dtype: torch.dtype, streams: Streams) -> P2PWork:
        tensor_nbytes(shape, dtype)
        self._check_open()
        self._recv_order.check(link_index, len(self._expected))
        work = P2PWork(link_index)
        self._expected[link_index] = (work, tuple(shape), dtype, streams)
        self._match(link_index)
        return work

    def close(self) -> None:
        self._closed = True
        error = EpochEndedError("the tensor link was closed")
        works = [sent[0] for sent in self._sent.values()] + [expected[0] for expected in self._expected.values()]
        for work in works:
            work.fail(error)
        self._sent.clear()
        self._expected.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise EpochEndedError("the tensor link was closed")

    def _match(self, link_index: int) -> None:
        if link_index not in self._sent or link_index not in self._expected:
            return
        sent, mark = self._sent.pop(link_index)
        received, shape, dtype, streams = self._expected.pop(link_index)
        tensor = sent.tensor
        if tensor is None:
            return  # failed, and reported, before
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            message = f"tensor {link_index} is {tuple(tensor.shape)} of {tensor.dtype}, expected {shape} of {dtype}"
            sent.fail(ProtocolError(message))
            received.fail(ProtocolError(message))
            return
        streams.hand_over(tensor, mark)
        sent.finish(tensor)
        received.finish(tensor)


def inproc_links(stages: int, *, capacity: int = 8, streams: Sequence[Streams] | None = None) -> list[InprocLink]:
    """The links of one epoch, one object per stage, in order.

    Args:
        stages: At least 1.
        capacity: Tensors under way between two stages, in each of the two directions of posting.
        streams: Those of each stage; by default none, as on a CPU.
    """
    own = streams or [NullStreams()] * stages
    hops = [None, *(_Hop(capacity) for _ in range(stages - 1)), None]
    return [InprocLink(hops[i], hops[i + 1], own[i]) for i in range(stages)]
