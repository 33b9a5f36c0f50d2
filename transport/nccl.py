"""Tensor links over NCCL, between CUDA devices, without passing through host memory.

Unproven: complete, but not yet run on two devices, and NCCL refuses two ranks on one. Importing this module needs
neither CUDA nor NCCL; connecting does.

NCCL has no tags: a receive gets whatever is sent next. Each direction's waiter runs its transfers strictly in order of
link index, and a receive is posted only with its header in hand, so both ends of a hop agree. Each hop is a group of
two ranks with a communicator of its own, as NCCL lets only one operation at a time into a communicator: a send that
waits for a slow successor must not hold up the receive.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import structlog
import torch
import torch.distributed

from actorpp.errors import ConfigError, TransportError
from actorpp.transport.links import ThreadedLink, in_daemon_thread
from actorpp.transport.rendezvous import open_store
from actorpp.transport.streams import CudaStreams
from actorpp.transport.tensors import reason

log = structlog.get_logger(__name__)

_SENDER, _RECEIVER = 0, 1  # the ranks within the group of a hop


class NcclLink(ThreadedLink):
    """One stage's links of one epoch; made by ``connect_nccl``.

    Args:
        before: The group of this rank and the previous one; None on the first.
        after: The group of this rank and the next one; None on the last.
        device: Where tensors come from and go to.
        compute: The stream that makes and uses them.
    """

    def __init__(
        self,
        before: Any,
        after: Any,
        rank: int,
        size: int,
        *,
        device: torch.device,
        compute: torch.cuda.Stream,
        capacity: int,
        deadline_s: float,
        on_failure: Callable[[TransportError], None],
    ) -> None:
        super().__init__(
            rank,
            size,
            streams=CudaStreams(device, compute),
            capacity=capacity,
            deadline_s=deadline_s,
            on_failure=on_failure,
        )
        self._before = before
        self._after = after
        self._device = device
        self._compute = compute
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def greet(self) -> None:
        """One element over each hop: communicators are made at their first use, which waits for the other rank."""
        if self.rank > 0:
            self._receive(0, (1,), torch.float32)
        if self.rank < self.size - 1:
            self._send(0, torch.zeros(1, device=self._device), None)

    def _send(self, link_index: int, tensor: torch.Tensor, mark: object) -> torch.Tensor:
        with torch.cuda.stream(self._out):
            if isinstance(mark, torch.cuda.Event):
                mark.wait(self._out)
            self._after.send([tensor], _RECEIVER, 0).wait()  # orders the stream behind the transfer, blocks nothing
        self._out.synchronize()
        return tensor

    def _receive(self, link_index: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with torch.cuda.stream(self._in):
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            self._before.recv([tensor], _SENDER, 0).wait()
        self._in.synchronize()
        tensor.record_stream(self._compute)  # its memory belongs to the receive stream
        return tensor

    def _interrupt(self) -> None:
        """An aborted communicator ends its kernels, which wakes the waiters."""
        for group in (self._before, self._after):
            if group is not None:
                group.abort()

    def _release(self) -> None:
        self._before = self._after = None


async def connect_nccl(
    url: str,
    epoch: int,
    rank: int,
    size: int,
    *,
    device: torch.device,
    on_failure: Callable[[TransportError], None],
    compute_stream: torch.cuda.Stream | None = None,
    capacity: int = 8,
    deadline_s: float = 60.0,
    connect_timeout_s: float = 120.0,
) -> NcclLink:
    """Meets the neighbours and returns this rank's links. See ``gloo.connect_gloo`` for the arguments.

    Raises:
        ConfigError: Without a CUDA device or NCCL.
        TransportError: If the neighbours do not arrive in time, or NCCL reports an error.
    """
    if device.type != "cuda" or not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        raise ConfigError(
            f"nccl moves tensors between CUDA devices, this stage runs on {device}", param="tensor_transport"
        )
    compute = compute_stream if compute_stream is not None else torch.cuda.current_stream(device)

    def hop(index: int, own: int) -> Any:
        nccl: Any = torch.distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=max(2 * deadline_s, connect_timeout_s))
        store = torch.distributed.PrefixStore(  # type: ignore[attr-defined]
            f"epoch-{epoch}/hop-{index}", open_store(url, size, connect_timeout_s)
        )
        return nccl(store, own, 2, options)

    def groups() -> tuple[Any, Any]:
        before = hop(rank - 1, _RECEIVER) if rank > 0 else None
        return before, hop(rank, _SENDER) if rank < size - 1 else None

    name = f"actorpp-connect-{rank}"
    try:
        before, after = await in_daemon_thread(name, groups, connect_timeout_s)
        link = NcclLink(
            before,
            after,
            rank,
            size,
            device=device,
            compute=compute,
            capacity=capacity,
            deadline_s=deadline_s,
            on_failure=on_failure,
        )
        try:
            await in_daemon_thread(name, link.greet, connect_timeout_s)
        except BaseException:
            await link.close()
            raise
    except TimeoutError:
        raise TransportError(f"rank {rank} of {size} did not meet its neighbours in {connect_timeout_s:g} s") from None
    except RuntimeError as error:
        raise TransportError(f"rank {rank} of {size} could not meet its neighbours: {reason(error)}") from None
    log.info("nccl connected", epoch=epoch, rank=rank, device=str(device))
    return link
