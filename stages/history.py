"""What attention reads in one step: each request's keys and values, in place, and the short ones of a batch together.

``LayerKV`` is one layer of a packed step; ``History`` is one request's part of it. Nothing here scores anything, and
nothing knows transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from actorpp.stages.kv import KeyValue, Run

GATHERED_KEYS = 256
"""Histories up to this length are gathered, so that one call serves all requests that decode: up to here copying costs
less than a call for each of them (``python -m tests.bench.steps``)."""

Expansion = Callable[[torch.Tensor, torch.Tensor], KeyValue]


class PackedSegment(NamedTuple):
    """One segment in the packed row.

    Attributes:
        offset: Where its tokens begin in the row.
        length: Its tokens.
        runs: Where the keys of all its request's tokens lie, up to and with the segment's own.
    """

    offset: int
    length: int
    runs: list[Run]

    @property
    def keys(self) -> int:
        """Tokens of its request so far, its own among them."""
        return sum(run.length for run in self.runs)

    def slots(self) -> torch.Tensor:
        """(keys,) int64, the arena's slot of each of them."""
        return torch.cat([torch.arange(run.slot, run.slot + run.length) for run in self.runs])


class History:
    """One request's keys and values in one layer, in position order, read in place.

    Args:
        runs: Keys (kv_heads, m, key_dim) and values (kv_heads, m, value_dim) as they are stored.
        expand: Makes keys and values out of what is stored, if that is something else (latents).
    """

    def __init__(self, runs: Sequence[KeyValue], expand: Expansion | None = None) -> None:
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


class ShortDecodes:
    """Segments of one token with histories of at most ``GATHERED_KEYS``, laid out as one padded batch.

    Attributes:
        rows: (R,) int64, where their tokens lie in the packed row.
        slots: (R * longest,) int64, the arena's slot of each position. Past a history's end stands its last slot: what
            is not the request's own is never read.
        lengths: (R,) int64, keys of each.
    """

    def __init__(self, segments: Sequence[PackedSegment], device: torch.device) -> None:
        lengths = torch.tensor([segment.keys for segment in segments])
        self.longest = int(lengths.max())
        slots = torch.empty(len(segments), self.longest, dtype=torch.int64)
        for row, segment in zip(slots, segments, strict=True):
            known = segment.slots()
            row[: len(known)] = known
            row[len(known) :] = known[-1]
        self.rows = torch.tensor([segment.offset for segment in segments]).to(device)
        self.slots = slots.flatten().to(device)
        self.lengths = lengths.to(device)
        self._bias: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}

    def gather(self, keys: torch.Tensor, values: torch.Tensor) -> KeyValue:
        """Copies (R, kv_heads, longest, width) of a layer's keys and values, which are (kv_heads, slots, width)."""
        return (
            _padded(keys.index_select(1, self.slots), len(self.rows)),
            _padded(values.index_select(1, self.slots), len(self.rows)),
        )

    def bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """(R, 1, 1, longest): 0 where the request's token sees the key, else -inf; the same for many layers."""
        if (window, dtype) not in self._bias:
            behind = self.lengths[:, None] - 1 - torch.arange(self.longest, device=self.lengths.device)
            seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
            bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
            self._bias[window, dtype] = bias[:, None, None]
        return self._bias[window, dtype]


def _padded(side: torch.Tensor, requests: int) -> torch.Tensor:
    """(kv_heads, R * longest, width) as (R, kv_heads, longest, width)."""
    return side.view(side.shape[0], requests, -1, side.shape[2]).transpose(0, 1)


@dataclass
class StepLayout:
    """Where a step's segments lie in the packed row and in the arena: the same for every layer.

    Attributes:
        page_size: Slots of one page.
    """

    segments: Sequence[PackedSegment]
    page_size: int
    device: torch.device

    @cached_property
    def short_decodes(self) -> ShortDecodes | None:
        """The decode segments that are better computed together; None if there are fewer than two."""
        short = [segment for segment in self.segments if segment.length == 1 and segment.keys <= GATHERED_KEYS]
        return ShortDecodes(short, self.device) if len(short) > 1 else None

    @cached_property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in numbers.

        Returns:
            (n, 4) int64: each segment's offset, length, first run and number of runs; and (m, 2) int64: each run's slot
            and length.
        """
        segments, runs = [], list[tuple[int, int]]()
        for segment in self.segments:
            segments.append((segment.offset, segment.length, len(runs), len(segment.runs)))
            runs += [(run.slot, run.length) for run in segment.runs]
        tables = np.array(segments, dtype=np.int64), np.array(runs, dtype=np.int64)  # faster than torch at this
        return torch.from_numpy(tables[0]), torch.from_numpy(tables[1])

    @cached_property
    def others(self) -> list[PackedSegment]:
        """The segments that are not among ``short_decodes``."""
        if self.short_decodes is None:
            return list(self.segments)
        return [segment for segment in self.segments if segment.length > 1 or segment.keys > GATHERED_KEYS]


class LayerKV(NamedTuple):
    """One layer's keys (kv_heads, slots, key_dim) and values (kv_heads, slots, value_dim) in one step.

    Attributes:
        expand: Makes keys and values of what is stored, if that is something else (latents).
    """

    layout: StepLayout
    keys: torch.Tensor
    values: torch.Tensor
    expand: Expansion | None = None

    @property
    def one_width(self) -> bool:
        """Whether keys and values are equally wide and stored as such."""
        return self.expand is None and self.keys.shape[-1] == self.values.shape[-1]

    def history(self, segment: PackedSegment) -> History:
        """The segment's request, in place; its own tokens are the last."""
        runs = [
            (self.keys.narrow(1, run.slot, run.length), self.values.narrow(1, run.slot, run.length))
            for run in segment.runs
        ]
        return History(runs, self.expand)
