"""Attention on CUDA by FlashInfer or flash-attn, where one is installed: a whole step in one call, out of the pages.

They compute in half precision alone. What a kernel has no word for (float32, latents, values narrower than keys, odd
widths) goes to ``SdpaBackend``. Neither package is imported before its backend is chosen.
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any, NamedTuple

import torch

from actorpp.stages.backends import Scoring, SdpaBackend
from actorpp.stages.history import LayerKV, StepLayout

FLASH_ATTN_PAGE = 256
"""flash-attn reads pages in place if their size is a multiple of this."""
FLASHINFER_WIDTHS = frozenset({64, 128, 256})
FLASHINFER_WORKSPACE = 128 << 20
"""Bytes, as FlashInfer's documentation recommends."""

_HALF = frozenset({torch.float16, torch.bfloat16})


class PagedStep(NamedTuple):
    """A step's segments as these kernels take them, in host memory; B segments, int32 throughout.

    Attributes:
        query_starts: (B + 1,) where each segment's tokens begin in the packed row.
        key_starts: (B + 1,) the same for the keys of their requests, one request after the other.
        page_starts: (B + 1,) the same for their pages.
        pages: (page_starts[-1],) page ids.
        last_page_tokens: (B,) tokens in each request's last page.
    """

    query_starts: torch.Tensor
    key_starts: torch.Tensor
    page_starts: torch.Tensor
    pages: torch.Tensor
    last_page_tokens: torch.Tensor

    @classmethod
    def of(cls, layout: StepLayout) -> PagedStep:
        """Pages and counts of a step."""
        size = layout.page_size
        pages = [
            [page for run in s.runs for page in range(run.slot // size, -(-(run.slot + run.length) // size))]
            for s in layout.segments
        ]
        return cls(
            query_starts=_starts([segment.length for segment in layout.segments]),
            key_starts=_starts([segment.keys for segment in layout.segments]),
            page_starts=_starts([len(own) for own in pages]),
            pages=torch.tensor([page for own in pages for page in own], dtype=torch.int32),
            last_page_tokens=torch.tensor([(s.keys - 1) % size + 1 for s in layout.segments], dtype=torch.int32),
        )

    def table(self) -> torch.Tensor:
        """(B, most pages) page ids, padded with 0."""
        own = torch.tensor_split(self.pages, self.page_starts[1:-1].long())
        return torch.nn.utils.rnn.pad_sequence(list(own), batch_first=True)


class FlashAttnBackend:
    """flash-attn 2, by ``flash_attn_varlen_func``.

    With a page size that is not a multiple of ``FLASH_ATTN_PAGE`` each layer's histories are copied together first;
    ``--page-size 256`` saves that.
    """

    def __init__(self) -> None:
        self._kernel: Any = import_module("flash_attn").flash_attn_varlen_func
        self._others = SdpaBackend()
        self._layout: StepLayout | None = None
        self._common: dict[str, Any] = {}
        self._slots: torch.Tensor | None = None

    def attend_step(
        self, query: torch.Tensor, kv: LayerKV, scoring: Scoring, *, with_lse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``AttentionBackend``."""
        width = query.shape[-1]
        if query.dtype not in _HALF or not kv.one_width or width > 256 or width % 8:
            return self._others.attend_step(query, kv, scoring, with_lse=with_lse)
        if self._layout is not kv.layout:
            self._plan(kv.layout, query.device)
        found = self._kernel(
            query.transpose(0, 1),
            *(self._readable(side, kv.layout.page_size) for side in (kv.keys, kv.values)),
            softmax_scale=scoring.scaling,
            causal=True,
            window_size=(-1 if scoring.window is None else scoring.window - 1, 0 if scoring.window else -1),
            softcap=scoring.softcap or 0.0,
            return_attn_probs=with_lse,
            **self._common,
        )
        return (found[0], found[1].transpose(0, 1)) if with_lse else (found, None)

    def _plan(self, layout: StepLayout, device: torch.device) -> None:
        """What all layers of a step share."""
        step = PagedStep.of(layout)
        self._common = {
            "cu_seqlens_q": step.query_starts.to(device, non_blocking=True),
            "cu_seqlens_k": step.key_starts.to(device, non_blocking=True),
            "max_seqlen_q": max(segment.length for segment in layout.segments),
            "max_seqlen_k": max(segment.keys for segment in layout.segments),
        }
        if layout.page_size % FLASH_ATTN_PAGE:
            self._slots = torch.cat([segment.slots() for segment in layout.segments]).to(device, non_blocking=True)
        else:
            self._slots = None
            self._common["block_table"] = step.table().to(device, non_blocking=True)
        self._layout = layout

    def _readable(self, side: torch.Tensor, page_size: int) -> torch.Tensor:
        """Pages (pages, page_size, kv_heads, width) in place, or a copy (keys of all segments, kv_heads, width)."""
        if self._slots is None:
            return _pages(side, page_size).permute(1, 2, 0, 3)
        return side.index_select(1, self._slots).transpose(0, 1)


class FlashInferBackend:
    """FlashInfer, by ``BatchPrefillWithPagedKVCacheWrapper``: pages of any size in place."""

    def __init__(self) -> None:
        self._wrapper_class: Any = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        self._others = SdpaBackend()
        self._workspace: torch.Tensor | None = None
        self._plans: dict[tuple[Scoring, int, int, int], _Plan] = {}

    def attend_step(
        self, query: torch.Tensor, kv: LayerKV, scoring: Scoring, *, with_lse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``AttentionBackend``."""
        heads, _, width = query.shape
        if query.dtype not in _HALF or not kv.one_width or width not in FLASHINFER_WIDTHS:
            return self._others.attend_step(query, kv, scoring, with_lse=with_lse)
        if self._workspace is None:
            self._workspace = torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=query.device)
        shape = (scoring, heads, kv.keys.shape[0], width)  # layers of one kind share a plan
        if shape not in self._plans:
            self._plans[shape] = _Plan(self._wrapper_class(self._workspace, "HND"))
        wrapper = self._plans[shape].of(kv.layout, query, *shape)
        pages = tuple(_pages(side, kv.layout.page_size).transpose(0, 1) for side in (kv.keys, kv.values))
        found = wrapper.run(query.transpose(0, 1).contiguous(), pages, return_lse=with_lse)
        return (found[0], found[1] * math.log(2)) if with_lse else (found, None)  # its sums are to the base of 2


class _Plan:
    """One wrapper with the step that it is planned for."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self.layout: StepLayout | None = None
        self.copied: torch.cuda.Event | None = None

    def of(
        self, layout: StepLayout, query: torch.Tensor, scoring: Scoring, heads: int, kv_heads: int, width: int
    ) -> Any:
        """The wrapper, planned for this step."""
        if self.layout is layout:
            return self.wrapper
        if self.copied is not None:
            self.copied.synchronize()  # the plan before goes to the device from host memory that is now written again
        step = PagedStep.of(layout)
        self.wrapper.plan(
            step.query_starts,
            step.page_starts,
            step.pages,
            step.last_page_tokens,
            heads,
            kv_heads,
            width,
            layout.page_size,
            causal=True,
            sm_scale=scoring.scaling,
            window_left=-1 if scoring.window is None else scoring.window - 1,
            logits_soft_cap=scoring.softcap,
            q_data_type=query.dtype,
        )
        if query.is_cuda:
            self.copied = torch.cuda.current_stream(query.device).record_event()
        self.layout = layout
        return self.wrapper


def _starts(lengths: list[int]) -> torch.Tensor:
    """0 and the running sums, int32."""
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _pages(side: torch.Tensor, page_size: int) -> torch.Tensor:
    """(kv_heads, slots, width) as (kv_heads, pages, page_size, width), in place."""
    return side.view(side.shape[0], -1, page_size, side.shape[2])
