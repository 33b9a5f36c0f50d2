"""Tiny checkpoints for the tests of the compute side, made once per session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exactness.tiny import save_llama


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with tied embeddings and five layers."""
    return save_llama(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with a head of its own and five layers."""
    return save_llama(tmp_path_factory.mktemp("untied"), seed=1)
