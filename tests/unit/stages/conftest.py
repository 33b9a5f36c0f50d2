"""Tiny checkpoints for the tests of the compute side, made once per session, and what the library computes on."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actorpp.stages import native
from tests.exactness.tiny import save_llama


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The library with tiles that vectors stand for."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("emulated") / "library.so"
    sources = Path(native.__file__).parent.glob("native_*.c")
    flags = ["-O1", "-fPIC", "-shared", "-pthread", "-include", Path(__file__).parent / "emulated_tiles.h"]
    subprocess.run([compiler, *flags, *sources, "-lm", "-o", path], check=True)
    library = native.opened(str(path))
    ctypes.c_int.in_dll(library, "actorpp_unit").value = native.TILES
    return library


@pytest.fixture(params=[native.VECTORS, native.TILES], ids=["vectors", "tiles"])
def unit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library computes on this unit; tiles are emulated on CPUs that have none."""
    best = native.unit()
    if best == native.NOTHING:
        pytest.skip("no x86 CPU with AMX or AVX512-BF16, or no C compiler at installation")
    if request.param > best:
        library = request.getfixturevalue("emulated")
        monkeypatch.setattr(native, "library", lambda: library)
    else:
        native.library().actorpp_start(request.param)
    yield
    monkeypatch.undo()
    native.library().actorpp_start(best)


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with tied embeddings and five layers."""
    return save_llama(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with a head of its own and five layers."""
    return save_llama(tmp_path_factory.mktemp("untied"), seed=1)
