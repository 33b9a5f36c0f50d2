"""Decoder layers of Llama's form in one call of the library (``amx_layer.c``).

It takes what ``fused`` has recognised and checked, where all products are on tiles and attention is the library's own,
and gives the same bits as the library's single functions. What does not change is described once: a layer when it first
runs, a step for all its layers together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from actorpp.stages import amx
from actorpp.stages.amx_backend import side
from actorpp.stages.backends import Scoring
from actorpp.stages.history import LayerKV
from actorpp.stages.linears import TiledLinear, as_rows
from actorpp.stages.packed import PackedCache

Rotary = tuple[torch.Tensor, torch.Tensor]


class AmxLayer:
    """One layer.

    Args:
        norms: Weight and epsilon of the norm before attention and of the one before the MLP.
        linears: Query, key and value together; output; gate and up in turn; down.
        heads: Of the queries, and of the keys.
        width: Of a head, a multiple of 32.
    """

    def __init__(
        self,
        norms: Sequence[tuple[torch.Tensor, float]],
        linears: Sequence[TiledLinear],
        heads: tuple[int, int],
        width: int,
        scoring: Scoring,
    ) -> None:
        before_attention, before_mlp = (amx.Norm(weight.data_ptr(), epsilon) for weight, epsilon in norms)
        project, output, gated, down = (linear.described for linear in linears)
        self._kept = norms, linears  # the library has their addresses alone
        self._keys: torch.Tensor | None = None
        self._hidden_size: int = project.in_features
        self._scratch: int = project.in_features + project.out_features + output.in_features + down.in_features
        self._layer = amx.Layer(
            before_attention=before_attention,
            before_mlp=before_mlp,
            project=project,
            output=output,
            gated=gated,
            down=down,
            heads=heads[0],
            kv_heads=heads[1],
            width=width,
            window=scoring.window or 0,
            scaling=scoring.scaling,
        )

    def __call__(self, hidden_states: torch.Tensor, kv: LayerKV, batch: amx.Batch) -> torch.Tensor:
        """(1, T, hidden_size) to the same. Raises MemoryError."""
        if kv.keys is not self._keys:
            self._layer.key, self._layer.value, self._keys = side(kv.keys), side(kv.values), kv.keys
        hidden_states = as_rows(hidden_states, (1, batch.rows, self._hidden_size))
        out = torch.empty_like(hidden_states)
        scratch = torch.empty(batch.rows * self._scratch, dtype=torch.bfloat16)
        amx.compute_layer(self._layer, batch, hidden_states.data_ptr(), scratch.data_ptr(), out.data_ptr())
        return out


class Batches:
    """The running step as the library takes it, the same for all layers of a model."""

    def __init__(self) -> None:
        self._of: tuple[PackedCache, Rotary] | None = None
        self._batch: amx.Batch

    def of(self, packed: PackedCache, angles: Rotary) -> amx.Batch:
        """Of the step with this cache and these angles, (T, width) each, as ``Angles`` lays them out."""
        if self._of is None or packed is not self._of[0] or angles is not self._of[1]:
            self._of = packed, angles  # keeps alive what the library has the addresses of
            segments, runs = packed.layout.tables
            self._batch = amx.Batch(
                cos=angles[0].data_ptr(),
                sin=angles[1].data_ptr(),
                slots=packed.slots.data_ptr(),
                segments=segments.data_ptr(),
                runs=runs.data_ptr(),
                rows=len(packed.slots),
                num_segments=len(segments),
                threads=torch.get_num_threads(),
            )
        return self._batch
