"""A stage's step without the model's own code around its layers: bfloat16 on CPUs.

Around its layers a model's code looks up options, makes masks and output objects, calls what stands for the layers of
other stages, and on the last stage normalises rows that nobody reads. Where all of a stage's layers are one run
(``fused``), most models need only their parts: embedding, rotary embedding, layers, and norm and head of some rows.

A model is recognised by the names of its parts, and keeps its own code unless both give its layers the same bits and
make the same of what these return: scaled embeddings and capped logits, for instance, do not. To find out, layers are
not run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from actorpp.stages.backends import AttentionBackend
from actorpp.stages.exhaustion import Rows
from actorpp.stages.fused import FusedRun, alike, rms_norm
from actorpp.stages.loader import LoadedModel
from actorpp.stages.native_layer import Rotary
from actorpp.stages.packed import PackedCache, ProbeCache
from actorpp.stages.spec import StageSpec

_ROWS = 8

Forward = Callable[[torch.Tensor | None, torch.Tensor | None, torch.Tensor, PackedCache, Rows], torch.Tensor]
"""As ``StageHost.forward``."""


@dataclass(frozen=True)
class PlainModel:
    """The parts of a model that a stage calls in turn; on stages without them, embedding, norm or head do nothing.

    Attributes:
        layers: All of the stage's own.
    """

    embedding: Callable[..., torch.Tensor]
    rotary: Callable[[torch.Tensor, torch.Tensor], Rotary]
    layers: Callable[..., torch.Tensor]
    norm: Callable[[torch.Tensor], torch.Tensor]
    head: Callable[[torch.Tensor], torch.Tensor]

    def __call__(
        self,
        ids: torch.Tensor | None,
        hidden: torch.Tensor | None,
        positions: torch.Tensor,
        cache: PackedCache,
        rows: Rows,
        backend: AttentionBackend,
    ) -> torch.Tensor:
        """As ``StageHost.forward``; without rows, hidden states that were not normalised on the last stage either."""
        given = self.embedding(ids) if hidden is None else hidden[None]
        out = self.layers(given, position_embeddings=self.rotary(given, positions), packed=cache, backend=backend)[0]
        return self.head(self.norm(out[rows])) if rows else out


class _StandIn:
    """In the place of the layers: notes what they are given, and returns what does not depend on it."""

    def __init__(self, out: torch.Tensor) -> None:
        self.given: list[Sequence[torch.Tensor]] = []
        self._out = out

    def __call__(
        self, hidden_states: torch.Tensor, *args: Any, position_embeddings: Rotary, **kwargs: Any
    ) -> torch.Tensor:
        self.given.append((hidden_states, *position_embeddings))
        return self._out


def recognised(loaded: LoadedModel, spec: StageSpec, whole: Forward, backend: AttentionBackend) -> PlainModel | None:
    """The model's parts, if calling them in turn gives what ``whole`` gives with the model's own code; else None.

    Args:
        loaded: After ``fusing``.
    """
    model, first = loaded.model, loaded.layers[0]
    base, run = getattr(model, model.base_model_prefix), first.forward
    if not isinstance(run, FusedRun) or len(run.layers) < len(loaded.layers) or not _has_form(model, base):
        return None
    generator = torch.Generator().manual_seed(0)
    received, out = torch.randn(2, 1, _ROWS, model.config.hidden_size, generator=generator).to(model.dtype)
    stand_in, positions = _StandIn(out), torch.arange(1, _ROWS + 1)[None]
    plain = PlainModel(base.embed_tokens, base.rotary_emb, stand_in, base.norm, model.lm_head)
    ids, hidden = (positions % model.config.vocab_size, None) if spec.is_first else (None, received[0])
    rows = [*range(_ROWS)] if spec.is_last else None
    first.forward = stand_in  # the other layers of the run pass it on
    expected = whole(ids, hidden, positions, ProbeCache(_ROWS), rows)
    first.forward = run
    try:
        found = plain(ids, hidden, positions, ProbeCache(_ROWS), rows, backend)
    except (RuntimeError, TypeError):  # parts that are called in another way
        return None
    theirs, ours = stand_in.given
    if not all(map(torch.equal, (*theirs, expected), (*ours, found))):
        return None
    return replace(plain, layers=run, norm=_in_one_call(base.norm, out))


def _has_form(model: Any, base: Any) -> bool:
    outer, inner = ({name for name, _ in parent.named_children()} for parent in (model, base))
    return outer == {model.base_model_prefix, "lm_head"} and inner == {"embed_tokens", "layers", "norm", "rotary_emb"}


def _in_one_call(norm: Any, hidden_states: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The norm as fused layers compute theirs, if it is the same; else itself."""
    if not (hasattr(norm, "weight") and hasattr(norm, "variance_epsilon")):
        return norm  # type: ignore[no-any-return]
    fast = partial(rms_norm, weight=norm.weight, epsilon=norm.variance_epsilon)
    return fast if alike(norm(hidden_states), fast(hidden_states)) else norm
