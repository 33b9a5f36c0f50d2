"""What a model name means, and what is read or refused without loading a weight."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from actorpp.errors import CheckpointError, ConfigError, ModelNotFoundError, UnsupportedModelError
from actorpp.stages import config as config_module
from actorpp.stages.checkpoint import Checkpoint, read_checkpoint, resolve
from actorpp.stages.config import choose_dtype


def _folder(path: Path, files: dict[str, object]) -> Path:
    path.mkdir()
    for name, content in files.items():
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return path


CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "vocab_size": 100,
    "hidden_size": 64,
    "max_position_embeddings": 8192,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


def test_local_folder_is_read_as_it_is(tied: Path) -> None:
    found = asyncio.run(resolve(str(tied)))
    assert isinstance(found, Checkpoint)
    assert (found.path, found.num_layers, found.model_type, found.dtype) == (tied, 5, "llama", "float32")
    assert (found.vocab_size, found.hidden_size, found.max_position_embeddings) == (320, 64, 1024)
    assert found.tokenizer is None


def test_generation_config_has_the_last_word_on_eos(tmp_path: Path) -> None:
    files: dict[str, object] = {"config.json": CONFIG, "model.safetensors": "", "tokenizer.json": {}}
    plain = read_checkpoint(_folder(tmp_path / "a", files))
    assert (plain.eos_token_ids, plain.tokenizer) == ((2,), tmp_path / "a" / "tokenizer.json")
    several = _folder(tmp_path / "b", files | {"generation_config.json": {"eos_token_id": [7, 9]}})
    assert read_checkpoint(several).eos_token_ids == (7, 9)
    older = {key: value for key, value in CONFIG.items() if key not in ("dtype", "eos_token_id")}
    third = _folder(tmp_path / "c", files | {"config.json": older | {"torch_dtype": "float16"}})
    assert (read_checkpoint(third).dtype, read_checkpoint(third).eos_token_ids) == ("float16", ())


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"model_type": "qwen3_next"},
            UnsupportedModelError,
            "'qwen3_next' is not supported: its linear",
        ),
        (
            {"model_type": "gemma3n_text"},
            UnsupportedModelError,
            "'gemma3n_text' is not supported: each layer",
        ),
        (
            {"model_type": "gemma3", "text_config": {}},
            UnsupportedModelError,
            "'gemma3' is not supported: it reads",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, UnsupportedModelError, r"quantised \(fp8\): it needs a GPU"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, UnsupportedModelError, "rope type 'dynamic'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": None}},
            UnsupportedModelError,
            "rope type 'dynamic'",
        ),
        ({"num_hidden_layers": None}, CheckpointError, "lacks or garbles"),
    ],
)
def test_what_cannot_run_is_refused_by_name(
    tmp_path: Path, change: dict[str, object], error: type[Exception], words: str
) -> None:
    folder = _folder(tmp_path / "m", {"config.json": CONFIG | change, "model.safetensors": ""})
    with pytest.raises(error, match=words):
        read_checkpoint(folder)


def test_quantised_checkpoint_is_not_refused_on_a_gpu(tmp_path: Path) -> None:
    quantised = CONFIG | {"quantization_config": {"quant_method": "fp8"}}
    folder = _folder(tmp_path / "m", {"config.json": quantised, "model.safetensors": ""})
    assert read_checkpoint(folder, device="cuda:0").num_layers == 30


def test_folder_without_weights_serves_dummies_only(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m", {"config.json": CONFIG})
    assert read_checkpoint(folder, load_format="dummy").num_layers == 30
    with pytest.raises(CheckpointError, match=r"no \.safetensors files"):
        read_checkpoint(folder)


def test_damaged_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        read_checkpoint(_folder(tmp_path / "empty", {}))
    with pytest.raises(CheckpointError, match=r"config\.json is unreadable"):
        read_checkpoint(_folder(tmp_path / "cut", {"config.json": "{"}))
    with pytest.raises(CheckpointError, match="does not hold a JSON object"):
        read_checkpoint(_folder(tmp_path / "list", {"config.json": "[]"}))


@pytest.mark.parametrize("name", ["./nowhere", "nowhere.gguf", "a/b/c", "", "no such model"])
def test_name_that_means_nothing_says_what_is_allowed(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"give a folder with config\.json, a \.gguf file, or a hub id"):
        asyncio.run(resolve(name))


def test_hub_id_offline_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, so that no test reaches the hub; the child reports, and this process raises."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="'org/name' is no local folder and not in the hub's cache") as caught:
        asyncio.run(resolve("org/name", cache=tmp_path))
    assert "\n" not in caught.value.message


def test_hub_model_in_the_hubs_cache_is_found_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = tmp_path / "hub" / "models--org--name"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    _folder(snapshot, {"config.json": CONFIG, "model.safetensors": ""})
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert asyncio.run(resolve("org/name", cache=tmp_path)).path == snapshot


def test_dtype_is_the_checkpoints_as_far_as_the_cpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for has, expected in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(config_module, "_cpu_has_bfloat16", lambda has=has: has)
        assert choose_dtype("auto", "bfloat16", "cpu") == expected
    assert choose_dtype("auto", "bfloat16", "cuda:0") == "bfloat16"
    assert choose_dtype("auto", "float16", "cpu") == "float32"
    assert choose_dtype("auto", "float8_e4m3fn", "cuda:0") == "float32"
    assert choose_dtype("bfloat16", "float32", "cpu") == "bfloat16"
    with pytest.raises(ConfigError, match="dtype 'int8' is unknown; allowed: auto, float32"):
        choose_dtype("int8", "float32", "cpu")


def test_the_drivers_modules_import_no_torch() -> None:
    names = "cache checkpoint config convert fetching messages partition spec"
    imports = "\n".join(f"import actorpp.stages.{name}" for name in names.split())
    check = "import sys; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", f"{imports}\n{check}"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
