"""The two CUDA streams of a stage, and their stand-ins on CPUs, so that the host has one code path.

The model runs on the forward stream; copies to the host run on the copy stream, behind an event, into pinned memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

_new_stream: Any = torch.cuda.Stream
_new_event: Any = torch.cuda.Event


class Mark(NamedTuple):
    """Events at the beginning and end of one step on the forward stream."""

    begun: torch.cuda.Event
    done: torch.cuda.Event


class Streams:
    """Forward and copy stream of one device; nothing at all on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._forward: torch.cuda.Stream | None = None
        self._copy: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._forward, self._copy = _new_stream(device), _new_stream(device)

    @property
    def forward_stream(self) -> torch.cuda.Stream | None:
        """Where the model runs; None on a CPU."""
        return self._forward

    @contextmanager
    def forward(self) -> Iterator[torch.cuda.Event | None]:
        """Everything inside runs on the forward stream, behind what the caller's stream has queued.

        Yields an event at its beginning, or None on a CPU.
        """
        if self._forward is None:
            yield None
            return
        self._forward.wait_stream(torch.cuda.current_stream(self._forward.device))
        with torch.cuda.stream(self._forward):
            begun = _new_event(enable_timing=True)
            begun.record()
            yield begun

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep a device tensor's memory until the forward stream has passed this point, whoever drops it before."""
        if self._forward is not None and tensor.is_cuda:
            tensor.record_stream(self._forward)

    def finish(self, begun: torch.cuda.Event | None) -> Mark | None:
        """Mark the end of the step that ``begun`` began; call it inside ``forward``."""
        if begun is None:
            return None
        done = _new_event(enable_timing=True)
        done.record()
        return Mark(begun, done)

    def to_host(self, tensor: torch.Tensor, mark: Mark | None) -> torch.Tensor:
        """Wait for the marked step and return ``tensor`` in host memory, copied on the copy stream."""
        if mark is None or self._copy is None:
            return tensor
        with torch.cuda.stream(self._copy):
            self._copy.wait_event(mark.done)
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._copy)
            copied = _new_event()
            copied.record()
        copied.synchronize()
        return host

    @staticmethod
    def end_time(start: float, end: float, mark: Mark | None) -> float:
        """When a step that began at ``start`` ended, from the device's own clock; ``end`` on a CPU."""
        if mark is None:
            return end
        mark.done.synchronize()
        seconds = float(mark.begun.elapsed_time(mark.done)) / 1e3
        return min(time.monotonic(), start + seconds)
