"""The library's attention beside plain attention in double precision, and who computes what it does not."""

from __future__ import annotations

import pytest
import torch

from actorpp.errors import ConfigError
from actorpp.stages import backend_names, native
from actorpp.stages.backend_choice import choose_backend
from actorpp.stages.backends import BlockBackend, FlashBackend, Scoring
from actorpp.stages.history import LayerKV
from actorpp.stages.native_backend import NativeBackend
from tests.support.packed_step import check_step, packed_step

CPU = torch.device("cpu")
BF16 = torch.bfloat16
PLAIN = Scoring(0.125)
on_each_unit = pytest.mark.usefixtures("unit")
LENGTHS = {
    "one token": [(1, 1)],
    "decode": [(33, 1), (1, 1), (129, 1), (4200, 1)],
    "chunks and decode": [(40, 40), (300, 1), (2500, 130), (64, 3), (2049, 17), (2048, 1)],
    "a prompt": [(517, 517)],
    "more rows than are computed at a time": [(3000, 1700)],
}


@on_each_unit
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("window", [None, 1, 5, 128, 300, 2047])
def test_output_and_log_sum_exp_are_right_over_scattered_pages(
    lengths: list[tuple[int, int]], window: int | None
) -> None:
    """What no request owns is NaN, so a read past a request's own pages would show."""
    query, kv = packed_step(lengths, heads=9, kv_heads=3, widths=(64, 64), dtype=BF16)
    check_step(NativeBackend(), query, kv, PLAIN._replace(window=window), 0.015)


@on_each_unit
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 1), (6, 2), (32, 1)])
@pytest.mark.parametrize("widths", [(32, 32), (64, 128), (96, 64), (256, 256)])
def test_heads_and_widths(heads: int, kv_heads: int, widths: tuple[int, int]) -> None:
    query, kv = packed_step([(150, 70), (90, 1)], heads=heads, kv_heads=kv_heads, widths=widths, dtype=BF16)
    check_step(NativeBackend(), query, kv, PLAIN, 0.015)


@on_each_unit
def test_it_is_closer_to_the_truth_than_the_rounding_of_its_result() -> None:
    """Its error is that of weights in bfloat16, as in torch's kernel: the root of the mean square is not larger."""
    query, kv = packed_step([(3000, 400)], heads=9, kv_heads=3, widths=(64, 64), dtype=BF16)
    exact, _ = BlockBackend().attend_step(
        query.double(), kv._replace(keys=kv.keys.double(), values=kv.values.double()), PLAIN
    )
    errors = [
        (backend.attend_step(query, kv, PLAIN)[0].double() - exact).pow(2).mean().sqrt()
        for backend in (NativeBackend(), FlashBackend())
    ]
    assert errors[0] <= 1.02 * errors[1]


@on_each_unit
@pytest.mark.parametrize("window", [None, 100, 700])
def test_threads_change_no_bit(window: int | None) -> None:
    query, kv = packed_step([(2500, 1900), (90, 1), (33, 7)], heads=9, kv_heads=3, widths=(64, 64), dtype=BF16)
    scoring = PLAIN._replace(window=window)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            results.append(NativeBackend().attend_step(query, kv, scoring, with_lse=True))
    finally:
        torch.set_num_threads(threads)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert lse is not None
        assert torch.equal(lse, results[0][1])


@on_each_unit
def test_a_requests_result_does_not_depend_on_its_neighbours() -> None:
    lengths = [(300, 1), (700, 64), (90, 1)]
    query, kv = packed_step(lengths, heads=9, kv_heads=3, widths=(64, 64), dtype=BF16)
    together, _ = NativeBackend().attend_step(query, kv, PLAIN)
    for segment in kv.layout.segments:
        alone = type(kv.layout)([segment._replace(offset=0)], kv.layout.page_size, kv.layout.device)
        own = slice(segment.offset, segment.offset + segment.length)
        out, _ = NativeBackend().attend_step(query[:, own], kv._replace(layout=alone), PLAIN)
        assert torch.equal(out, together[own])


@on_each_unit
def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    query, kv = packed_step([(400, 20)], heads=3, kv_heads=1, widths=(64, 64), dtype=BF16)
    check_step(NativeBackend(), 40 * query, kv, PLAIN, 0.03)
    check_step(NativeBackend(), 0 * query, kv, PLAIN, 0.01)


@on_each_unit
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("first", "last"), [(-400, 400), (400, -400), (-30, 30)])
def test_scores_that_rise_or_fall_from_key_to_key(first: int, last: int, window: int | None) -> None:
    """Rising ones outgrow, block after block, the largest score that weights were made with; falling ones vanish."""
    query, kv = packed_step([(700, 300), (1000, 1)], heads=6, kv_heads=2, widths=(64, 64), dtype=BF16)
    query[:, :, 0] = 8
    for segment, length in zip(kv.layout.segments, (700, 1000), strict=True):
        kv.keys[:, segment.slots(), 0] = torch.linspace(first, last, length).to(BF16)
    check_step(NativeBackend(), query, kv, PLAIN._replace(window=window), 0.03)


@on_each_unit
@pytest.mark.parametrize("scoring", [PLAIN, PLAIN._replace(softcap=0.5)])
@pytest.mark.parametrize(("widths", "dtype", "limit"), [((16, 16), BF16, 0.02), ((64, 64), torch.float32, 3e-6)])
def test_what_it_does_not_compute_the_flash_kernel_does(
    scoring: Scoring, widths: tuple[int, int], dtype: torch.dtype, limit: float
) -> None:
    query, kv = packed_step([(50, 20), (60, 1)], widths=widths, dtype=dtype)
    check_step(NativeBackend(), query, kv, scoring, limit)


def test_no_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def actorpp_attend(self, step: object) -> int:
            return 1

    monkeypatch.setattr(native, "library", Full)
    query, kv = packed_step([(5, 5)], widths=(64, 64), dtype=BF16)
    with pytest.raises(MemoryError):
        NativeBackend().attend_step(query, kv, PLAIN)


def test_auto_takes_it_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", object)
    assert isinstance(choose_backend("auto", CPU), NativeBackend)
    assert isinstance(choose_backend("native", CPU), NativeBackend)
    assert type(choose_backend("flash", CPU)) is FlashBackend
    with pytest.raises(ConfigError, match="'native' needs an x86 CPU"):
        backend_names.check_backend("native", "cuda")
    monkeypatch.setattr(native, "library", lambda: None)
    assert type(choose_backend("auto", CPU)) is FlashBackend
    with pytest.raises(ConfigError, match="C compiler"):
        choose_backend("native", CPU)


def test_the_tables_of_a_step() -> None:
    """The tables name each segment's runs in order."""
    _, kv = packed_step([(40, 3), (20, 1)], page_size=16)
    assert isinstance(kv, LayerKV)
    segments, runs = kv.layout.tables
    assert segments.tolist() == [[0, 3, 0, 3], [3, 1, 3, 2]]
    assert runs.tolist() == [[0, 16], [32, 16], [64, 8], [16, 16], [48, 4]]
