"""Decoder layers of Llama's form, all that are neighbours in one call of the library (``native_layer.c``).

It takes what ``fused`` has recognised and checked, where all products are on tiles and attention is the library's own,
and gives the same bits as the library's single functions. A step is described once for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from actorpp.stages import native
from actorpp.stages.linears import as_rows
from actorpp.stages.native_backend import side
from actorpp.stages.packed import PackedCache

Rotary = tuple[torch.Tensor, torch.Tensor]


class NativeLayers:
    """Neighbouring layers. The caller keeps what they have the addresses of.

    Args:
        indices: Under which their keys and values are stored.
        layers: Without the memory of keys and values.
    """

    def __init__(self, indices: Sequence[int], layers: Sequence[native.Layer]) -> None:
        self._indices = indices
        self._layers = (native.Layer * len(layers))(*layers)
        self._hidden_size: int = layers[0].project.in_features
        self._scratch: int = max(
            2 * each.project.in_features + each.project.out_features + each.output.in_features + each.down.in_features
            for each in layers
        )
        self._keys: torch.Tensor | None = None

    def __call__(self, hidden_states: torch.Tensor, packed: PackedCache, batch: native.Batch) -> torch.Tensor:
        """(1, T, hidden_size) to the same. Raises MemoryError."""
        self._attach(packed)
        hidden_states = as_rows(hidden_states, (1, batch.rows, self._hidden_size))
        out = torch.empty_like(hidden_states)
        scratch = torch.empty(batch.rows * self._scratch, dtype=torch.bfloat16)
        native.compute_layers(self._layers, batch, hidden_states.data_ptr(), scratch.data_ptr(), out.data_ptr())
        return out

    def _attach(self, packed: PackedCache) -> None:
        """Name the memory of the arena to the library; it is allocated anew now and then."""
        first = packed.layer(self._indices[0], None).keys
        if first is not self._keys:
            for index, layer in zip(self._indices, self._layers, strict=True):
                kv = packed.layer(index, None)
                layer.key, layer.value = side(kv.keys), side(kv.values)
            self._keys = first


class Batches:
    """The running step as the library takes it, the same for all layers of a model."""

    def __init__(self) -> None:
        self._of: tuple[PackedCache, Rotary] | None = None
        self._batch: native.Batch

    def of(self, packed: PackedCache, angles: Rotary) -> native.Batch:
        """Of the step with this cache and these angles, (T, width) each, as ``Angles`` lays them out."""
        if self._of is None or packed is not self._of[0] or angles is not self._of[1]:
            self._of = packed, angles  # keeps alive what the library has the addresses of
            segments, runs = packed.layout.tables
            self._batch = native.Batch(
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
