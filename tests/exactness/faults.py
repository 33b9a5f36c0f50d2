"""Faults to plant in the stages, each of a kind that such systems have had: the exactness suite must see them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from actorpp.stages.backends import Scoring
from actorpp.stages.host import StageHost
from actorpp.stages.kv import KVArena, PageTable
from actorpp.stages.loader import PassThrough, _fix_longrope
from actorpp.stages.packed import PackedCache, pack

Parts = Sequence[tuple[PageTable, int, int]]
Fault = Callable[[], AbstractContextManager[Any]]

_load = StageHost.load
_update = PackedCache.update


def _packed_by(faulty: Callable[[Parts, KVArena], tuple[PackedCache, torch.Tensor]]) -> Fault:
    return lambda: patch("actorpp.stages.exhaustion.pack", faulty)


def _scored_by(faulty: Callable[[Scoring], Scoring]) -> Fault:
    return lambda: patch("actorpp.stages.attention.Scoring", lambda *values: faulty(Scoring(*values)))


def _loaded_with(change: Callable[[Any], None]) -> Fault:
    """``change`` gets each stage's model after loading."""

    def load(host: StageHost) -> None:
        _load(host)
        with torch.no_grad():
            change(host.model)

    return lambda: patch.object(StageHost, "load", load)


def _positions_restart(parts: Parts, arena: KVArena) -> tuple[PackedCache, torch.Tensor]:
    cache, _ = pack(parts, arena)
    return cache, torch.cat([torch.arange(length) for _, _, length in parts])[None]


def _page_is_lost(parts: Parts, arena: KVArena) -> tuple[PackedCache, torch.Tensor]:
    """The page before the chunk is not read."""
    cache, positions = pack(parts, arena)
    segments = []
    for segment, (table, start, length) in zip(cache.layout.segments, parts, strict=True):
        before = table.runs(0, max(0, start - arena.page_size))
        segments.append(segment._replace(runs=before + table.runs(start, start + length)))
    cache.layout = replace(cache.layout, segments=segments)
    return cache, positions


def _pages_are_swapped(parts: Parts, arena: KVArena) -> tuple[PackedCache, torch.Tensor]:
    """Two requests find each other's keys and values in the page before their second chunk."""
    under_way = [table.pages[start // arena.page_size - 1] for table, start, _ in parts if start >= arena.page_size]
    if len(under_way) > 1:
        for first, second in zip(arena.page(under_way[0]), arena.page(under_way[1]), strict=True):
            first[:], second[:] = second.clone(), first.clone()
    return pack(parts, arena)


def _update_in_float8(cache: PackedCache, keys: torch.Tensor, values: torch.Tensor, *more: Any, **named: Any) -> Any:
    stored = (part.to(torch.float8_e4m3fn).to(part.dtype) for part in (keys, values))
    return _update(cache, *stored, *more, **named)


def _forget_sinks(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.fill_(-torch.inf)


def _forget_embedding_scale(model: Any) -> None:
    embedding = model.model.get_input_embeddings()
    if hasattr(embedding, "embed_scale"):
        embedding.embed_scale.fill_(1.0)
    model.model.embedding_multiplier = 1.0


def _forget_scales_of_later_stages(model: Any) -> None:
    """What a stage's layers are scaled by is lost where they do not begin with the model's first one."""
    if isinstance(model.model.layers[0], PassThrough):
        for layer in model.model.layers:
            layer.residual_multiplier = 1.0


def _forget_logits_cap(model: Any) -> None:
    model.config.final_logit_softcapping = None


FOR_ALL: dict[str, Fault] = {
    "positions restart at a chunk": _packed_by(_positions_restart),
    "a page is lost": _packed_by(_page_is_lost),
    "two pages are swapped": _packed_by(_pages_are_swapped),
}
FAULTS: dict[str, Fault] = FOR_ALL | {
    "window one longer": _scored_by(lambda right: right._replace(window=right.window and right.window + 1)),
    "window one shorter": _scored_by(lambda right: right._replace(window=right.window and right.window - 1)),
    "no soft-cap on scores": _scored_by(lambda right: right._replace(softcap=None)),
    "no soft-cap on logits": _loaded_with(_forget_logits_cap),
    "no sink": _loaded_with(_forget_sinks),
    "no embedding scale": _loaded_with(_forget_embedding_scale),
    "second stage scaled again": lambda: patch.object(StageHost, "_swap_in", lambda host, module, args: args),
    "second stage not scaled": _loaded_with(_forget_scales_of_later_stages),
    "factors of a short context": lambda: patch(
        "actorpp.stages.loader._fix_longrope", lambda model, length: _fix_longrope(model, 1)
    ),
}
FLOAT8_CACHE: Fault = partial(patch.object, PackedCache, "update", _update_in_float8)
