"""The backends for CUDA, over stand-ins that take what the packages' documentation names and compute it plainly.

They show that pages, lengths and scoring reach the kernels as these want them, not that the kernels are right: that is
for ``tests/gpu``.
"""

from __future__ import annotations

import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

import pytest
import torch

from actorpp.errors import ConfigError
from actorpp.stages.backend_choice import choose_backend
from actorpp.stages.backends import BlockBackend, FlashBackend, Scoring, SdpaBackend
from actorpp.stages.cuda_backends import FlashAttnBackend, FlashInferBackend, PagedStep
from actorpp.stages.history import LayerKV, PackedSegment, StepLayout
from actorpp.stages.kv import PageTable, Run
from tests.support.packed_step import check_step, packed_step

HEADS, KV_HEADS, WIDTH = 6, 2, 64
Installed = TypeVar("Installed", bound=ModuleType)
PLAIN = Scoring(0.15)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def _attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, left: int, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, heads, width) over (m, kv_heads, width), causal to the lower right: the output, and sums (n, heads)."""
    history_like = Scoring(scale, None if left < 0 else left + 1, cap or None)
    layout = StepLayout([PackedSegment(0, len(query), [Run(0, 0, len(keys))])], len(keys), CPU)
    kv = LayerKV(layout, keys.transpose(0, 1).double(), values.transpose(0, 1).double())
    out, lse = BlockBackend().attend_step(query.transpose(0, 1).double(), kv, history_like, with_lse=True)
    assert lse is not None
    return out.to(query.dtype), lse


class FlashAttn(ModuleType):
    """``flash_attn``, as far as it is used; notes whether it was given pages."""

    paged: bool | None = None

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: torch.Tensor | None = None,
    ) -> Any:
        assert causal
        assert softmax_scale is not None
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        assert window_size[1] == (-1 if window_size[0] < 0 else 0)
        self.paged = block_table is not None
        outs, sums = [], []
        for index in range(len(cu_seqlens_q) - 1):
            own = slice(*cu_seqlens_q[index : index + 2].tolist())
            first, last = cu_seqlens_k[index : index + 2].tolist()
            assert own.stop - own.start <= max_seqlen_q
            assert last - first <= max_seqlen_k
            if block_table is None:
                keys, values = k[first:last], v[first:last]
            else:
                assert k.shape[1] % 256 == 0
                keys, values = (side[block_table[index].long()].flatten(0, 1)[: last - first] for side in (k, v))
            out, lse = _attention(q[own], keys, values, softmax_scale, window_size[0], softcap)
            outs.append(out)
            sums.append(lse.T)
        return (torch.cat(outs), torch.cat(sums, dim=1), None) if return_attn_probs else torch.cat(outs)


class FlashInfer(ModuleType):
    """``flashinfer``, as far as it is used; counts plans."""

    plans = 0

    def BatchPrefillWithPagedKVCacheWrapper(self, float_workspace_buffer: torch.Tensor, kv_layout: str) -> Wrapper:
        assert (float_workspace_buffer.dtype, kv_layout) == (torch.uint8, "HND")
        return Wrapper(self)


class Wrapper:
    def __init__(self, module: FlashInfer) -> None:
        self.module = module

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
    ) -> None:
        self.module.plans += 1
        assert causal
        self.tables = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(table.dtype == torch.int32 and table.device == CPU for table in self.tables)
        self.shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self.scoring = (sm_scale, window_left, logits_soft_cap or 0.0)
        self.dtype = q_data_type

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, return_lse: bool) -> Any:
        queries, starts, pages, last = self.tables
        heads, kv_heads, width, size = self.shape
        assert (q.shape[1:], q.dtype, q.is_contiguous()) == ((heads, width), self.dtype, True)
        assert paged_kv_cache[0].shape[1:] == (kv_heads, size, width)
        outs, sums = [], []
        for index in range(len(last)):
            own = pages[starts[index] : starts[index + 1]].long()
            length = (len(own) - 1) * size + int(last[index])
            keys, values = (side[own].transpose(1, 2).flatten(0, 1)[:length] for side in paged_kv_cache)
            out, lse = _attention(q[queries[index] : queries[index + 1]], keys, values, *self.scoring)
            outs.append(out)
            sums.append((lse / math.log(2)).float())
        return (torch.cat(outs), torch.cat(sums)) if return_lse else torch.cat(outs)


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> FlashAttn:
    return _install(monkeypatch, FlashAttn("flash_attn"))


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> FlashInfer:
    return _install(monkeypatch, FlashInfer("flashinfer"))


def _install(monkeypatch: pytest.MonkeyPatch, module: Installed) -> Installed:
    module.__spec__ = ModuleSpec(module.__name__, None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def _step(
    page_size: int, dtype: torch.dtype = torch.bfloat16, value_width: int = WIDTH
) -> tuple[torch.Tensor, LayerKV]:
    """A chunk, a decode token, a prompt's first chunk, and histories that end at a page's beginning and end."""
    lengths = [(40, 25), (17, 1), (6, 6), (page_size + 3, 1), (page_size, 2)]
    widths = (WIDTH, value_width)
    return packed_step(lengths, page_size, heads=HEADS, kv_heads=KV_HEADS, widths=widths, dtype=dtype)


SCORINGS = [PLAIN, PLAIN._replace(window=9), PLAIN._replace(softcap=0.7), Scoring(0.3, 1, 2.0)]


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("page_size", [16, 256])
def test_flash_attn_gets_pages_where_it_can_read_them(flash_attn: FlashAttn, page_size: int, scoring: Scoring) -> None:
    query, kv = _step(page_size)
    check_step(FlashAttnBackend(), query, kv, scoring, 0.02)
    assert flash_attn.paged is (page_size == 256)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("page_size", [16, 48])
def test_flashinfer_gets_pages_of_any_size(flashinfer: FlashInfer, page_size: int, scoring: Scoring) -> None:
    query, kv = _step(page_size)
    check_step(FlashInferBackend(), query, kv, scoring, 0.02)


def test_flashinfer_plans_once_a_step_for_layers_of_one_kind(flashinfer: FlashInfer) -> None:
    backend = FlashInferBackend()
    for _ in range(2):
        query, kv = _step(16)
        for scoring in (PLAIN, PLAIN._replace(window=9)) * 3:
            backend.attend_step(query, kv, scoring)
    assert flashinfer.plans == 4


@pytest.mark.usefixtures("flash_attn", "flashinfer")
@pytest.mark.parametrize("make", [FlashAttnBackend, FlashInferBackend])
def test_what_a_kernel_has_no_word_for_is_computed_by_another(
    make: type[FlashAttnBackend] | type[FlashInferBackend], flash_attn: FlashAttn, flashinfer: FlashInfer
) -> None:
    """float32, and values narrower than keys."""
    for query, kv in (_step(16, torch.float32), _step(16, value_width=32)):
        check_step(make(), query, kv, PLAIN, 0.02)
    assert (flash_attn.paged, flashinfer.plans) == (None, 0)


def test_pages_and_counts_of_a_step() -> None:
    table = PageTable([7, 2, 3, 9], 4)
    segments = [PackedSegment(0, 3, table.runs(0, 13)), PackedSegment(3, 1, PageTable([5], 4).runs(0, 4))]
    step = PagedStep.of(StepLayout(segments, 4, CPU))
    assert step.query_starts.tolist() == [0, 3, 4]
    assert step.key_starts.tolist() == [0, 13, 17]
    assert step.page_starts.tolist() == [0, 4, 5]
    assert step.pages.tolist() == [7, 2, 3, 9, 5]
    assert step.last_page_tokens.tolist() == [1, 4]
    assert step.table().tolist() == [[7, 2, 3, 9], [5, 0, 0, 0]]


def test_auto_takes_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (8, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert isinstance(choose_backend("auto", CPU), FlashBackend)
    assert isinstance(choose_backend("auto", CUDA), SdpaBackend)
    _install(monkeypatch, FlashAttn("flash_attn"))
    assert isinstance(choose_backend("auto", CUDA), FlashAttnBackend)
    _install(monkeypatch, FlashInfer("flashinfer"))
    assert isinstance(choose_backend("auto", CUDA), FlashInferBackend)
    assert isinstance(choose_backend("flash_attn", CUDA), FlashAttnBackend)
    assert isinstance(choose_backend("sdpa", CUDA), SdpaBackend)
    capability = (7, 5)
    assert isinstance(choose_backend("auto", CUDA), SdpaBackend)


def test_backend_that_cannot_be_had_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="CPU kernel"):
        choose_backend("flash", CUDA)
    with pytest.raises(ConfigError, match="'flash_attn' needs a CUDA device"):
        choose_backend("flash_attn", CPU)
    with pytest.raises(ConfigError, match="pip install flashinfer-python"):
        choose_backend("flashinfer", CUDA)
