"""Attention of a step's queries over their requests' keys, on torch's kernels behind one small interface.

``Scoring`` alone decides which keys a query may see. An L x C mask is never made: only blocks at the border of what is
visible are masked. Results over different keys are merged by their log-sum-exps. Nothing here knows transformers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional

from actorpp.stages.history import History, LayerKV, PackedSegment

BLOCK_ROWS = 128
BLOCK_KEYS = 2048
_LOWEST = torch.finfo(torch.float32).min  # stands for -inf where a row saw no key: the difference is no NaN
_SMALLEST = torch.finfo(torch.float32).tiny


class Scoring(NamedTuple):
    """How a layer scores keys, and which of them a query may see.

    Attributes:
        scaling: Factor on the scores.
        window: The query at position q sees the keys j with q - window < j <= q; None: all up to its own.
        softcap: Scores s become softcap * tanh(s / softcap).
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None

    def seen(self, queries: range) -> range:
        """Positions of the keys that any of the queries at these positions sees."""
        first = 0 if self.window is None else max(0, queries.start - self.window + 1)
        return range(first, queries.stop)

    def seen_by_all(self, queries: range) -> range:
        """Positions of the keys that every one of the queries sees."""
        first = 0 if self.window is None else max(0, queries.stop - self.window)
        return range(first, queries.start + 1)

    def mask(self, queries: range, keys: range, device: torch.device) -> torch.Tensor | None:
        """Which query sees which key, bool (len(queries), len(keys)); None if each sees all of them."""
        common = self.seen_by_all(queries)
        if common.start <= keys.start and keys.stop <= common.stop:
            return None
        positions = torch.arange(queries.start, queries.stop, device=device)[:, None]
        distance = positions - torch.arange(keys.start, keys.stop, device=device)
        visible = distance >= 0
        return visible if self.window is None else visible & (distance < self.window)


