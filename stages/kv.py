"""KV memory of one stage: page tensors per layer, and the views of one request's history. Decides no allocation.

The coordinator hands out page ids, the same on every stage. A page is ``page_size`` consecutive slots of every local
layer's key and value tensor. Those are laid out (heads, slots, width), so a run of consecutive pages is one view: the
history is read in place, never copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from actorpp.errors import ProtocolError
from actorpp.stages import native

KeyValue = tuple[torch.Tensor, torch.Tensor]


class LayerShape(NamedTuple):
    """Widths of one layer's keys and values; they may differ between layers and from each other."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int


class Run(NamedTuple):
    """Consecutive slots of one request: its tokens from ``start`` on lie at ``slot`` and after."""

    start: int
    slot: int
    length: int


class PageTable:
    """Where a request's tokens lie: its pages in position order, joined into runs of consecutive slots."""

    def __init__(self, pages: Sequence[int], page_size: int) -> None:
        runs: list[Run] = []
        for index, page in enumerate(pages):
            if runs and runs[-1].slot + runs[-1].length == page * page_size:
                last = runs[-1]
                runs[-1] = last._replace(length=last.length + page_size)
            else:
                runs.append(Run(index * page_size, page * page_size, page_size))
        self.pages = tuple(pages)
        self.capacity = len(self.pages) * page_size
        self._runs = tuple(runs)

    def runs(self, start: int, end: int) -> list[Run]:
        """The runs that hold the tokens ``start`` to ``end``, cut to them.

        Raises:
            ProtocolError: The request has no pages for that many tokens.
        """
        if end > self.capacity:
            raise ProtocolError(f"{end} tokens do not fit in the request's {len(self.pages)} pages")
        cut = []
        for run in self._runs:
            lo, hi = max(start, run.start), min(end, run.start + run.length)
            if lo < hi:
                cut.append(Run(lo, run.slot + lo - run.start, hi - lo))
        return cut


class KVArena:
    """Keys and values of a stage's own layers.

    Args:
        shapes: Global layer index to shape, for the stage's own layers only.
    """

    def __init__(self, shapes: dict[int, LayerShape], page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shapes = shapes
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        self.num_pages = 0
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token needs over the stage's own layers."""
        elements = sum(s.key_heads * s.key_dim + s.value_heads * s.value_dim for s in self.shapes.values())
        return elements * self.dtype.itemsize

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over the stage's own layers."""
        return self.bytes_per_token * self.page_size

    def allocate(self, num_pages: int) -> None:
        """Reserve ``num_pages`` pages, uninitialised; a second call replaces the first arena."""
        self._keys.clear()
        self._values.clear()
        slots = num_pages * self.page_size
        for layer, shape in self.shapes.items():
            self._keys[layer] = self._empty(shape.key_heads, slots, shape.key_dim)
            self._values[layer] = self._empty(shape.value_heads, slots, shape.value_dim)
        self.num_pages = num_pages

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new tokens.

        Args:
            slots: (T,) int64 slot of each token.
            keys: (key_heads, T, key_dim).
            values: (value_heads, T, value_dim).
        """
        _file(self._keys[layer], slots, keys)
        _file(self._values[layer], slots, values)

    def tensors(self, layer: int) -> KeyValue:
        """A layer's keys (key_heads, slots, key_dim) and values (value_heads, slots, value_dim)."""
        return self._keys[layer], self._values[layer]

    def page(self, page: int) -> list[torch.Tensor]:
        """Views (heads, page_size, width) of every tensor's part of one page: what a copy of the page would move."""
        start = page * self.page_size
        return [t.narrow(1, start, self.page_size) for t in (*self._keys.values(), *self._values.values())]

    def poison(self, pages: Iterable[int]) -> None:
        """Fill pages with NaN, so that any later read of them shows."""
        for page in pages:
            for view in self.page(page):
                view.fill_(float("nan"))

    def _empty(self, heads: int, slots: int, width: int) -> torch.Tensor:
        return torch.empty((heads, slots, width), dtype=self.dtype, device=self.device)


def _file(side: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
    """``side[:, slots] = new``, with (heads, slots, width) and (heads, T, width)."""
    head, row, element = new.stride()
    library = native.library()
    if library is None or side.device.type != "cpu" or side.dtype != new.dtype or element != 1:
        side.index_copy_(1, slots, new)
        return
    size = side.element_size()
    width = side.shape[2] * size
    library.actorpp_file(
        side.data_ptr(), new.data_ptr(), slots.data_ptr(), len(slots), len(side), width,
        side.stride(0) * size, side.stride(1) * size, head * size, row * size,
    )  # fmt: skip
