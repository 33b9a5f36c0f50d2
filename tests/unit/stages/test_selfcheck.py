"""Model types outside the exactness suite: what works is let through, what would answer wrongly is refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from actorpp.config import EngineConfig
from actorpp.engine import Engine
from actorpp.errors import CheckpointError, StageFailedError, UnsupportedModelError
from actorpp.serving.api import Finished, GenerationParams
from actorpp.stages import selfcheck
from actorpp.stages.selfcheck import check_model_type, shrink
from actorpp.stages.spec import StageSpec
from tests.exactness.faults import FAULTS
from tests.exactness.tiny import save_tiny


def _spec(folder: Path, model_type: str, **options: object) -> StageSpec:
    folder.mkdir(exist_ok=True)
    config = {
        "model_type": model_type,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 50000,
        "pad_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config | options))
    return StageSpec(stage=0, num_stages=1, lo=0, hi=32, model_path=str(folder))


def _verdicts(cache: Path) -> list[object]:
    return [json.loads(file.read_text())["reason"] for file in cache.glob("selfcheck-*/verdict.json")]


def test_type_of_the_suite_is_not_checked_again(tmp_path: Path) -> None:
    check_model_type(_spec(tmp_path / "m", "llama"), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("model_type", ["olmo", "cohere2", "granitemoe", "glm4"])
def test_unknown_type_that_agrees_is_let_through_and_remembered(tmp_path: Path, model_type: str) -> None:
    spec, cache = _spec(tmp_path / "m", model_type), tmp_path / "cache"
    check_model_type(spec, cache)
    assert _verdicts(cache) == [None]
    with patch.object(selfcheck, "find_fault", side_effect=AssertionError("checked twice")):
        check_model_type(spec, cache)
        with pytest.raises(AssertionError, match="checked twice"):  # other features are another question
            check_model_type(_spec(tmp_path / "m", model_type, num_key_value_heads=32), cache)


def test_unknown_type_that_differs_is_refused_with_the_reason_every_time(tmp_path: Path) -> None:
    """diffllama does more to keys and values than attention tells of."""
    spec, cache = _spec(tmp_path / "m", "diffllama"), tmp_path / "cache"
    words = r"'diffllama' is not supported: it is none of the tested ones, .* the logits differ by"
    with pytest.raises(UnsupportedModelError, match=words):
        check_model_type(spec, cache)
    with (
        patch.object(selfcheck, "find_fault", side_effect=AssertionError("checked twice")),
        pytest.raises(UnsupportedModelError, match=words),
    ):
        check_model_type(spec, cache)


@pytest.mark.parametrize(
    ("model_type", "fault"),
    [
        ("granitemoe", "second stage scaled again"),
        ("cohere2", "window one longer"),
        ("vaultgemma", "no soft-cap on scores"),
    ],
)
def test_planted_fault_is_found(tmp_path: Path, model_type: str, fault: str) -> None:
    spec = _spec(tmp_path / "m", model_type, embedding_multiplier=3.0, sliding_window=4096)
    with FAULTS[fault](), pytest.raises(UnsupportedModelError, match="the logits differ"):
        check_model_type(spec, tmp_path / "cache")


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("gpt2", "the stages say: the layers of GPT2LMHeadModel are not where"),
        ("no_such_type", r"transformers 5\.[0-9.]+ knows no model type 'no_such_type'"),
        ("qwen3_next", "'qwen3_next' is not supported: its linear attention"),
        ("falcon", "is raised"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(tmp_path: Path, model_type: str, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        check_model_type(_spec(tmp_path / "m", model_type), tmp_path / "cache")


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_few_layers_are_no_obstacle(tmp_path: Path, layers: int) -> None:
    spec = _spec(tmp_path / "m", "olmo", num_hidden_layers=layers)
    check_model_type(spec, tmp_path / "cache")


def test_logits_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    with (
        patch.object(selfcheck, "_split", lambda *args: [torch.full((45, 320), torch.nan), torch.zeros(20, 320)]),
        pytest.raises(UnsupportedModelError, match="the logits differ by nan"),
    ):
        check_model_type(_spec(tmp_path / "m", "olmo"), tmp_path / "cache")


def test_full_disk_gives_no_verdict(tmp_path: Path) -> None:
    with (
        patch.object(selfcheck, "_save", side_effect=OSError(28, "No space left on device")),
        pytest.raises(CheckpointError, match=r"'olmo' cannot be checked in .*No space left"),
    ):
        check_model_type(_spec(tmp_path / "m", "olmo"), tmp_path / "cache")
    check_model_type(_spec(tmp_path / "m", "olmo"), tmp_path / "cache")


def test_every_kind_of_layer_is_in_the_tiny_model() -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    tiny = shrink({"num_hidden_layers": 36, "layer_types": kinds * 6, "n_embd": 4096}, {"hidden_size": "n_embd"})
    assert (tiny["num_hidden_layers"], tiny["layer_types"], tiny["hidden_size"]) == (6, kinds, 64)


def test_an_engine_checks_before_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORPP_CACHE", str(tmp_path / "cache"))

    async def answer(model_type: str) -> Finished:
        path = save_tiny(tmp_path / model_type, model_type)
        config = EngineConfig(model=str(path), stages=2, dtype="float32", transport="inproc", kv_tokens=128)
        async with Engine(config) as engine:
            async for event in engine.submit(list(range(3, 40)), GenerationParams(max_tokens=4, ignore_eos=True)):
                if isinstance(event, Finished):
                    return event
        raise AssertionError("no final event")

    assert asyncio.run(answer("olmo")).reason == "length"
    assert _verdicts(tmp_path / "cache") == [None]
    with pytest.raises(StageFailedError, match=r"'diffllama' is not supported: .* the logits differ"):
        asyncio.run(answer("diffllama"))
