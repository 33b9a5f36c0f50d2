"""Order between computing and copying on a device, and the host's buffers. On a CPU the same calls have nothing to do.

On CUDA: compute runs on one stream, copies to and from pinned host memory on another, and events order the two. On a
CPU a tensor is finished when its Python call returns, so there is nothing to order and nothing to copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Streams(Protocol):
    """The streams of one stage. A ``mark`` stands for all work launched on the compute stream before it was made."""

    def mark(self) -> object:
        """Marks the compute stream's present end. Never blocks; call it after the tensor's producer was launched."""
        ...

    def to_host(self, tensor: torch.Tensor, mark: object) -> torch.Tensor:
        """The tensor in host memory, once the marked work has made it. Blocks: not for the loop's thread."""
        ...

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor in host memory that ``to_device`` accepts."""
        ...

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor where the stage computes, ready for use on the compute stream. Blocks until it is there."""
        ...

    def hand_over(self, tensor: torch.Tensor, mark: object) -> None:
        """Makes this stage's compute stream wait for another stage's mark, and keeps the tensor until it was used."""
        ...


class NullStreams:
    """Streams of a CPU: everything is done when it returns."""

    def mark(self) -> object:
        return None

    def to_host(self, tensor: torch.Tensor, mark: object) -> torch.Tensor:
        return tensor

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def hand_over(self, tensor: torch.Tensor, mark: object) -> None:
        return None


class CudaStreams:
    """Streams of a CUDA device. Pinned buffers come from, and return to, torch's caching host allocator.

    Args:
        device: The stage's device.
        compute: The stream on which the stage launches its layers; by default the device's current one.
    """

    def __init__(self, device: torch.device, compute: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._compute = compute if compute is not None else torch.cuda.current_stream(device)
        # One stream per direction: a copy to the host that waits for a long step must not hold up an arrival.
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._compute)
        return event

    def to_host(self, tensor: torch.Tensor, mark: object) -> torch.Tensor:
        host = self.host_buffer(tensor.shape, tensor.dtype)
        with torch.cuda.stream(self._out):
            if isinstance(mark, torch.cuda.Event):
                mark.wait(self._out)
            host.copy_(tensor, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._out)
        copied.synchronize()
        return host

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self._in):
            landed = torch.empty_like(tensor, device=self._device)
            landed.copy_(tensor, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._in)
        copied.synchronize()
        # Its memory belongs to the copy stream: freed in Python, it must not be reused before the layers have read it.
        landed.record_stream(self._compute)
        return landed

    def hand_over(self, tensor: torch.Tensor, mark: object) -> None:
        if isinstance(mark, torch.cuda.Event):
            mark.wait(self._compute)
        tensor.record_stream(self._compute)


def streams_for(device: torch.device, compute: torch.cuda.Stream | None = None) -> Streams:
    """The streams of a device."""
    return CudaStreams(device, compute) if device.type == "cuda" else NullStreams()
