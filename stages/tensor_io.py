"""Between a session and the tensor transport: headers checked, dtypes named."""

from __future__ import annotations

from collections.abc import Callable

import torch

from actorpp.stages.links import Tensor, Work
from actorpp.transport.tensors import TensorLink, parse_header


class TensorInlet:
    """Receives from the previous stage."""

    def __init__(self, link: TensorLink) -> None:
        self._link = link

    def post_recv(self, link_index: int, shape: tuple[int, ...], dtype: str, nbytes: int) -> Work[Tensor]:
        """Raises ProtocolError when the header contradicts itself."""
        return self._link.post_recv(link_index, *parse_header(shape, dtype, nbytes))


class TensorOutlet:
    """Sends to the next stage.

    Args:
        on_sent: Called with the bytes of each tensor whose transfer has ended well.
    """

    def __init__(self, link: TensorLink, on_sent: Callable[[int], None]) -> None:
        self._link = link
        self._on_sent = on_sent

    def post_send(self, link_index: int, tensor: Tensor) -> Work[object]:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a link carries torch tensors, not {type(tensor).__name__}")
        nbytes = tensor.nbytes
        work = self._link.post_send(link_index, tensor)
        work.when_done(lambda: self._on_sent(nbytes))
        return work
