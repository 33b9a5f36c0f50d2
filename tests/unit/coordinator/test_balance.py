"""``--layer-partition auto``: the largest stage is as small as any split has it."""

from __future__ import annotations

import random
from itertools import combinations
from typing import Any

import msgspec
import pytest

from actorpp.coordinator.balance import auto_partition, balance
from actorpp.coordinator.chunking.cost import CostModel
from actorpp.coordinator.chunking.operations import prior
from actorpp.coordinator.chunking.profile import Profile, ProfileKey
from actorpp.errors import ConfigError
from tests.unit.coordinator.chunking.support import sample
from tests.unit.coordinator.chunking.test_operations import SMOLLM2


@pytest.mark.parametrize("seed", range(30))
def test_no_other_split_has_a_smaller_largest_stage(seed: int) -> None:
    generator = random.Random(seed)
    layers = [generator.uniform(1, 5) for _ in range(generator.randrange(4, 10))]
    stages = generator.randrange(1, 5)
    first, last = generator.uniform(0, 8), generator.uniform(0, 8)

    def largest(counts: tuple[int, ...]) -> float:
        at, times = 0, []
        for count in counts:
            times.append(sum(layers[at : at + count]))
            at += count
        times[0] += first
        times[-1] += last
        return max(times)

    borders = combinations(range(1, len(layers)), stages - 1)
    every = [tuple(b - a for a, b in zip((0, *cut), (*cut, len(layers)), strict=True)) for cut in borders]
    found = balance(layers, stages, first=first, last=last)
    assert len(found) == stages
    assert sum(found) == len(layers)
    assert largest(found) == pytest.approx(min(map(largest, every)))


def test_a_head_takes_layers_from_the_last_stage() -> None:
    assert sorted(balance([1.0] * 30, 4)) == [7, 7, 8, 8]
    assert balance([1.0] * 30, 4, last=0.1)[-1] == 7
    assert balance([1.0] * 30, 4, last=2.0) == (8, 8, 8, 6)
    assert balance([1.0] * 30, 4, first=2.0) == (6, 8, 8, 8)


def test_the_default_model() -> None:
    partition = auto_partition(SMOLLM2, 4, context_length=8192, device_type="cpu")
    assert sorted(partition) == [7, 7, 8, 8]
    assert partition[-1] == 7  # it has the head
    with pytest.raises(ConfigError, match="31 stages"):
        auto_partition(SMOLLM2, 31, context_length=8192, device_type="cpu")


def test_layers_without_attention_over_the_whole_context_are_more_to_a_stage() -> None:
    mixed: dict[str, Any] = SMOLLM2 | {
        "sliding_window": 128, "layer_types": ["sliding_attention"] * 15 + ["full_attention"] * 15,
    }  # fmt: skip
    first, last = auto_partition(mixed, 2, context_length=131072, device_type="cpu")
    assert first > last


@pytest.mark.parametrize(
    ("vocabulary", "partition"),
    [
        (8, (1, 2)),  # looking up the embedding of each token is dearer than one row of few logits
        (128, (2, 1)),  # and cheaper than one of many
        (60_000, (2, 1)),
    ],
)
def test_embedding_and_head_are_counted(vocabulary: int, partition: tuple[int, int]) -> None:
    """Three narrow layers over two stages: which of them gets two is for the ends to say."""
    narrow = {
        "hidden_size": 4096, "intermediate_size": 1, "num_hidden_layers": 3,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 1, "vocab_size": vocabulary,
    }  # fmt: skip
    assert auto_partition(narrow, 2, context_length=8192) == partition


def test_a_saved_profile_says_what_the_head_costs() -> None:
    """Four times what its operations say, on a last stage that was slow when the profile was taken."""
    key = ProfileKey("m", "bfloat16", "cpu", "flash", 1, (10, 10, 10))
    counted = prior(SMOLLM2, [(0, 10), (10, 20), (20, 30)])
    first, second, last = (stage.scaled(1e-12) for stage in counted.stages)
    measured = CostModel((first, second, msgspec.structs.replace(last, head=4 * last.head).scaled(1.5)))
    sizes = [(h, x, s) for h in (0, 64, 512) for x in (64, 128, 256) for s in (False, True)] * 3
    profile = Profile(key, tuple(sample(measured, *size) for size in sizes))
    assert auto_partition(SMOLLM2, 3, context_length=256) == (10, 11, 9)
    assert auto_partition(SMOLLM2, 3, context_length=256, profile=profile) == (12, 12, 6)
