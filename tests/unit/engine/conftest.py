"""A tiny random llama with a tokenizer, for engines whose stages run on the test's own loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exactness.tiny import save_llama
from tests.unit.serving.fakes import make_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_llama(tmp_path_factory.mktemp("engine"), tied=True, eos_token_id=2)
    make_tokenizer(folder)
    return folder
