"""Options that cannot work with a model are refused before any stage starts: by engine, ``LLM`` and command line."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actorpp import LLM
from actorpp.cli.main import main
from actorpp.config import EngineConfig, flag_of
from actorpp.coordinator.stage_group import StageGroup
from actorpp.engine import Engine
from actorpp.errors import ConfigError

REFUSED = [
    ({"chunk_policy": "best"}, "no chunk policy 'best': give one of planned, fixed, sglang"),
    ({"chunk_policy": "no_such_policies:Halving"}, "No module named 'no_such_policies'"),
    ({"chunk_policy": "builtins:Halving"}, "AttributeError"),
    ({"chunk_policy": "builtins:dict"}, "TypeError"),
    ({"layer_partition": "2,2"}, "layer partition 2,2 sums to 4, but the model has 5 layers"),
    ({"stages": 6}, "6 stages are more than the model's 5 layers"),
    ({"stages": 6, "layer_partition": "auto"}, "6 stages are more than the model's 5 layers"),
    ({"context_length": 2000}, "--context-length 2000 is more than the model's 1024 positions"),
    ({"max_num_batched_tokens": 8}, "--max-num-batched-tokens 8 is less than --max-running-requests 32"),
    ({"kv_tokens": 15}, "--kv-tokens 15 is less than one page: --page-size is 16"),
]


@pytest.fixture(autouse=True)
def _no_stage_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(group: StageGroup, stages: object = None) -> None:
        raise AssertionError("a stage was started")

    monkeypatch.setattr(StageGroup, "start", start)


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=str)
def test_an_engine_does_not_start(model: Path, options: dict[str, Any], words: str) -> None:
    async def start() -> None:
        async with Engine(EngineConfig(model=str(model), **({"stages": 2} | options))):
            pass

    with pytest.raises(ConfigError, match=words):
        asyncio.run(start())


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=str)
def test_a_command_ends_in_one_line_and_code_2(
    model: Path, options: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [part for name, value in ({"stages": 2} | options).items() for part in (flag_of(name), str(value))]
    with pytest.raises(SystemExit) as ended:
        main(["run", "--model", str(model), "--prompt", "hi", *flags])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("actorpp: ")
    assert words in err


def test_an_llm_is_not_made(model: Path) -> None:
    with pytest.raises(ConfigError, match="no chunk policy 'best'"):
        LLM(str(model), stages=2, chunk_policy="best", use_tqdm_on_load=False)


def test_no_model_is_fetched_for_a_policy_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch(*args: object, **options: object) -> None:
        raise AssertionError("a model was fetched")

    monkeypatch.setattr("actorpp.engine.resolve", fetch)
    with pytest.raises(ConfigError, match="no chunk policy 'best'"):
        asyncio.run(Engine(EngineConfig(chunk_policy="best")).locate())
