"""The packed batch of a step: positions and slots, token by token, whatever runs and segments they lie in."""

from __future__ import annotations

import pytest
import torch

from actorpp.stages.kv import KVArena, LayerShape, PageTable
from actorpp.stages.packed import pack


@pytest.mark.parametrize(
    "parts",
    [
        [((0, 1, 2), 0, 12)],  # one run
        [((5, 1, 2, 7), 2, 13)],  # several, the first and last in part
        [((3,), 2, 1)],
        [((4, 6), 5, 1), ((2, 3, 1), 0, 9), ((0,), 3, 1), ((7, 5), 1, 4)],
    ],
)
def test_every_token_has_its_position_and_slot(parts: list[tuple[tuple[int, ...], int, int]]) -> None:
    page = 4
    arena = KVArena({0: LayerShape(1, 8, 1, 8)}, page, torch.float32, torch.device("cpu"))
    cache, positions = pack([(PageTable(pages, page), start, length) for pages, start, length in parts], arena)
    tokens = [(pages, at) for pages, start, length in parts for at in range(start, start + length)]
    assert positions.tolist() == [[at for _, at in tokens]]
    assert cache.slots.tolist() == [pages[at // page] * page + at % page for pages, at in tokens]
    assert positions.dtype == cache.slots.dtype == torch.int64
    assert [(s.offset, s.length, s.keys) for s in cache.layout.segments] == [
        (sum(length for *_, length in parts[:index]), length, start + length)
        for index, (_, start, length) in enumerate(parts)
    ]


def test_tables_say_the_same_in_numbers() -> None:
    arena = KVArena({0: LayerShape(1, 8, 1, 8)}, 4, torch.float32, torch.device("cpu"))
    cache, _ = pack([(PageTable((4, 6), 4), 5, 1), (PageTable((2, 3, 1), 4), 0, 9)], arena)
    segments, runs = cache.layout.tables
    assert segments.tolist() == [[0, 1, 0, 2], [1, 9, 2, 2]]
    assert runs.tolist() == [[16, 4], [24, 2], [8, 8], [4, 1]]
    assert segments.dtype == runs.dtype == torch.int64
