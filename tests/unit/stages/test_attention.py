"""Backends against plain attention in double precision: values, log-sum-exp, runs, merging, refusals."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from actorpp.errors import ConfigError, UnsupportedModelError
from actorpp.stages.attention import (
    AttentionBackend,
    FlashBackend,
    SdpaBackend,
    choose_backend,
    merge,
    packed_attention,
)
from actorpp.stages.packed import ProbeCache

HEADS, KV_HEADS, WIDTH = 6, 2, 16
SCALING = 0.3


def _tensors(n: int, total: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (HEADS, n, WIDTH), (KV_HEADS, total, WIDTH), (KV_HEADS, total, WIDTH)
    query, keys, values = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, keys, values


def _plain(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    n, total = query.shape[1], keys.shape[1]
    keys, values = (side.double().repeat_interleave(HEADS // KV_HEADS, 0) for side in (keys, values))
    scores = query.double() @ keys.transpose(1, 2) * SCALING
    later = torch.arange(total)[None] > torch.arange(total - n, total)[:, None]
    scores = scores.masked_fill(later, -torch.inf)
    return torch.softmax(scores, dim=-1) @ values, torch.logsumexp(scores, dim=-1)


@pytest.mark.parametrize("backend", [FlashBackend(), SdpaBackend()])
@pytest.mark.parametrize(("n", "total"), [(1, 1), (1, 300), (5, 5), (130, 130), (300, 701), (2, 129), (257, 258)])
def test_output_and_log_sum_exp_are_right(backend: AttentionBackend, n: int, total: int) -> None:
    query, keys, values = _tensors(n, total)
    out, lse = backend.attend(query, [(keys, values)], SCALING, with_lse=True)
    exact, exact_lse = _plain(query, keys, values)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-6)
    assert lse is not None
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=2e-6)
    assert backend.attend(query, [(keys, values)], SCALING)[1] is None


@pytest.mark.parametrize("backend", [FlashBackend(), SdpaBackend()])
@pytest.mark.parametrize("cuts", [[100, 200], [290, 301, 340], [1, 2, 399]])
def test_history_in_several_runs_equals_one_run(backend: AttentionBackend, cuts: list[int]) -> None:
    """Runs may end within the queries' own keys, too: those begin at 300."""
    query, keys, values = _tensors(100, 400)
    whole, _ = backend.attend(query, [(keys, values)], SCALING)
    edges = [0, *cuts, 400]
    runs = [(keys[:, lo:hi], values[:, lo:hi]) for lo, hi in pairwise(edges)]
    split, _ = backend.attend(query, runs, SCALING)
    torch.testing.assert_close(split, whole, rtol=0, atol=2e-6)


def test_merge_joins_disjoint_keys() -> None:
    query, keys, values = _tensors(1, 90)
    exact, exact_lse = FlashBackend().attend(query, [(keys, values)], SCALING, with_lse=True)
    parts = []
    for lo, hi in ((0, 20), (20, 21), (21, 90)):
        out, lse = SdpaBackend().attend(query, [(keys[:, lo:hi], values[:, lo:hi])], SCALING, with_lse=True)
        assert lse is not None
        parts.append((out, lse))
    out, lse = merge(parts)
    torch.testing.assert_close(out, exact, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse, exact_lse, rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", [FlashBackend(), SdpaBackend()])
def test_bfloat16_keeps_its_type(backend: AttentionBackend) -> None:
    query, keys, values = (tensor.bfloat16() for tensor in _tensors(40, 200))
    out, _ = backend.attend(query, [(keys, values)], SCALING)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), _plain(query, keys, values)[0], rtol=0, atol=0.02)


def test_auto_takes_the_flash_kernel_on_cpus_only() -> None:
    assert isinstance(choose_backend("auto", torch.device("cpu")), FlashBackend)
    assert isinstance(choose_backend("auto", torch.device("cuda")), SdpaBackend)
    with pytest.raises(ConfigError, match="CPU kernel"):
        choose_backend("flash", torch.device("cuda"))


@pytest.mark.parametrize("keyword", ["sliding_window", "softcap", "s_aux", "something_new"])
def test_keyword_that_would_be_left_out_is_refused_by_name(keyword: str) -> None:
    query, keys, values = (tensor[None] for tensor in _tensors(2, 2))
    cache = ProbeCache(2)
    cache.update(keys, values, 0)
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    common = {"scaling": SCALING, "packed": cache, "backend": FlashBackend(), "position_ids": torch.arange(2)}
    out, _ = packed_attention(module, query, keys, values, None, **common, **{keyword: None})  # type: ignore[arg-type]
    assert out.shape == (1, 2, HEADS, WIDTH)
    with pytest.raises(UnsupportedModelError, match=keyword):
        packed_attention(module, query, keys, values, None, **common, **{keyword: 4})  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="attention_mask"):
        packed_attention(module, query, keys, values, torch.zeros(1), **common)  # type: ignore[arg-type]
