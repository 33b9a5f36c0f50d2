"""Attention in bfloat16 on x86 CPUs: all segments of a step in one call of our own library."""

from __future__ import annotations

import torch

from actorpp.stages import native
from actorpp.stages.backends import FlashBackend, Scoring
from actorpp.stages.history import LayerKV


class NativeBackend(FlashBackend):
    """Chunks far into a prompt take about 0.4 of the flash kernel's time [``python -m tests.bench.steps``].

    What the library does not compute goes to ``FlashBackend``: other types than bfloat16, latents, soft caps, and
    widths that are no multiple of 32.
    """

    def attend_step(
        self, query: torch.Tensor, kv: LayerKV, scoring: Scoring, *, with_lse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``AttentionBackend``. The result does not depend on the number of threads."""
        widths = kv.keys.shape[2], kv.values.shape[2]
        plain = kv.expand is None and scoring.softcap is None and scoring.scaling > 0
        if not plain or query.dtype != torch.bfloat16 or any(width % 32 for width in widths):
            return super().attend_step(query, kv, scoring, with_lse=with_lse)
        heads, tokens, _ = query.shape
        out = torch.empty(tokens, heads, widths[1], dtype=query.dtype)
        lse = torch.empty(tokens, heads) if with_lse else None
        segments, runs = kv.layout.tables
        step = native.AttentionStep(
            query=side(query),
            key=side(kv.keys),
            value=side(kv.values),
            out=side(out.transpose(0, 1)),
            lse=None if lse is None else lse.data_ptr(),
            segments=segments.data_ptr(),
            runs=runs.data_ptr(),
            num_segments=len(segments),
            heads=heads,
            kv_heads=kv.keys.shape[0],
            key_width=widths[0],
            value_width=widths[1],
            group_stride=32,
            window=scoring.window or 0,
            scaling=scoring.scaling,
            threads=torch.get_num_threads(),
        )
        native.attend(step)
        return out, lse


def side(tensor: torch.Tensor) -> native.Side:
    """A (heads, tokens, width) tensor, whose elements of a token lie side by side as all of a step do."""
    head, token, _ = tensor.stride()
    return native.Side(tensor.data_ptr(), head, token)
