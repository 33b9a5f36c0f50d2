"""The CUDA paths: copies on their own streams, ordered by events. Only where there is a device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actorpp.transport.inproc import inproc_links
from actorpp.transport.nccl import connect_nccl
from actorpp.transport.streams import CudaStreams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

Run = Callable[[Any], None]
DEVICE = torch.device("cuda", 0)


def slow_ones(stream: torch.cuda.Stream, rows: int = 4096) -> torch.Tensor:
    """A tensor of ones that is finished long after this returns; before that it holds zeros."""
    with torch.cuda.stream(stream):
        tensor = torch.zeros(rows, 1024, device=DEVICE)
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        tensor.add_(1)
    return tensor


def test_host_copies_wait_for_the_compute_stream() -> None:
    compute = torch.cuda.Stream(DEVICE)  # type: ignore[no-untyped-call]
    streams = CudaStreams(DEVICE, compute)
    tensor = slow_ones(compute)
    host = streams.to_host(tensor, streams.mark())
    assert host.is_pinned()
    assert host.eq(1).all()
    landed = streams.to_device(host)
    assert landed.device == DEVICE
    assert landed.eq(1).all().item()


def test_stages_on_one_device_wait_for_each_other(run_once: Run) -> None:
    async def main() -> None:
        compute = [torch.cuda.Stream(DEVICE) for _ in range(2)]  # type: ignore[no-untyped-call]
        first, last = inproc_links(2, streams=[CudaStreams(DEVICE, stream) for stream in compute])
        first.post_send(0, slow_ones(compute[0]))
        received = await last.post_recv(0, (4096, 1024), torch.float32)
        with torch.cuda.stream(compute[1]):
            total = received.sum()
        compute[1].synchronize()
        assert total.item() == 4096 * 1024

    run_once(main())


def test_gloo_carries_cuda_tensors(run_once: Run, start: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with start() as program:
            url = f"file://{tmp_path}/store"
            running = [program("gloo_rank", url, 1, i, 3, "mixed", env={"DEVICE": "cuda:0"}) for i in range(3)]
            for rank in running:
                assert (await rank.says("closed")).startswith("0 2"), rank.lines

    run_once(main())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a device per rank")
def test_nccl_between_two_devices(run_once: Run, tmp_path: Path) -> None:
    async def main() -> None:
        devices = [torch.device("cuda", i) for i in range(2)]
        url = f"file://{tmp_path}/store"
        sender, receiver = await asyncio.gather(
            *(connect_nccl(url, 1, i, 2, device=device, on_failure=print) for i, device in enumerate(devices))
        )
        tensors = [torch.full((1000, i + 1), float(i), device=devices[0]) for i in range(8)]
        sends = [sender.post_send(i, tensor) for i, tensor in enumerate(tensors)]
        for i, tensor in enumerate(tensors):
            received = await receiver.post_recv(i, tensor.shape, tensor.dtype)
            assert received.device == devices[1]
            assert torch.equal(received.cpu(), tensor.cpu())
        for work in sends:
            await work
        await asyncio.gather(sender.close(), receiver.close())

    run_once(main())
