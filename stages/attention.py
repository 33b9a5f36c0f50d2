"""The attention function that transformers models call: a packed batch over paged history.

It translates what a model hands to ``AttentionInterface`` for the backends. A keyword that it does not know is an
error, for it would silently be left out.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from actorpp.errors import UnsupportedModelError
from actorpp.stages.backends import AttentionBackend, Scoring
from actorpp.stages.history import Expansion
from actorpp.stages.kv import KeyValue
from actorpp.stages.packed import PackedCache

ATTENTION_NAME = "actorpp"
_WITHOUT_EFFECT = frozenset(
    {"position_ids", "use_cache", "is_causal", "output_attentions", "output_hidden_states", "output_router_logits"}
)


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
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers' attention modules call.

    Args:
        query: (1, heads, T, key_dim). ``key`` and ``value`` of the same tokens are in the cache already.
        packed: The step's cache, passed as a keyword through the model's forward; ``backend`` likewise.
        sliding_window: The key at position j is visible to the query at q iff q - sliding_window < j <= q.
        softcap: Bound on the scores, approached by tanh.
        s_aux: (heads,) sinks: scores of a key without a value that every query sees.

    Returns:
        (1, T, heads, value_dim), and None for the weights.

    Raises:
        UnsupportedModelError: The model asks for something that would silently be left out.
    """
    unknown = sorted(name for name, given in kwargs.items() if given is not None and name not in _WITHOUT_EFFECT)
    if attention_mask is not None:
        unknown.append("attention_mask")
    if not getattr(module, "is_causal", True):
        unknown.append("sight of later tokens")
    if unknown:
        raise UnsupportedModelError(f"the model's attention needs {', '.join(unknown)}, which is not supported")
    layer: Any = module.layer_idx
    scoring = Scoring(scaling, sliding_window, softcap)
    kv = packed.layer(layer, _expansion(module))
    out, lse = backend.attend_step(query[0], kv, scoring, with_lse=s_aux is not None)
    if s_aux is not None and lse is not None:  # the sink takes its share of the weights and gives nothing
        out = out * torch.sigmoid(lse - s_aux.float())[..., None].to(out.dtype)
    return out[None], None


def _expansion(module: Any) -> Expansion | None:
    """How a module of multi-head latent attention makes keys and values of the latents that it caches; else None."""
    if not hasattr(module, "expand_kv"):
        return None

    def expand(latents: torch.Tensor, rotary: torch.Tensor) -> KeyValue:
        keys, values = module.expand_kv(latents[None], rotary[None])
        return keys[0], values[0]

    return expand


def register() -> None:
    """Make ``packed_attention`` known to transformers under ``ATTENTION_NAME``; no mask function goes with it."""
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
