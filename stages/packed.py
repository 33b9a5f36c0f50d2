"""The packed batch of one step, and the cache object that carries it through a transformers model.

A step's segments lie one after another in one row of tokens, (1, T). The model's own code sees an ordinary batch of
one with explicit positions; only the cache and the attention function know the segments. It computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from actorpp.stages.history import Expansion, LayerKV, PackedSegment, StepLayout
from actorpp.stages.kv import KeyValue, KVArena, LayerShape, PageTable, Run


class PackedCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """What a model takes for its KV cache during one step: ``update`` files new keys and values in the arena.

    It returns the new ones alone; the attention function reads everything from ``layer``.

    Args:
        slots: (T,) int64, where in the arena the step's tokens go.
    """

    def __init__(self, layout: StepLayout, arena: KVArena, slots: torch.Tensor) -> None:
        super().__init__(layers=[])
        self.layout = layout
        self._arena = arena
        self.slots = slots

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KeyValue:
        """Store (1, heads, T, width) keys and values of layer ``layer_idx`` and return them as they came."""
        self._arena.write(layer_idx, self.slots, key_states[0], value_states[0])
        return key_states, value_states

    def layer(self, index: int, expand: Expansion | None) -> LayerKV:
        """All that is stored of a layer, with the step's own tokens."""
        return LayerKV(self.layout, *self._arena.tensors(index), expand)


class ProbeCache(PackedCache):
    """Stands in before there is an arena: notes the shapes of every layer's keys and values, keeps none of them."""

    def __init__(self, length: int) -> None:
        Cache.__init__(self, layers=[])
        segment = PackedSegment(0, length, [Run(0, 0, length)])
        self.layout = StepLayout([segment], length, torch.device("cpu"))
        self.shapes: dict[int, LayerShape] = {}
        self._newest: KeyValue = (torch.empty(0), torch.empty(0))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KeyValue:
        """Note the widths and hold the tensors for this layer's attention."""
        (_, key_heads, _, key_dim), (_, value_heads, _, value_dim) = key_states.shape, value_states.shape
        self.shapes[layer_idx] = LayerShape(key_heads, key_dim, value_heads, value_dim)
        self._newest = (key_states[0], value_states[0])
        return key_states, value_states

    def layer(self, index: int, expand: Expansion | None) -> LayerKV:
        """The layer's new keys and values, as an arena of one page: a probe has no past."""
        return LayerKV(self.layout, *self._newest, expand)


def pack(parts: Sequence[tuple[PageTable, int, int]], arena: KVArena) -> tuple[PackedCache, torch.Tensor]:
    """Lay out one step.

    Args:
        parts: Page table, first position and length of each segment, in order.

    Returns:
        The cache for this step, and the (1, T) int64 positions, both on the arena's device.
    """
    segments: list[PackedSegment] = []
    new: list[Run] = []
    offset = 0
    for table, start, length in parts:
        segments.append(PackedSegment(offset, length, table.runs(0, start + length)))
        new += table.runs(start, start + length)
        offset += length
    layout = StepLayout(segments, arena.page_size, arena.device)
    positions = _joined(range(start, start + length) for _, start, length in parts)
    slots = _joined(range(run.slot, run.slot + run.length) for run in new)
    cache = PackedCache(layout, arena, slots.to(arena.device, non_blocking=True))
    return cache, positions[None].to(arena.device, non_blocking=True)


def _joined(ranges: Iterable[range]) -> torch.Tensor:
    """(T,) int64, one behind the other; torch takes three times as long to read Python's numbers as numpy does."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(ranges), dtype=np.int64))
