"""Fixtures shared by exactness tests: a prompt of real tokens, the default model, and what transformers says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.exactness.families import FAMILIES, Held, prepare
from tests.exactness.oracle import Answer, Case, ask
from tests.exactness.policy import DEFAULT_MODEL, TokenTally
from tests.exactness.prompts import ENDS, NEW_TOKENS
from tests.support.workers import shared_folder

DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.fixture(scope="session")
def prompt_3000() -> list[int]:
    """3000 ids of real text in the default model's tokenizer."""
    ids: list[int] = json.loads((DATA / "prompt_3000.json").read_text())["ids"]
    return ids


@pytest.fixture(scope="session")
def held(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Held]:
    """Every family of tiny models, with its prompts and the oracle's answers."""
    with shared_folder(tmp_path_factory, "families") as folder:
        return prepare(FAMILIES, folder)


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory, default_model: Path, prompt_3000: list[int]) -> dict[str, Answer]:
    """By dtype: transformers' logits at ``ENDS`` and after; bfloat16 follows the tokens that float32 picked."""
    path = str(default_model)
    with shared_folder(tmp_path_factory, "oracle") as folder:
        found = ask([Case("float32", path, "float32", prompt_3000, ENDS, NEW_TOKENS)], folder)
        forced = found["float32"].tokens
        return found | ask([Case("bfloat16", path, "bfloat16", prompt_3000, ENDS, NEW_TOKENS, forced)], folder)


@pytest.fixture(scope="module")
def tally() -> Iterator[TokenTally]:
    """Counts the module's sequences; too many ambiguous ones are an error at its end."""
    counted = TokenTally(DEFAULT_MODEL)
    yield counted
    counted.finish()
