"""Attention of one segment's queries over its request's keys, on several kernels behind one small interface.

``Scoring`` alone decides which keys a query may see. An L x C mask is never made: only blocks at the border of what is
visible are masked. Results over different keys are merged by their log-sum-exps. Nothing here knows transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from actorpp.errors import ConfigError
from actorpp.stages.kv import KeyValue

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


class History:
    """One request's keys and values in one layer, in position order, read in place.

    Args:
        runs: Keys (kv_heads, m, key_dim) and values (kv_heads, m, value_dim) as they are stored.
        expand: Makes keys and values out of what is stored, if that is something else (latents).
    """

    def __init__(
        self, runs: Sequence[KeyValue], expand: Callable[[torch.Tensor, torch.Tensor], KeyValue] | None = None
    ) -> None:
        self.expand = expand
        self.length = sum(keys.shape[1] for keys, _ in runs)
        self._runs = runs

    @property
    def one_width(self) -> bool:
        """Whether keys and values are equally wide and stored as such."""
        return self.expand is None and self._runs[0][0].shape[-1] == self._runs[0][1].shape[-1]

    def pieces(self, wanted: range, longest: int | None = None) -> Iterator[tuple[range, KeyValue]]:
        """Keys and values at the ``wanted`` positions, as views unless expanded, at most ``longest`` at a time."""
        start = 0
        for keys, values in self._runs:
            end = start + keys.shape[1]
            lo, hi = max(wanted.start, start), min(wanted.stop, end)
            step = longest or max(hi - lo, 1)
            for first in range(lo, hi, step):
                last = min(first + step, hi)
                stored = keys[:, first - start : last - start], values[:, first - start : last - start]
                yield range(first, last), self.expand(*stored) if self.expand else stored
            start = end

    def join(self, wanted: range) -> KeyValue:
        """One tensor of keys and one of values; a copy only if they lie in several runs."""
        found = [pair for _, pair in self.pieces(wanted)]
        if len(found) == 1:
            return found[0]
        return torch.cat([keys for keys, _ in found], dim=1), torch.cat([values for _, values in found], dim=1)


class AttentionBackend(Protocol):
    """Attention of one segment's queries over its request's keys."""

    def attend(
        self, query: torch.Tensor, history: History, scoring: Scoring, *, with_lse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Softmax attention over the keys that ``scoring`` lets each query see.

        Args:
            query: (heads, n, key_dim), at the last n positions of the history, whose last n keys are their own.
            history: Keys and values for kv_heads, a divisor of heads.
            with_lse: Whether the log-sum-exp is wanted.

        Returns:
            (heads, n, value_dim), and the float32 log-sum-exp of the scores (heads, n) or None.
        """
        ...


def merge(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Join attention over disjoint sets of keys by their log-sum-exps.

    Args:
        parts: Outputs (..., n, width) with their float32 log-sum-exps (..., n); -inf where a row saw no key.

    Returns:
        The output over all keys in float32, and its log-sum-exp.
    """
    lse = torch.logsumexp(torch.stack([part for _, part in parts]), dim=0)
    known = lse.clamp_min(_LOWEST)
    weighted = [out.float() * torch.exp(part - known)[..., None] for out, part in parts]
    return torch.stack(weighted).sum(dim=0), lse


class BlockBackend:
    """Plain matrix products over blocks of rows and keys: computes every kind of scoring, on any device.

    Blocks of keys are the outer loop, so that latents are expanded once per segment and never all at the same time.
    Heads of a group are folded into the rows, so that its keys are not repeated.
    """

    def attend(
        self, query: torch.Tensor, history: History, scoring: Scoring, *, with_lse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``AttentionBackend``."""
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


class FlashBackend:
    """torch's flash kernel for CPUs: the history without a mask, the queries' own keys causally, merged by their sums.

    No matrix of scores is ever made. In the history the heads of a group are folded into the rows, so that its keys are
    not repeated. On one core this took two thirds of the time of plain matrix products over blocks of rows, and of one
    masked call (1024 queries over 4096 keys, 9 heads over 3, float32 and bfloat16). Where a window hides keys, the
    rows go in masked blocks. What the kernel has no word for goes to ``BlockBackend``.
    """

    def attend(
        self, query: torch.Tensor, history: History, scoring: Scoring, *, with_lse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``AttentionBackend``."""
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
            parts.append(_flash(query, keys, values, scoring, causal=True))
        out, lse = parts[0] if len(parts) == 1 else merge(parts)
        return out.to(query.dtype), lse if with_lse else None


class SdpaBackend:
    """torch's scaled_dot_product_attention: the reference on any device, and the default on CUDA."""

    def attend(
        self, query: torch.Tensor, history: History, scoring: Scoring, *, with_lse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``AttentionBackend``. On CUDA the fused kernels know the causal rule; elsewhere rows go in blocks."""
        if with_lse or scoring.softcap is not None or history.expand is not None:
            return BlockBackend().attend(query, history, scoring, with_lse=with_lse)
        n = query.shape[1]
        past = history.length - n
        blocks: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]]
        if query.is_cuda and n > 1 and scoring.seen_by_all(range(past, past + n)).start == 0:
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


def choose_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend called ``name`` (``auto``, ``flash``, ``sdpa``); ``auto`` is flash on CPUs and sdpa elsewhere.

    Raises:
        ConfigError: ``flash`` was asked for on another device than a CPU.
    """
    if name == "flash" and device.type != "cpu":
        raise ConfigError("attention backend 'flash' is the CPU kernel; use 'sdpa' on other devices", param="device")
    return FlashBackend() if name == "flash" or (name == "auto" and device.type == "cpu") else SdpaBackend()


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
    out, lse = _flash(folded, keys, values, scoring, causal=False, bias=bias)
    return out.reshape(heads, n, -1), lse.reshape(heads, n)


def _flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scoring: Scoring,
    *,
    causal: bool,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel on (heads, n, width) tensors: output and float32 log-sum-exp (heads, n)."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query[None],
        keys[None],
        values[None],
        0.0,
        causal,
        attn_mask=None if bias is None else bias[None, None],
        scale=scoring.scaling,
    )
    return out[0], lse[0]
