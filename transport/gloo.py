"""Tensor links over gloo, torch's point-to-point transport for host memory. CUDA tensors pass through pinned buffers.

The process group is built directly, one per epoch: no global ``init_process_group``, so that a new epoch can start
while waiters of an old one still hang. How gloo behaves, and what is done about it, is in docs/transport.md; the one
rule that shapes this file: a message must match its buffer exactly. A shorter one would be accepted in silence, and a
longer one ends the receiving *process*. So the length is part of the tag: of two ends that disagree, neither finds the
other, and the deadline reports it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from zlib import crc32

import structlog
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from actorpp.errors import ConfigError, TransportError
from actorpp.transport.links import ThreadedLink, in_daemon_thread
from actorpp.transport.rendezvous import open_store
from actorpp.transport.streams import Streams, streams_for
from actorpp.transport.tensors import reason, tensor_nbytes

log = structlog.get_logger(__name__)

LOOPBACK = "127.0.0.1"


def message_tag(link_index: int, nbytes: int) -> int:
    """A tag of 31 bits: 7 that tell apart what can be under way at once, and 24 of a hash of the length."""
    return (link_index % 128) << 24 | crc32(nbytes.to_bytes(8)) & 0xFFFFFF


class GlooLink(ThreadedLink):
    """One stage's links of one epoch; made by ``connect_gloo``. See ``ThreadedLink`` for the other arguments."""

    def __init__(
        self,
        group: ProcessGroupGloo,
        rank: int,
        size: int,
        *,
        streams: Streams,
        capacity: int,
        deadline_s: float,
        on_failure: Callable[[TransportError], None],
    ) -> None:
        super().__init__(rank, size, streams=streams, capacity=capacity, deadline_s=deadline_s, on_failure=on_failure)
        self._group: ProcessGroupGloo | None = group
        self._timeout = timedelta(seconds=2 * deadline_s)  # the deadline comes first; this frees an abandoned waiter

    def _send(self, link_index: int, tensor: torch.Tensor, mark: object) -> torch.Tensor:
        group = self._open_group()
        host = self._streams.to_host(tensor, mark)
        work = group.send([host], self.rank + 1, message_tag(link_index, host.nbytes))  # type: ignore[attr-defined]
        work.wait(self._timeout)
        return tensor

    def _receive(self, link_index: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        group = self._open_group()
        host = self._streams.host_buffer(shape, dtype)
        tag = message_tag(link_index, tensor_nbytes(shape, dtype))
        group.recv([host], self.rank - 1, tag).wait(self._timeout)  # type: ignore[attr-defined]
        return self._streams.to_device(host)

    def _open_group(self) -> ProcessGroupGloo:
        if self._group is None:
            raise TransportError("the tensor link was closed")
        return self._group

    def _interrupt(self) -> None:
        """Nothing wakes a gloo transfer but its peer's end, its own end or the group's timeout."""

    def _release(self) -> None:
        self._group = None


async def connect_gloo(
    url: str,
    epoch: int,
    rank: int,
    size: int,
    *,
    on_failure: Callable[[TransportError], None],
    host: str | None = None,
    interface: str | None = None,
    device: torch.device | None = None,
    compute_stream: torch.cuda.Stream | None = None,
    capacity: int = 8,
    deadline_s: float = 60.0,
    connect_timeout_s: float = 30.0,
) -> GlooLink:
    """Meets the other ranks and returns this one's links. All ranks connect to all, before any returns.

    Args:
        url: The rendezvous, see ``rendezvous.open_store``.
        epoch: Keeps this group apart from older ones at the same rendezvous.
        rank: This stage's place, from 0.
        size: Number of stages.
        on_failure: Called once on the loop's thread with what ended the links.
        host: Address of this machine to listen on, or a name of it; by default 127.0.0.1.
        interface: Network interface to listen on, instead of ``host``.
        device: Where tensors come from and go to; by default the CPU.
        compute_stream: On CUDA, the stream that makes and uses them.
        capacity: Tensors under way in each direction, at most 128.
        deadline_s: Seconds without progress after which the links fail; a hanging transfer is left by its thread
            after twice that.
        connect_timeout_s: Seconds for all ranks to arrive.

    Raises:
        ConfigError: If the address or interface is not one of this machine.
        TransportError: If the ranks do not meet in time.
    """
    if host is not None and interface is not None:
        raise ConfigError("give an address or an interface to listen on, not both", param="host")
    if not 1 <= capacity <= 128:
        raise ConfigError(f"from 1 to 128 tensors can be under way, got {capacity}")

    def connect() -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        try:
            if interface is not None:
                options._devices = [ProcessGroupGloo.create_device(interface=interface)]
            else:
                options._devices = [ProcessGroupGloo.create_device(hostname=host or LOOPBACK)]
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {interface or host}: {reason(error)}", param="host") from None
        log.info("gloo listens", epoch=epoch, rank=rank, address=interface or host or LOOPBACK)
        options._timeout = timedelta(seconds=connect_timeout_s)
        options._threads = 1  # they serve collectives, of which there are none
        store = PrefixStore(f"epoch-{epoch}", open_store(url, size, connect_timeout_s))
        try:
            return ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            raise TransportError(f"rank {rank} of {size} could not meet the others: {reason(error)}") from None

    try:
        group = await in_daemon_thread(f"actorpp-connect-{rank}", connect, connect_timeout_s + 1)
    except TimeoutError:
        raise TransportError(f"rank {rank} of {size} did not meet the others in {connect_timeout_s:g} s") from None
    return GlooLink(
        group,
        rank,
        size,
        streams=streams_for(device or torch.device("cpu"), compute_stream),
        capacity=capacity,
        deadline_s=deadline_s,
        on_failure=on_failure,
    )
