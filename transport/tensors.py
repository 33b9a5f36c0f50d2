"""Tensor links between neighbouring stages: what every kind of link offers, and what they share.

A link carries hidden states from a stage to the next one, in the order of their link index. Both ends know shape and
dtype beforehand from a header that travels elsewhere; this module knows nothing of headers, steps or models. Posting
never blocks: the work that comes back is awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from time import monotonic
from typing import Protocol

import torch

from actorpp.errors import ProtocolError

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
"""What may travel, by the name that headers use."""

MAX_NBYTES = 1 << 34
"""Bytes of one tensor: a header that announces more is taken for damaged instead of obeyed."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in headers.

    Raises:
        ProtocolError: If tensors of this dtype may not travel.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ProtocolError(f"tensors of {dtype} may not travel, only {', '.join(DTYPES)}")
    return name


def parse_header(shape: Sequence[int], dtype: str, nbytes: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Checks what a header says of a tensor, before memory is taken for it.

    Raises:
        ProtocolError: If the dtype is unknown, a size is negative, the bytes do not agree or are too many.
    """
    if dtype not in DTYPES:
        raise ProtocolError(f"unknown dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
    expected = tensor_nbytes(shape, DTYPES[dtype])
    if nbytes != expected:
        raise ProtocolError(f"the header says {nbytes} bytes, but {tuple(shape)} of {dtype} has {expected}")
    return tuple(shape), DTYPES[dtype]


def tensor_nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor that may travel.

    Raises:
        ProtocolError: If it may not.
    """
    dtype_name(dtype)
    nbytes = dtype.itemsize
    for size in shape:
        if size < 0:
            raise ProtocolError(f"negative size in shape {tuple(shape)}")
        nbytes *= size
    if nbytes > MAX_NBYTES:
        raise ProtocolError(f"a tensor of {nbytes} bytes, over the limit of {MAX_NBYTES}")
    return nbytes


class P2PWork:
    """A posted send or receive. Awaiting it gives the tensor: the one received, or the one sent, now free for reuse.

    It keeps the tensor alive until the transfer has ended. It may be awaited any number of times; cancelling an
    awaiting task leaves the transfer alone. ``posted_at`` and ``done_at`` are in seconds on the monotonic clock.
    """

    def __init__(self, link_index: int, tensor: torch.Tensor | None = None) -> None:
        self.link_index = link_index
        self.tensor = tensor
        self.posted_at = monotonic()
        self.done_at = self.posted_at
        self._future: asyncio.Future[torch.Tensor] = asyncio.get_running_loop().create_future()

    @property
    def done(self) -> bool:
        """Whether the transfer has ended, well or not."""
        return self._future.done()

    def __await__(self) -> Generator[object, None, torch.Tensor]:
        return asyncio.shield(self._future).__await__()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call it on the loop once the transfer has ended well; never, if it fails."""
        self._future.add_done_callback(lambda future: None if future.exception() else callback())

    def finish(self, tensor: torch.Tensor) -> None:
        """Called by the link, on the loop's thread. Does nothing if the work has failed meanwhile."""
        if not self._future.done():
            self.tensor = None
            self.done_at = monotonic()
            self._future.set_result(tensor)

    def fail(self, error: Exception) -> None:
        """Called by the link, on the loop's thread. Does nothing if the work has ended."""
        if not self._future.done():
            self.tensor = None
            self._future.set_exception(error)
            self._future.exception()  # links report failures themselves: one that nobody awaits is not logged again


class TensorLink(Protocol):
    """A stage's links of one epoch: receives from its predecessor, sends to its successor.

    Indices count from 0 in each direction and leave none out.
    """

    def post_send(self, link_index: int, tensor: torch.Tensor) -> P2PWork:
        """Begins to send a contiguous tensor to the next stage; it must not change until the work is done.

        Raises:
            ProtocolError: If the index is not the next one, the tensor may not travel, or too many are under way.
            EpochEndedError: If the link is closed or has failed.
        """
        ...

    def post_recv(self, link_index: int, shape: Sequence[int], dtype: torch.dtype) -> P2PWork:
        """Begins to receive a tensor from the previous stage. Its header must be in hand.

        Raises:
            ProtocolError: If the index is not the next one, the tensor may not travel, or too many are under way.
            EpochEndedError: If the link is closed or has failed.
        """
        ...

    async def close(self, grace_s: float = 1.0) -> None:
        """Ends the link; works under way fail with EpochEndedError. Waits ``grace_s`` seconds at most."""
        ...


class LinkOrder:
    """Checks what is posted in one direction: indices in order, at most ``capacity`` works under way."""

    def __init__(self, name: str, capacity: int) -> None:
        self._name = name
        self._capacity = capacity
        self._next = 0

    def check(self, link_index: int, under_way: int) -> None:
        """Takes the next index.

        Raises:
            ProtocolError: If it is not the next one, or ``under_way`` works leave no room.
        """
        if link_index != self._next:
            raise ProtocolError(f"{self._name} {link_index} was posted, expected {self._next}")
        if under_way >= self._capacity:
            raise ProtocolError(f"{self._name} {link_index} is over the {self._capacity} that may be under way")
        self._next += 1


def check_tensor(tensor: torch.Tensor) -> None:
    """Refuses a tensor that cannot be sent as it lies in memory.

    Raises:
        ProtocolError: With the reason.
    """
    tensor_nbytes(tensor.shape, tensor.dtype)
    if not tensor.is_contiguous():
        raise ProtocolError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous")


def reason(error: Exception) -> str:
    """What an error of torch says, without the C++ stack that it appends."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
