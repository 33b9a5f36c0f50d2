"""A stage process imports less of transformers than others do: every supported type computes the same bits there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.exactness.families import FAMILIES, ONE_OF_EACH_TYPE
from tests.exactness.light import answer
from tests.exactness.oracle import ROOT
from tests.exactness.policy import check_bit_equal
from tests.exactness.tiny import save_tiny

NEVER = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy", "scipy")
NEVER += ("sklearn", "accelerate", "PIL", "torchvision", "transformers.trainer")


def test_what_a_stage_never_imports_changes_no_bit(tmp_path: Path) -> None:
    paths = [
        save_tiny(tmp_path / str(number), FAMILIES[name].model_type, **FAMILIES[name].options)
        for number, name in enumerate(ONE_OF_EACH_TYPE)
    ]
    answers = tmp_path / "answers.safetensors"
    done = subprocess.run(
        [sys.executable, "-m", "tests.exactness.light", str(answers), *map(str, paths)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "ACTORPP_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert set(NEVER) & set(done.stdout.split()) == set()
    found = load_file(answers)
    for number, (name, path) in enumerate(zip(ONE_OF_EACH_TYPE, paths, strict=True)):
        ours = answer(path)
        assert ours.shape[0] > 2, name
        check_bit_equal(found[str(number)], ours)


@pytest.mark.long
def test_another_version_of_transformers_is_imported_as_it_comes(tmp_path: Path) -> None:
    """One that lacks what is changed, and one that needs what is left out."""
    for spoil in (
        "imports.UNUSED = (*imports.UNUSED, 'is_no_check_at_all')",
        "imports._import_base = chain(imports._import_base, 'from torch._dynamo import optimize')",
    ):
        program = f"""
import sys
from actorpp.stages import imports

def chain(function, line):
    return lambda: (function(), exec(line))

{spoil}
imports.import_lightly("cpu")
from transformers.utils.import_utils import is_torch_distributed_available, is_scipy_available
from transformers import AutoModelForCausalLM
print(is_torch_distributed_available() and is_scipy_available(), "torch.distributed.tensor" in sys.modules)
"""
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONPATH": str(ROOT), "ACTORPP_CACHE": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "True True"
        assert "a start takes longer" in done.stdout
