"""Fixtures of the serving tests: one tiny tokenizer for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from actorpp.transport.sockets import close_context
from tests.unit.serving.fakes import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def _end_of_zeromq() -> Iterator[None]:
    """The process's ZeroMQ context outlives a server; a test leaves none."""
    yield
    close_context()
