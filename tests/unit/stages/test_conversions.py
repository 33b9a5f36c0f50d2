"""Checkpoints whose tensors are stored under other names and shapes than the model's: experts one by one, old names.

transformers' own converters do the work; a stage must let them, also in a process that has loaded nothing before.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from actorpp.errors import CheckpointError
from actorpp.stages.loader import load_stage_model
from actorpp.stages.partition import partition
from actorpp.stages.spec import StageSpec
from tests.exactness.families import FAMILIES
from tests.exactness.tiny import save_tiny

ROOT = Path(__file__).resolve().parents[3]
STORED = {
    "mixtral": "model.layers.0.mlp.experts.0.w1.weight",
    "qwen3_moe": "model.layers.0.mlp.experts.0.up_proj.weight",
    "deepseek_v3": "model.layers.4.mlp.experts.0.up_proj.weight",
    "gpt_oss": "model.layers.0.mlp.experts.gate_up_proj",
    "gpt_neox": "embed_out.weight",
}


def _specs(path: Path, stages: int, **options: object) -> list[StageSpec]:
    return [
        StageSpec(stage=n, num_stages=stages, lo=lo, hi=hi, model_path=str(path), dtype="float32", **options)  # type: ignore[arg-type]
        for n, (lo, hi) in enumerate(partition(5, stages))
    ]


def _save(folder: Path, name: str) -> Path:
    return save_tiny(folder, name, **FAMILIES[name].options)


def _digest(state: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("name", STORED)
def test_stages_of_a_sharded_checkpoint_have_the_models_tensors(tmp_path: Path, name: str) -> None:
    path = _save(tmp_path / "m", name)
    assert STORED[name] in {key.replace("block_sparse_moe", "mlp") for key in load_file(path / "model.safetensors")}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="300KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").is_file()
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    found: set[str] = set()
    for spec in _specs(tmp_path / "sharded", 3):
        part = load_stage_model(spec).model.state_dict()
        assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in part.items())
        assert not found & set(part)
        found |= set(part)
    assert found == set(model.state_dict())


def test_an_expert_that_is_missing_is_an_error_on_the_stage_that_needs_it(tmp_path: Path) -> None:
    path = _save(tmp_path, "qwen3_moe")
    stored = load_file(path / "model.safetensors")
    del stored["model.layers.0.mlp.experts.3.up_proj.weight"]
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    first, second = _specs(path, 2)
    with pytest.raises(CheckpointError, match="such as the experts of a layer, are missing"):
        load_stage_model(first)
    load_stage_model(second)


@pytest.mark.parametrize("name", STORED)
def test_dummy_weights_are_the_same_for_every_split(tmp_path: Path, name: str) -> None:
    path = _save(tmp_path, name)
    (path / "model.safetensors").unlink()
    whole = load_stage_model(_specs(path, 1, load_format="dummy")[0]).model.state_dict()
    for spec in _specs(path, 3, load_format="dummy"):
        part = load_stage_model(spec).model.state_dict()
        assert part
        assert all(torch.equal(tensor, whole[key]) for key, tensor in part.items())


_LOAD = """
import sys
from tests.unit.stages.test_conversions import _digest, _specs
from actorpp.stages.loader import load_stage_model
for path in sys.argv[1:]:
    for spec in reversed(_specs(path, 2)):
        print(_digest(load_stage_model(spec).model.state_dict()))
"""


def test_a_fresh_process_that_begins_with_the_last_stage_has_the_same_tensors(tmp_path: Path) -> None:
    """What transformers keeps on its classes, and what other tests have loaded, plays no part."""
    names = [*STORED, "gemma3_text"]
    paths = [_save(tmp_path / name, name) for name in names]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _LOAD, *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    expected = []
    for path in paths:
        whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        first, last = (set(load_stage_model(spec).model.state_dict()) for spec in _specs(path, 2))
        assert first | last == set(whole)
        expected += [_digest({key: whole[key] for key in keys}) for keys in (last, first)]
    assert done.stdout.split() == expected
