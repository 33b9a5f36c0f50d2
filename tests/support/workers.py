"""Several test workers on one machine (``pytest -n 2``): their threads, and what one of them makes for all.

Without workers it is the same code with one worker.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ

THREADS = 1 if IS_WORKER else 2
"""Compute threads of what takes long: CI has two cores."""


@contextmanager
def shared_folder(factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """A temporary folder that all workers of a run share, held alone: the first fills it, the others find it full."""
    base = factory.getbasetemp()
    if IS_WORKER:
        base = base.parent
    folder = base / name
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder.mkdir(exist_ok=True)
        yield folder
