"""One rank of a gloo group: gloo_rank.py URL EPOCH RANK SIZE WHAT [DEADLINE]."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import torch

from actorpp.errors import TransportError
from actorpp.transport.gloo import GlooLink, connect_gloo
from actorpp.transport.links import abandoned_waiters, leave_past_waiters
from actorpp.transport.process import leave_with_parent

DEVICE = torch.device(os.environ.get("DEVICE", "cpu"))
SHAPES = [
    ((3, 5), torch.float32),
    ((1,), torch.bfloat16),
    ((1024, 64), torch.float16),
    ((0, 8), torch.float32),
    ((), torch.float32),
]


def sample(index: int) -> torch.Tensor:
    shape, dtype = SHAPES[index % len(SHAPES)]
    return torch.randn(shape, generator=torch.Generator().manual_seed(index)).to(DEVICE, dtype)


async def mixed(link: GlooLink) -> None:
    """Rank 0 sends, the ranks between pass on, the last one checks. All posted as early as the bounds allow."""
    count = 40
    for first in range(0, count, 8):
        batch = range(first, first + 8)
        if link.rank == 0:
            works = [link.post_send(i, sample(i)) for i in batch]
        else:
            works = [link.post_recv(i, sample(i).shape, sample(i).dtype) for i in batch]
        tensors = [await work for work in works]
        if link.rank > 0:
            assert all(torch.equal(tensor, sample(i)) for i, tensor in zip(batch, tensors, strict=True))
        if 0 < link.rank < link.size - 1:
            for work in [link.post_send(i, tensor) for i, tensor in zip(batch, tensors, strict=True)]:
                await work


async def main(url: str, epoch: int, rank: int, size: int, what: str, deadline_s: float = 30.0) -> None:
    failed: asyncio.Future[TransportError] = asyncio.get_running_loop().create_future()
    link = await connect_gloo(
        url,
        epoch,
        rank,
        size,
        on_failure=failed.set_result,
        device=DEVICE,
        deadline_s=deadline_s,
        connect_timeout_s=20,
    )
    print("connected", os.getpid(), flush=True)
    if what == "mixed":
        await mixed(link)
        await link.close(grace_s=10)
        print("closed", abandoned_waiters(), threading.active_count(), len(os.listdir("/proc/self/task")))
    elif what == "receive":
        link.post_recv(0, (1000, 1000), torch.float32)
        await fail_and_close(link, failed)
    elif what == "send":
        link.post_send(0, torch.ones(1000, 1000))
        await fail_and_close(link, failed)
    elif what == "length":  # the two ends disagree: the first sends more, or less, than the second expects
        if rank == 0:
            link.post_send(0, torch.ones(int(sys.argv[7])))
        else:
            link.post_recv(0, (1000,), torch.float32)
        await fail_and_close(link, failed)
    elif what == "replace":  # the epoch hangs; a new one at the same rendezvous works
        if rank == 1:
            link.post_recv(0, (1000,), torch.float32)
            await fail_and_close(link, failed)
        else:
            kept.append(link)  # an old group that is still open
        again = await connect_gloo(url, epoch + 1, rank, size, on_failure=print, device=DEVICE, connect_timeout_s=20)
        await mixed(again)
        await again.close(grace_s=10)
        print("replaced", abandoned_waiters(), flush=True)
    elif what == "wait":
        await asyncio.Event().wait()


kept: list[GlooLink] = []


async def fail_and_close(link: GlooLink, failed: asyncio.Future[TransportError]) -> None:
    print("failed", (await failed).message, flush=True)
    await link.close(grace_s=0.2)
    print("closed", abandoned_waiters(), flush=True)


leave_with_parent()
numbers = [int(arg) for arg in sys.argv[2:5]]
asyncio.run(main(sys.argv[1], numbers[0], numbers[1], numbers[2], sys.argv[5], *map(float, sys.argv[6:7])))
leave_past_waiters(0)
