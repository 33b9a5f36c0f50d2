"""Tiny checkpoints for the tests of the compute side, made once per session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from actorpp.stages import native
from tests.exactness.tiny import save_llama


@pytest.fixture(params=[native.VECTORS, native.TILES], ids=["vectors", "tiles"])
def unit(request: pytest.FixtureRequest) -> Iterator[None]:
    """The library computes on this unit; a CPU with tiles computes on both."""
    library = native.library()
    if library is None:
        pytest.skip("no x86 CPU with AMX or AVX512-BF16, or no C compiler at installation")
    found = library.actorpp_start(request.param)
    try:
        if found != request.param:
            pytest.skip("no CPU with AMX tiles")
        assert native.unit() == request.param
        yield
    finally:
        library.actorpp_start(native.TILES)


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with tied embeddings and five layers."""
    return save_llama(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with a head of its own and five layers."""
    return save_llama(tmp_path_factory.mktemp("untied"), seed=1)
