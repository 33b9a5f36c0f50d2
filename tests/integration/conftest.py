"""Environments and models for tests that start real processes."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli import ROOT


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """For commands: a short folder of their own for temporary files (it holds sockets), to see what is left behind."""
    temporary = tempfile.mkdtemp(prefix="t-")
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "ACTORPP_CACHE")}
    kept |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    yield kept | {"TMPDIR": temporary, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    shutil.rmtree(temporary)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration without weights, for ``--load-format dummy``: a llama of eight layers and 16K positions."""
    folder = tmp_path_factory.mktemp("small")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_tokens(path: Path, count: int) -> Path:
    """A file of token ids for the small model."""
    path.write_text(json.dumps([1 + (7 * i * i + 3 * i) % 511 for i in range(count)]))
    return path


@pytest.fixture(scope="session")
def long_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8000 ids."""
    return write_tokens(tmp_path_factory.mktemp("tokens") / "long.json", 8000)


@pytest.fixture(scope="session")
def some_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1100 ids: two chunks and a piece."""
    return write_tokens(tmp_path_factory.mktemp("tokens") / "some.json", 1100)