class AttentionBackend(Protocol):
    """Attention of a packed step's queries over their requests' keys."""

    def attend_step(
        self, query: torch.Tensor, kv: LayerKV, scoring: Scoring, *, with_lse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Softmax attention over the keys that ``scoring`` lets each query see.

        Args:
            query: (heads, T, key_dim), the tokens of all segments; ``kv`` has their keys already. Its kv_heads divide
                heads.
            with_lse: Whether the log-sum-exp is wanted.

        Returns:
            (T, heads, value_dim), and the float32 log-sum-exp of the scores (T, heads) or None.
        """
        ...


class SegmentBackend(ABC):
    """A backend that computes one segment after the other."""

    @abstractmethod
    def attend(
        self, query: torch.Tensor, history: History, scoring: Scoring, *, with_lse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same for one segment.

        Args:
            query: (heads, n, key_dim), at the last n positions of the history, whose last n keys are their own.

        Returns:
            (heads, n, value_dim), and the float32 log-sum-exp of the scores (heads, n) or None.
        """

    def attend_step(
        self, query: torch.Tensor, kv: LayerKV, scoring: Scoring, *, with_lse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``AttentionBackend``."""
        return self._attend_each(query, kv, kv.layout.segments, scoring, with_lse)

    def _attend_each(
        self, query: torch.Tensor, kv: LayerKV, segments: Sequence[PackedSegment], scoring: Scoring, with_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """These segments, one after the other: (their tokens, heads, value_dim) and (their tokens, heads)."""
        outs, sums = [], []
        for segment in segments:
            own = query[:, segment.offset : segment.offset + segment.length]
            out, lse = self.attend(own, kv.history(segment), scoring, with_lse=with_lse)
            outs.append(out)
            if lse is not None:
                sums.append(lse)
        return _join(outs).transpose(0, 1), _join(sums).transpose(0, 1) if sums else None


def merge(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Join attention over disjoint sets of keys by their log-sum-exps.

    Args:
        parts: Outputs (..., n, width) with their float32 log-sum-exps (..., n); -inf where a row saw no key.

    Returns:
        The output over all keys in float32, and its log-sum-exp.
    """
    lse = torch.logsumexp(torch.stack([part for _, part in parts]), dim=0)
    known = lse.clamp_min(_LOWEST)
    total: torch.Tensor | None = None
    for out, part in parts:
        weighted = out.float() * torch.exp(part - known)[..., None]
        total = weighted if total is None else total.add_(weighted)
    if total is None:
        raise ValueError("there is nothing to merge")
    return total, lse


class BlockBackend(SegmentBackend):
    """Plain matrix products over blocks of rows and keys: computes every kind of scoring, on any device.

    Blocks of keys are the outer loop, so that latents are expanded once per segment and never all at the same time.
    Heads of a group are folded into the rows, so that its keys are not repeated.
    """

    def attend(
        self, query: torch.Tensor, history: History, scoring: Scoring, *, with_lse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``SegmentBackend``."""
        n = query.shape[1]
        past = history.length - n
        blocks: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * -(-n // BLOCK_ROWS)
        for at, (keys, values) in history.pieces(scoring.seen(range(past, past + n)), BLOCK_KEYS):
            for index in range(len(blocks)):
                first, last = index * BLOCK_ROWS, min((index + 1) * BLOCK_ROWS, n)
                queries = range(past + first, past + last)
                seen = scoring.seen(queries)
                lo, hi = max(seen.start, at.start), min(seen.stop, at.stop)
                if lo >= hi:
                    continue
                within = slice(lo - at.start, hi - at.start)
                mask = scoring.mask(queries, range(lo, hi), query.device)
                part = _products(query[:, first:last], keys[:, within], values[:, within], scoring, mask)
                before = blocks[index]
                blocks[index] = part if before is None else merge([before, part])
        found = [block for block in blocks if block is not None]
        out = torch.cat([out for out, _ in found], dim=1).to(query.dtype)
        return out, torch.cat([lse for _, lse in found], dim=1) if with_lse else None


class FlashBackend(SegmentBackend):
    """torch's flash kernel for CPUs: the history without a mask, the queries' own keys causally, merged by their sums.

    No matrix of scores is ever made. In the history the heads of a group are folded into the rows, so that its keys are
    not repeated. On one core this took two thirds of the time of plain matrix products over blocks of rows, and of one
    masked call (1024 queries over 4096 keys, 9 heads over 3, float32 and bfloat16). Where a window hides keys, the
    rows go in masked blocks. What the kernel has no word for goes to ``BlockBackend``. Requests that decode with short
    histories go in one call.
    """

    def attend_step(
        self, query: torch.Tensor, kv: LayerKV, scoring: Scoring, *, with_lse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``AttentionBackend``."""
        short = kv.layout.short_decodes if kv.one_width and scoring.softcap is None else None
        if short is None:
            return super().attend_step(query, kv, scoring, with_lse=with_lse)
        keys, values = short.gather(kv.keys, kv.values)
        kv_heads, width = keys.shape[1], query.shape[2]
        rows = query[:, short.rows].transpose(0, 1).reshape(-1, kv_heads, query.shape[0] // kv_heads, width)
        out, lse = _flash(rows, keys, values, scoring, causal=False, bias=short.bias(scoring.window, query.dtype))
        out, lse = out.flatten(1, 2), lse.flatten(1, 2)
        if others := kv.layout.others:
            rest, rest_lse = self._attend_each(query, kv, others, scoring, with_lse)
            rest_rows = torch.cat([torch.arange(s.offset, s.offset + s.length) for s in others])
            order = torch.cat((short.rows, rest_rows)).argsort()
            out = torch.cat((out, rest))[order]
            lse = lse if rest_lse is None else torch.cat((lse, rest_lse))[order]
        return out, lse if with_lse else None

    def attend(
        self, query: torch.Tensor, history: History, scoring: Scoring, *, with_lse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``SegmentBackend``."""
        n = query.shape[1]
        past = history.length - n
        if scoring.softcap is not None or not history.one_width:
            return BlockBackend().attend(query, history, scoring, with_lse=with_lse)
        if scoring.seen_by_all(range(past, past + n)).start > 0:
            blocks = [_folded_flash(*block, scoring) for block in _row_blocks(query, history, scoring)]
            out, lse = (torch.cat(side, dim=1) for side in zip(*blocks, strict=True))
            return out, lse if with_lse else None
        alone = n == 1  # then its own key is one more that is seen without a mask
        parts = [
            _folded_flash(query, keys, values, None, scoring)
            for _, (keys, values) in history.pieces(range(past + alone))
        ]
        if not alone:
            keys, values = history.join(range(past, past + n))
            repeats = query.shape[0] // keys.shape[0]
            keys, values = keys.repeat_interleave(repeats, 0), values.repeat_interleave(repeats, 0)
            out, lse = _flash(query[None], keys[None], values[None], scoring, causal=True)
            parts.append((out[0], lse[0]))
        out, lse = parts[0] if len(parts) == 1 else merge(parts)
        return out.to(query.dtype), lse if with_lse else None


class SdpaBackend(SegmentBackend):
    """torch's scaled_dot_product_attention: the reference on any device, and the default on CUDA."""

    def attend(
        self, query: torch.Tensor, history: History, scoring: Scoring, *, with_lse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``SegmentBackend``. On CUDA the fused kernels know the causal rule; elsewhere rows go in blocks."""
        if with_lse or scoring.softcap is not None or history.expand is not None:
            return BlockBackend().attend(query, history, scoring, with_lse=with_lse)
        n = query.shape[1]
        past = history.length - n
        blocks: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]]
        if query.is_cuda and n > 1 and scoring.seen_by_all(range(past, past + n)).start == 0:
            from torch.nn.attention.bias import causal_lower_right  # brings torch's compiler: seconds of a CPU

            blocks = [(query, *history.join(range(history.length)), causal_lower_right(n, history.length))]
        else:
            blocks = _row_blocks(query, history, scoring)
        outs = [
            functional.scaled_dot_product_attention(
                rows[None], keys[None], values[None], mask, scale=scoring.scaling, enable_gqa=True
            )[0]
            for rows, keys, values, mask in blocks
        ]
        return torch.cat(outs, dim=1), None


def _products(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of (heads, rows, width) over a block of keys; a row that sees none gives zeros and a sum of -inf."""
    heads, rows, width = query.shape
    folded = query.reshape(keys.shape[0], -1, width)
    scores = (folded @ keys.transpose(1, 2)).float().mul_(scoring.scaling)
    if scoring.softcap is not None:
        scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    if mask is not None:
        scores.view(-1, *mask.shape).masked_fill_(~mask, -torch.inf)
    largest = scores.amax(dim=-1).clamp_min(_LOWEST)
    weights = scores.sub_(largest[..., None]).exp_()
    total = weights.sum(dim=-1)
    out = (weights.to(values.dtype) @ values).float() / total.clamp_min(_SMALLEST)[..., None]
    return out.reshape(heads, rows, -1), (largest + total.log()).reshape(heads, rows)


def _row_blocks(
    query: torch.Tensor, history: History, scoring: Scoring
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Blocks of the queries, each with the keys and values that any of them sees, and the mask if not all see all."""
    n = query.shape[1]
    past = history.length - n
    every = scoring.seen(range(past, past + n))
    keys, values = history.join(every)
    for first in range(0, n, BLOCK_ROWS):
        last = min(first + BLOCK_ROWS, n)
        queries = range(past + first, past + last)
        seen = scoring.seen(queries)
        within = slice(seen.start - every.start, seen.stop - every.start)
        mask = scoring.mask(queries, seen, query.device)
        yield query[:, first:last], keys[:, within], values[:, within], mask


def _folded_flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel with the heads of a group as rows of one head; ``mask`` is bool (n, m) for each of them."""
    heads, n, width = query.shape
    folded = query.reshape(keys.shape[0], -1, width)
    bias = None
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
        bias = bias.repeat(heads // keys.shape[0], 1)
        bias = bias[None, None]
    out, lse = _flash(folded[None], keys[None], values[None], scoring, causal=False, bias=bias)
    return out[0].reshape(heads, n, -1), lse[0].reshape(heads, n)


def _flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scoring: Scoring,
    *,
    causal: bool,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel on (batch, heads, n, width) tensors: output and float32 log-sum-exp (batch, heads, n)."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, causal, attn_mask=bias, scale=scoring.scaling
    )
    return out, lse


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
