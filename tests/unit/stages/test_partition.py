"""Which layers go to which stage."""

from __future__ import annotations

import pytest

from actorpp.errors import ConfigError
from actorpp.stages.partition import partition


def _counts(ranges: tuple[tuple[int, int], ...]) -> list[int]:
    return [hi - lo for lo, hi in ranges]


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [
        (61, 4, [15, 15, 15, 16]),
        (30, 4, [7, 7, 8, 8]),
        (30, 1, [30]),
        (5, 5, [1, 1, 1, 1, 1]),
        (7, 3, [2, 2, 3]),
        (32, 8, [4] * 8),
    ],
)
def test_even_split_gives_the_remainder_to_the_last_stages(layers: int, stages: int, counts: list[int]) -> None:
    assert _counts(partition(layers, stages)) == counts


@pytest.mark.parametrize("layers", range(1, 40))
def test_every_layer_belongs_to_exactly_one_stage(layers: int) -> None:
    for stages in range(1, layers + 1):
        ranges = partition(layers, stages)
        assert [layer for lo, hi in ranges for layer in range(lo, hi)] == list(range(layers))


def test_explicit_partition_is_taken_as_it_is() -> None:
    assert partition(30, 4, [8, 8, 7, 7]) == ((0, 8), (8, 16), (16, 23), (23, 30))


@pytest.mark.parametrize(
    ("layers", "stages", "explicit", "words"),
    [
        (4, 5, None, "5 stages are more than the model's 4 layers"),
        (4, 0, None, "at least 1, got 0"),
        (30, 4, [8, 8, 7, 8], "sums to 31, but the model has 30 layers"),
        (30, 4, [15, 15], "names 2 stages, but there are 4"),
        (30, 3, [15, 0, 15], "leaves a stage without layers"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    layers: int, stages: int, explicit: list[int] | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        partition(layers, stages, explicit)
    assert "\n" not in caught.value.message
