"""Causal attention over a packed batch and paged history, for every transformers model that uses AttentionInterface.

Each segment attends to its own request's history, which is read in place run by run; an L x C mask is never made.
Backends share one small interface and can return the log-sum-exp, by which results over different keys are merged.
Sliding windows, soft-caps and sinks are not computed here: a keyword that this module does not know is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface

from actorpp.errors import ConfigError, UnsupportedModelError
from actorpp.stages.packed import KeyValue, PackedCache

ATTENTION_NAME = "actorpp"
BLOCK_ROWS = 128
_WITHOUT_EFFECT = frozenset({"position_ids", "use_cache", "is_causal", "output_attentions", "output_hidden_states"})


class AttentionBackend(Protocol):
    """Attention of one segment's queries over its request's keys."""

    def attend(
        self, query: torch.Tensor, history: Sequence[KeyValue], scaling: float, *, with_lse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Causal softmax attention; the last n keys of ``history`` are the queries' own.

        Args:
            query: (heads, n, key_dim).
            history: Runs of keys (kv_heads, m, key_dim) and values (kv_heads, m, value_dim), in position order.
            scaling: Factor on the scores.
            with_lse: Whether the log-sum-exp is wanted.

        Returns:
            (heads, n, value_dim), and the float32 log-sum-exp of the scores (heads, n) or None.
        """
        ...


def merge(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Join attention over disjoint sets of keys by their log-sum-exps.

    Args:
        parts: Outputs (..., n, width) with their float32 log-sum-exps (..., n).

    Returns:
        The output over all keys in float32, and its log-sum-exp.
    """
    lse = torch.logsumexp(torch.stack([part for _, part in parts]), dim=0)
    weighted = [out.float() * torch.exp(part - lse)[..., None] for out, part in parts]
    return torch.stack(weighted).sum(dim=0), lse


class FlashBackend:
    """torch's flash kernel for CPUs: the history without a mask, the queries' own keys causally, merged by their sums.

    No mask and no matrix of scores is ever made. In the history the heads of a group are folded into the rows, so that
    its keys are not repeated. On one core this took two thirds of the time of plain matrix products over blocks of
    rows, and of one masked call (1024 queries over 4096 keys, 9 heads over 3, float32 and bfloat16).
    """

    def attend(
        self, query: torch.Tensor, history: Sequence[KeyValue], scaling: float, *, with_lse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``AttentionBackend``; keys and values must be equally wide."""
        heads, n, width = query.shape
        kv_heads = history[0][0].shape[0]
        past = _length(history) - n if n > 1 else _length(history)
        folded = query.reshape(kv_heads, -1, width)
        parts = []
        for keys, values in _cut(history, 0, past):
            out, lse = _flash(folded, keys, values, scaling, causal=False)
            parts.append((out.reshape(heads, n, -1), lse.reshape(heads, n)))
        if n > 1:
            keys, values = (
                side.repeat_interleave(heads // kv_heads, 0) for side in _join(_cut(history, past, past + n))
            )
            parts.append(_flash(query, keys, values, scaling, causal=True))
        out, lse = parts[0] if len(parts) == 1 else merge(parts)
        return out.to(query.dtype), lse if with_lse else None


class SdpaBackend:
    """torch's scaled_dot_product_attention: the reference on any device, and the default on CUDA."""

    def attend(
        self, query: torch.Tensor, history: Sequence[KeyValue], scaling: float, *, with_lse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``AttentionBackend``. On CUDA the fused kernels know the causal rule; elsewhere rows go in blocks."""
        keys, values = _join(history)
        n, past = query.shape[1], keys.shape[1] - query.shape[1]
        outs, lses = [], []
        step = n if query.is_cuda and not with_lse else BLOCK_ROWS
        for first in range(0, n, step):
            rows = min(step, n - first)
            block, seen = query[:, first : first + rows], past + first + rows
            mask: Any = None
            if rows > 1 and query.is_cuda and not with_lse:
                mask = causal_lower_right(rows, seen)
            elif rows > 1:
                mask = torch.ones(rows, seen, dtype=torch.bool, device=query.device).tril_(seen - rows)
            out = functional.scaled_dot_product_attention(
                block[None], keys[None, :, :seen], values[None, :, :seen], mask, scale=scaling, enable_gqa=True
            )
            outs.append(out[0])
            if with_lse:
                repeated = keys[:, :seen].repeat_interleave(query.shape[0] // keys.shape[0], 0)
                scores = block.float() @ repeated.float().transpose(1, 2) * scaling
                lses.append(torch.logsumexp(scores if mask is None else scores.masked_fill(~mask, -torch.inf), dim=-1))
        return torch.cat(outs, dim=1), torch.cat(lses, dim=1) if with_lse else None


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    packed: PackedCache,
    backend: AttentionBackend,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers' attention modules call.

    Args:
        query: (1, heads, T, key_dim). ``key`` and ``value`` of the same tokens are in the cache already.
        packed: The step's cache, passed as a keyword through the model's forward; ``backend`` likewise.

    Returns:
        (1, T, heads, value_dim), and None for the weights.

    Raises:
        UnsupportedModelError: The model asks for something that would silently be left out.
    """
    unknown = sorted(name for name, given in kwargs.items() if given is not None and name not in _WITHOUT_EFFECT)
    if attention_mask is not None:
        unknown.append("attention_mask")
    if unknown:
        raise UnsupportedModelError(f"the model's attention needs {', '.join(unknown)}, which is not supported")
    layer: Any = module.layer_idx
    outputs = []
    for segment in packed.segments:
        own = query[0, :, segment.offset : segment.offset + segment.length]
        outputs.append(backend.attend(own, packed.history(layer, segment), scaling)[0])
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return out.transpose(0, 1)[None], None


def choose_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend called ``name`` (``auto``, ``flash``, ``sdpa``); ``auto`` is flash on CPUs and sdpa elsewhere.

    Raises:
        ConfigError: ``flash`` was asked for on another device than a CPU.
    """
    if name == "flash" and device.type != "cpu":
        raise ConfigError("attention backend 'flash' is the CPU kernel; use 'sdpa' on other devices", param="device")
    return FlashBackend() if name == "flash" or (name == "auto" and device.type == "cpu") else SdpaBackend()


def register() -> None:
    """Make ``packed_attention`` known to transformers under ``ATTENTION_NAME``; no mask function goes with it."""
    AttentionInterface.register(ATTENTION_NAME, packed_attention)


def _flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel on (heads, n, width) tensors: output and float32 log-sum-exp (heads, n)."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query[None], keys[None], values[None], 0.0, causal, scale=scaling
    )
    return out[0], lse[0]


def _join(history: Sequence[KeyValue]) -> KeyValue:
    """One tensor of keys and one of values; a copy only if there are several runs."""
    if len(history) == 1:
        return history[0]
    return torch.cat([keys for keys, _ in history], dim=1), torch.cat([values for _, values in history], dim=1)


def _length(history: Sequence[KeyValue]) -> int:
    return sum(keys.shape[1] for keys, _ in history)


def _cut(history: Sequence[KeyValue], lo: int, hi: int) -> list[KeyValue]:
    """The runs' views of the keys ``lo`` to ``hi``."""
    cut, start = [], 0
    for keys, values in history:
        first, last = max(lo - start, 0), min(hi - start, keys.shape[1])
        if first < last:
            cut.append((keys[:, first:last], values[:, first:last]))
        start += keys.shape[1]
    return cut
