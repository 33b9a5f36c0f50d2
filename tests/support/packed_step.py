"""One layer of a packed step with random keys and values, and the check of a backend's answer to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from actorpp.stages.backends import AttentionBackend, BlockBackend, Scoring
from actorpp.stages.history import LayerKV, PackedSegment, StepLayout
from actorpp.stages.kv import PageTable


def packed_step(
    lengths: Sequence[tuple[int, int]],
    page_size: int = 16,
    *,
    heads: int = 6,
    kv_heads: int = 2,
    widths: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[torch.Tensor, LayerKV]:
    """Queries (heads, T, width) and the layer's keys; pages lie in turn, and what no request owns is NaN.

    Args:
        lengths: Of each segment the keys of its request, and how many of them are the segment's own.
        widths: Of keys and values.
    """
    most = max(-(-total // page_size) for total, _ in lengths)
    slots = most * page_size * len(lengths)
    generator = torch.Generator().manual_seed(5)
    keys, values = (torch.full((kv_heads, slots, width), torch.nan, dtype=dtype) for width in widths)
    segments, offset = [], 0
    for index, (total, own) in enumerate(lengths):
        runs = PageTable(range(index, most * len(lengths), len(lengths)), page_size).runs(0, total)
        segments.append(PackedSegment(offset, own, runs))
        offset += own
        for side in (keys, values):
            random = torch.randn(kv_heads, total, side.shape[2], generator=generator)
            side[:, segments[-1].slots()] = random.to(dtype)
    query = torch.randn(heads, offset, widths[0], generator=generator).to(device, dtype)
    layout = StepLayout(segments, page_size, torch.device(device))
    return query, LayerKV(layout, keys.to(device), values.to(device))


def check_step(backend: AttentionBackend, query: torch.Tensor, kv: LayerKV, scoring: Scoring, limit: float) -> None:
    """Compare with plain products in double precision: output and log-sum-exp, asked for or not."""
    exact = LayerKV(kv.layout, kv.keys.double(), kv.values.double())
    right, right_lse = BlockBackend().attend_step(query.double(), exact, scoring, with_lse=True)
    out, lse = backend.attend_step(query, kv, scoring, with_lse=True)
    torch.testing.assert_close(out.double(), right.double(), rtol=0, atol=limit)
    torch.testing.assert_close(lse, right_lse, rtol=0, atol=limit, check_dtype=False)
    without, none = backend.attend_step(query, kv, scoring)
    torch.testing.assert_close(without, out, rtol=0, atol=limit)
    if none is not None:
        raise AssertionError("a log-sum-exp came that nobody asked for")
