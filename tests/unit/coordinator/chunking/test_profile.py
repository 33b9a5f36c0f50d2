"""A profile is found again only for the pipeline that it was measured on; a damaged file is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from actorpp.coordinator.chunking.profile import Profile, ProfileKey, any_partition, load_profile
from tests.unit.coordinator.chunking.support import model, sample

CONFIG = {"model_type": "llama", "hidden_size": 64, "rope_parameters": {"rope_theta": 1.0}}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORPP_CACHE", str(tmp_path / "cache"))


def key(**other: Any) -> ProfileKey:
    config = other.pop("config", CONFIG)
    fields = {"dtype": "bfloat16", "device_type": "cpu", "attention": "flash", "threads": 1, "partition": (15, 15)}
    return ProfileKey.of(config, **fields | other)


def profile(key: ProfileKey) -> Profile:
    return Profile(key, tuple(sample(model(), h, x) for h in (0, 1024) for x in (64, 256, 512, 1024)))


def test_a_saved_profile_comes_back() -> None:
    saved = profile(key())
    file = saved.save()
    assert load_profile(key()) == saved
    assert [fit.cost.time(512, 512) for fit in saved.fit()] == pytest.approx(model().times(512, 512), rel=1e-4)
    assert [path.name for path in file.parent.iterdir()] == ["15-15.json"]
    # The same model with its config in another order, as another writer would have it.
    assert load_profile(key(config=dict(reversed(CONFIG.items())))) == saved


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "float32"},
        {"device_type": "cuda"},
        {"attention": "sdpa"},
        {"threads": 2},
        {"partition": (14, 16)},
        {"partition": (10, 10, 10)},
        {"config": CONFIG | {"hidden_size": 128}},
    ],
)
def test_another_pipeline_has_none(other: dict[str, Any]) -> None:
    profile(key()).save()
    assert load_profile(key(**other)) is None


def test_of_any_partition() -> None:
    assert any_partition(key()) is None
    saved = profile(key(partition=(14, 16)))
    saved.save()
    assert any_partition(key()) == saved
    assert any_partition(key(threads=2)) is None


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b'{"key": 1, "samples": [], "fits": []}'])
def test_a_damaged_file_is_none(content: bytes) -> None:
    file = profile(key()).save()
    file.write_bytes(content)
    assert load_profile(key()) is None
    assert any_partition(key()) is None


def test_a_file_of_another_key_is_none() -> None:
    file = profile(key()).save()
    file.write_bytes(msgspec.json.encode(profile(key(threads=2))))
    assert load_profile(key()) is None


@pytest.mark.parametrize("wrong", [{"seconds": [0.1]}, {"seconds": [0.1, 0.0]}, {"tokens": 0}, {"history": -1}])
def test_a_file_with_a_sample_that_cannot_be_is_none(wrong: dict[str, Any]) -> None:
    """The costs are learned from samples as they stand: the start must not fail for one."""
    file = profile(key()).save()
    content = msgspec.json.decode(file.read_bytes())
    content["samples"][3] |= wrong
    file.write_bytes(msgspec.json.encode(content))
    assert load_profile(key()) is None
