"""What a stage session holds of the outside for one epoch: headers and outputs to send, tensors to send and receive."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from actorpp.stages.messages import Output, Proxy

# Sends in flight, and receives posted or landed and not yet computed, per neighbour and epoch.
SEND_BUFFERS = 2
RECEIVE_BUFFERS = 4

T_co = TypeVar("T_co", covariant=True)


class Tensor(Protocol):
    """What a session asks of a hidden-state tensor; it never computes with it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> object: ...
    @property
    def nbytes(self) -> int: ...


class Work(Awaitable[T_co], Protocol[T_co]):
    """A tensor operation under way. It holds its buffer until it is done."""

    @property
    def posted_at(self) -> float: ...
    @property
    def done_at(self) -> float: ...


class TensorReceiver(Protocol):
    def post_recv(self, link_index: int, shape: tuple[int, ...], dtype: str, nbytes: int) -> Work[Tensor]:
        """Post the receive of tensor number ``link_index``, at once; the work gives the landed tensor."""
        ...


class TensorSender(Protocol):
    def post_send(self, link_index: int, tensor: Tensor) -> Work[object]:
        """Post the send, at once; the work ends when the buffer may be used again."""
        ...


@dataclass(frozen=True)
class Links:
    """One epoch's links of one stage. ``prev`` is None on the first stage, ``next`` on the last.

    The send functions never block; ``feed_first`` carries an Output from the last stage to the first.
    """

    prev: TensorReceiver | None
    next: TensorSender | None
    send_proxy: Callable[[Proxy], None]
    send_output: Callable[[Output], None]
    feed_first: Callable[[Output], None]
