"""Where options come from, what is derived, and what is refused in which words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from actorpp.config import ALIASES, EngineConfig, read_config_file
from actorpp.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("ACTORPP_"):
            monkeypatch.delenv(name)


def test_command_line_over_environment_over_file_over_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"stages": 2, "lookahead": 2, "page_size": 2}')
    monkeypatch.setenv("ACTORPP_STAGES", "3")
    monkeypatch.setenv("ACTORPP_LOOKAHEAD", "3")
    config = EngineConfig.load(file, stages=4, page_size=None)
    assert (config.stages, config.lookahead, config.page_size, config.async_depth) == (4, 3, 2, 1)
    assert EngineConfig.load().page_size == 16  # a file is for one call only


def test_environment_takes_lists_and_ignores_what_is_not_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORPP_LAYER_PARTITION", "1,2,3")
    monkeypatch.setenv("ACTORPP_CACHE", "/elsewhere")
    monkeypatch.setenv("ACTORPP_MODEL", "")
    config = EngineConfig()
    assert (config.layer_partition, config.stages, config.model) == ((1, 2, 3), 3, None)


FILES = {
    "c.yaml": "pp-size: 3\nlayer-partition: [1, 2, 3]\nmodel: a/b\n",
    "c.yml": "pipeline_parallel_size: 3\nlayer_partition: 1,2,3\nmodel_path: a/b\n",
    "c.json": '{"stages": 3, "layer_partition": [1, 2, 3], "model": "a/b"}',
    "c.toml": 'stages = 3\nlayer_partition = [1, 2, 3]\nmodel-path = "a/b"\n',
}


@pytest.mark.parametrize("name", FILES)
def test_files_in_each_format_and_spelling(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(FILES[name])
    config = EngineConfig.load(tmp_path / name)
    assert (config.stages, config.layer_partition, config.model) == (3, (1, 2, 3), "a/b")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("")
    assert EngineConfig.load(tmp_path / "c.yaml") == EngineConfig()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("c.yaml", "stagez: 2\n", "unknown option 'stagez'"),
        ("c.yaml", "stages: 2\npp-size: 3\n", "'pp-size' says again"),
        ("c.yaml", "- 1\n", "expected a mapping"),
        ("c.yaml", "a: [1\n", "c.yaml"),
        ("c.json", "{", "c.json"),
        ("c.toml", "=", "c.toml"),
        ("c.ini", "", r"must end in \.yaml, \.json or \.toml"),
        ("c.yaml", "stages: many\n", r"--stages.*integer.*'many'"),
        ("c.yaml", "prompt: x\n", "unknown option 'prompt'"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        EngineConfig.load(tmp_path / name)
    assert "\n" not in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        read_config_file(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"stages": 0}, "stages", "--stages.*greater than or equal to 1, got 0"),
        ({"stages": "many"}, "stages", "--stages.*integer.*'many'"),
        ({"layer_partition": "8,0"}, "layer_partition", "--layer-partition"),
        ({"layer_partition": "8,8", "stages": 3}, None, "names 2 stages, but --stages is 3"),
        ({"chunked_prefill_size": 0}, "chunked_prefill_size", "at least 1, or -1"),
        ({"chunked_prefill_size": -2}, "chunked_prefill_size", "got -2"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens", "greater than or equal to 1"),
        ({"async_depth": -1}, "async_depth", "greater than or equal to 0"),
        ({"lookahead": 0}, "lookahead", "greater than or equal to 1"),
        ({"mem_fraction_static": 1.5}, "mem_fraction_static", "less than or equal to 1"),
        ({"mem_fraction_static": float("nan")}, "mem_fraction_static", "--mem-fraction-static"),
        ({"port": 70_000}, "port", "65535"),
        ({"device": "tpu"}, "device", "--device.*tpu"),
        ({"dtype": "float8"}, "dtype", "'float32', 'bfloat16' or 'float16'"),
        ({"startup_timeout": float("inf")}, "startup_timeout", "finite"),
        ({"transport": "inproc", "tensor_transport": "gloo"}, None, "--transport process"),
        ({"transport": "process", "tensor_transport": "inproc"}, None, "--transport inproc"),
        ({"device": "cpu", "tensor_transport": "nccl"}, None, "--device cuda"),
        ({"seed": -1}, "seed", "--seed"),
        ({"max_num_batched_tokens": 31}, None, "--max-num-batched-tokens 31 is less than --max-running-requests 32"),
        ({"kv_tokens": 31, "page_size": 32}, None, "--kv-tokens 31 is less than one page: --page-size is 32"),
        ({"chunk_policy": "fixed", "enable_dynamic_chunking": True}, None, "means --chunk-policy sglang, not fixed"),
        ({"dynamic_chunking_smooth_factor": 0.7}, None, "--chunk-policy sglang, but the policy is planned"),
        ({"chunk_policy": "sglang", "dynamic_chunking_smooth_factor": 1.1}, "dynamic_chunking_smooth_factor", "1"),
        ({"stagez": 1}, "stagez", "--stagez"),
    ],
)
def test_what_cannot_work_is_one_line_with_its_option(options: dict[str, Any], param: str | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        EngineConfig(**options)
    assert caught.value.param == param
    assert "\n" not in caught.value.message


def test_an_error_names_the_environment_where_the_value_came_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORPP_STAGES", "many")
    with pytest.raises(ConfigError, match=r"^ACTORPP_STAGES: .*'many'"):
        EngineConfig()


def test_several_errors_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"--stages.*; --port"):
        EngineConfig(stages=0, port=-1)


def test_derived_values() -> None:
    config = EngineConfig(stages=3, async_depth=2, lookahead=4)
    assert (config.num_slots, config.window) == (5, 9)
    limits = config.scheduling_limits(1024)
    assert (limits.chunk_policy, limits.chunked_prefill_size) == ("planned", 1024)
    assert EngineConfig(device="cuda").scheduling_limits(100_000).chunked_prefill_size == 8192
    limits = EngineConfig(chunk_policy="fixed").scheduling_limits(8192)
    assert limits.chunked_prefill_size == 512
    assert limits.max_num_batched_tokens == limits.max_prefill_tokens == 512 + 32
    whole = EngineConfig(chunked_prefill_size=-1).scheduling_limits(8192)
    assert whole.chunked_prefill_size == 8192
    assert whole.max_prefill_tokens >= 8192
    given = EngineConfig(max_num_batched_tokens=100, max_prefill_tokens=50).scheduling_limits(8192)
    assert (given.max_num_batched_tokens, given.max_prefill_tokens) == (100, 50)
    assert EngineConfig(threads_per_stage=3).threads() == 3
    assert EngineConfig(stages=1000).threads() == 1
    assert EngineConfig().memory_fraction("cpu") < EngineConfig().memory_fraction("cuda")
    assert EngineConfig(mem_fraction_static=0.3).memory_fraction("cuda") == 0.3


@pytest.mark.parametrize(
    ("options", "policy", "size"),
    [
        ({"device": "cpu"}, "planned", 2048),
        ({"chunked_prefill_size": 256}, "fixed", 256),
        ({"chunked_prefill_size": 256, "chunk_policy": "planned"}, "planned", 256),
        ({"enable_dynamic_chunking": True}, "sglang", 2048),
        ({"enable_dynamic_chunking": True, "chunked_prefill_size": 4096}, "sglang", 4096),
        ({"enable_dynamic_chunking": True, "chunk_policy": "sglang"}, "sglang", 2048),
        ({"chunk_policy": "my.module:Policy"}, "my.module:Policy", 512),
    ],
)
def test_what_the_chunking_options_mean_together(options: dict[str, Any], policy: str, size: int) -> None:
    limits = EngineConfig(**options).scheduling_limits(100_000)
    assert (limits.chunk_policy, limits.chunked_prefill_size) == (policy, size)


def test_the_partition_may_be_left_to_the_engine() -> None:
    assert EngineConfig(layer_partition="auto", stages=3).layer_partition == "auto"
    with pytest.raises(ConfigError, match=r"--layer-partition.*'auto'"):
        EngineConfig(layer_partition="best")


def test_aliases_do_not_collide() -> None:
    names = [name for aliases in ALIASES.values() for name in aliases]
    assert len(names) == len(set(names))
    assert set(ALIASES) <= set(EngineConfig.model_fields)
    assert not set(names) & set(EngineConfig.model_fields)


def test_a_config_does_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        EngineConfig().stages = 2  # type: ignore[misc]


def test_the_api_key_is_neither_printed_nor_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORPP_API_KEY", "secret")
    config = EngineConfig()
    assert config.api_key == config.model_copy(update={"stages": 2}).api_key == "secret"
    assert "secret" not in f"{config!r}{config}{config.model_dump(mode='json')}"
