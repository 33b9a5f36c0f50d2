"""Page tables, page memory and its formula."""

from __future__ import annotations

import pytest
import torch

from actorpp.errors import ProtocolError
from actorpp.stages.history import LayerKV, PackedSegment, StepLayout
from actorpp.stages.kv import KVArena, LayerShape, PageTable, Run


def test_consecutive_pages_are_one_run() -> None:
    assert PageTable([5, 6, 7], 16).runs(0, 40) == [Run(0, 80, 40)]


def test_scattered_pages_are_cut_to_the_tokens_asked_for() -> None:
    table = PageTable([9, 2, 3, 0], 4)
    assert table.runs(0, 16) == [Run(0, 36, 4), Run(4, 8, 8), Run(12, 0, 4)]
    assert table.runs(3, 6) == [Run(3, 39, 1), Run(4, 8, 2)]


def test_more_tokens_than_pages_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="33 tokens do not fit in the request's 2 pages"):
        PageTable([0, 1], 16).runs(0, 33)


def test_bytes_follow_the_formula_on_the_own_layers_only() -> None:
    shapes = {7: LayerShape(3, 64, 3, 64), 8: LayerShape(2, 32, 2, 16)}
    arena = KVArena(shapes, 64, torch.bfloat16, torch.device("cpu"))
    assert arena.bytes_per_token == 2 * (3 * 64 * 2 + 2 * 32 + 2 * 16)
    assert arena.bytes_per_page == 64 * arena.bytes_per_token
    arena.allocate(5)
    assert sum(view.nbytes for view in arena.page(4)) == arena.bytes_per_page


def test_history_is_a_view_of_what_was_written() -> None:
    arena = KVArena({0: LayerShape(2, 4, 2, 6)}, 4, torch.float32, torch.device("cpu"))
    arena.allocate(4)
    table = PageTable([2, 0], 4)
    keys, values = torch.randn(2, 6, 4), torch.randn(2, 6, 6)
    slots = torch.cat([torch.arange(run.slot, run.slot + run.length) for run in table.runs(0, 6)])
    arena.write(0, slots, keys, values)
    segment = PackedSegment(0, 6, table.runs(0, 6))
    history = LayerKV(StepLayout([segment], 4, arena.device), *arena.tensors(0)).history(segment)
    assert history.length == 6
    pieces = [stored for _, stored in history.pieces(range(6))]
    assert len(pieces) == 2
    assert all(torch.equal(mine, side) for mine, side in zip(history.join(range(6)), (keys, values), strict=True))
    assert pieces[0][0].data_ptr() == arena.page(2)[0].data_ptr()


def test_poison_reaches_the_named_pages_alone() -> None:
    arena = KVArena({0: LayerShape(1, 2, 1, 2)}, 4, torch.float32, torch.device("cpu"))
    arena.allocate(2)
    for view in (*arena.page(0), *arena.page(1)):
        view.zero_()
    arena.poison([1])
    assert all(bool(view.isnan().all()) for view in arena.page(1))
    assert not any(bool(view.isnan().any()) for view in arena.page(0))
