"""A stage loads its own tensors and nothing else, and says so when the checkpoint is not what it should be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actorpp.errors import CheckpointError, UnsupportedModelError
from actorpp.stages.loader import PassThrough, load_stage_model
from actorpp.stages.partition import partition
from actorpp.stages.spec import StageSpec
from tests.exactness.tiny import save_llama

ROOT = Path(__file__).resolve().parents[3]


def _specs(path: Path, stages: int, layers: int = 5, **options: object) -> list[StageSpec]:
    return [
        StageSpec(stage=n, num_stages=stages, lo=lo, hi=hi, model_path=str(path), dtype="float32", **options)  # type: ignore[arg-type]
        for n, (lo, hi) in enumerate(partition(layers, stages))
    ]


def _own(names: dict[str, torch.Tensor], spec: StageSpec, *, tied: bool) -> set[str]:
    own = {n for n in names if n.startswith("model.layers.") and spec.lo <= int(n.split(".")[2]) < spec.hi}
    if spec.is_first or (spec.is_last and tied):
        own.add("model.embed_tokens.weight")
    if spec.is_last:
        own |= {"model.norm.weight"} | ({"lm_head.weight"} & set(names))
    return own


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_loaded_bytes_are_those_of_the_own_tensors(request: pytest.FixtureRequest, name: str, stages: int) -> None:
    path: Path = request.getfixturevalue(name)
    stored = load_file(path / "model.safetensors")
    for spec in _specs(path, stages):
        loaded = load_stage_model(spec)
        own = _own(stored, spec, tied=name == "tied")
        assert loaded.loaded_bytes == sum(stored[tensor].nbytes for tensor in own)
        held = {n: p for n, p in loaded.model.named_parameters() if n != "lm_head.weight" or name == "untied"}
        assert set(held) == own
        assert all(torch.equal(held[tensor], stored[tensor]) for tensor in own)
        assert loaded.layers == list(loaded.model.model.layers[spec.lo : spec.hi])
        absent = [layer for n, layer in enumerate(loaded.model.model.layers) if not spec.lo <= n < spec.hi]
        assert all(isinstance(layer, PassThrough) for layer in absent)


def test_tied_head_is_the_embedding_on_the_last_stage(tied: Path) -> None:
    model = load_stage_model(_specs(tied, 2)[1]).model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("tied_head", [True, False])
def test_dummy_weights_are_the_same_for_every_split(tmp_path: Path, tied_head: bool) -> None:
    save_llama(tmp_path, tied=tied_head)
    (tmp_path / "model.safetensors").unlink()
    whole = load_stage_model(_specs(tmp_path, 1, load_format="dummy")[0]).model.state_dict()
    assert float(whole["model.layers.0.mlp.up_proj.weight"].std()) == pytest.approx(0.2, rel=0.05)
    for spec in _specs(tmp_path, 3, load_format="dummy"):
        part = load_stage_model(spec).model.state_dict()
        assert part
        assert all(torch.equal(tensor, whole[name]) for name, tensor in part.items())
    other = load_stage_model(_specs(tmp_path, 1, load_format="dummy", seed=1)[0]).model.state_dict()
    assert not torch.equal(other["model.embed_tokens.weight"], whole["model.embed_tokens.weight"])


def _changed(source: Path, target: Path, change: dict[str, torch.Tensor | None]) -> Path:
    shutil.copytree(source, target)
    stored: dict[str, torch.Tensor | None] = {**load_file(target / "model.safetensors"), **change}
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_missing_tensor_is_an_error_on_the_stage_that_needs_it(untied: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    first, second = _specs(_changed(untied, tmp_path / "m", {name: None}), 2)
    with pytest.raises(CheckpointError, match=f"misses {name}"):
        load_stage_model(first)
    load_stage_model(second)


def test_tensor_of_another_shape_is_an_error(untied: Path, tmp_path: Path) -> None:
    change: dict[str, torch.Tensor | None] = {"model.layers.0.mlp.up_proj.weight": torch.zeros(3, 64)}
    with pytest.raises(CheckpointError, match=r"checkpoint m has the wrong shape for model\.layers\.0\.mlp\.up_proj"):
        load_stage_model(_specs(_changed(untied, tmp_path / "m", change), 2)[0])


def test_tensor_of_no_stage_is_an_error(untied: Path, tmp_path: Path) -> None:
    path = _changed(untied, tmp_path / "m", {"model.layers.9.mlp.up_proj.weight": torch.zeros(96, 64)})
    with pytest.raises(CheckpointError, match=r"of no part of the model: model\.layers\.9"):
        load_stage_model(_specs(path, 2)[0])


def test_cut_off_file_is_an_error(untied: Path, tmp_path: Path) -> None:
    path = tmp_path / "m"
    shutil.copytree(untied, path)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=str(path)):
        load_stage_model(_specs(path, 1)[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "the layers of GPT2LMHeadModel are not where"),
        ({"model_type": "bert", "architectures": ["BertModel"]}, "the layers of BertLMHeadModel are not where"),
        ({"model_type": "vit"}, "'vit' is not supported: transformers has no causal language model of it"),
        ({"model_type": "qwen3_next"}, "'qwen3_next' is not supported: its linear attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope type 'dynamic'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    untied: Path, tmp_path: Path, change: dict[str, object], words: str
) -> None:
    path = tmp_path / "m"
    shutil.copytree(untied, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UnsupportedModelError, match=words):
        load_stage_model(_specs(path, 1)[0])


_MEASURE = """
import sys
from pathlib import Path
from actorpp.stages.loader import load_stage_model
from actorpp.stages.spec import StageSpec
def resident():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024
load_stage_model(StageSpec(stage=0, num_stages=1, lo=0, hi=5, model_path=sys.argv[1], dtype="float32"))
before = resident()
loaded = load_stage_model(StageSpec(stage=1, num_stages=3, lo=2, hi=4, model_path=sys.argv[2], dtype="float32"))
touched = [float(weight.sum()) for weight in loaded.model.parameters()]
print(loaded.loaded_bytes, resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads resident memory from /proc")
def test_resident_memory_shows_no_whole_model(tied: Path, tmp_path: Path) -> None:
    """In a fresh process, warmed up on a tiny model: two of eight layers of a model of 100 MB."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "vocab_size": 4000}
    path = save_llama(tmp_path, layers=8, **sizes)
    whole = (path / "model.safetensors").stat().st_size
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _MEASURE, str(tied), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    loaded, grown = map(int, done.stdout.split())
    assert whole > 100e6
    assert loaded < whole / 4
    assert grown < whole / 2
