"""The user's cache of converted checkpoints: complete folders only, made under a lock. No torch here.

A folder is made in a hidden sibling and renamed when everything is on the disk. The lock is the kernel's, released by
death; whoever takes it next clears what a killed process left.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

DEFAULT_NAME = "smollm2-135m-instruct-bf16"
"""Folder of the embedded default model."""

_making: set[Path] = set()


def cache_folder() -> Path:
    """Where converted checkpoints are kept: ``$ACTORPP_CACHE``, else ``actorpp`` in the user's cache folder."""
    if own := os.environ.get("ACTORPP_CACHE"):
        return Path(own).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "actorpp"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "actorpp"


def build(cache: Path, name: str, make: Callable[[Path, Path], None]) -> Path:
    """Return ``cache / name``, made first if it is not there; of several processes one makes it and the others wait.

    Args:
        make: Called with a folder for scratch files and the folder to fill. Whatever it raises leaves nothing behind.
    """
    final = cache / name
    if final.is_dir():
        return final
    cache.mkdir(parents=True, exist_ok=True)
    with _lock(cache / f".{name}.lock", blocking=True):
        if final.is_dir():
            return final
        _remove_partial(cache, name)
        partial = cache / f".{name}.partial"
        _making.add(partial)
        try:
            scratch, result = partial / "scratch", partial / "result"
            scratch.mkdir(parents=True)
            result.mkdir()
            make(scratch, result)
            for path in (*result.rglob("*"), result):
                _fsync(path)
            result.rename(final)
            _fsync(cache)
        finally:
            _remove_partial(cache, name)
            _making.discard(partial)
    return final


def abandon() -> None:
    """Remove what this process is making, from another thread than the one that makes it, just before it ends."""
    for partial in tuple(_making):
        shutil.rmtree(partial, ignore_errors=True)


def remove_leftovers(cache: Path) -> None:
    """Clear what killed processes left half-written; what a living one is making stays."""
    for partial in cache.glob(".*.partial"):
        name = partial.name.removeprefix(".").removesuffix(".partial")
        try:
            with _lock(cache / f".{name}.lock", blocking=False):
                _remove_partial(cache, name)
        except BlockingIOError:
            continue


def _remove_partial(cache: Path, name: str) -> None:
    shutil.rmtree(cache / f".{name}.partial", ignore_errors=True)


@contextmanager
def _lock(file: Path, *, blocking: bool) -> Iterator[None]:
    """Hold an exclusive lock on ``file``. Raises BlockingIOError if it is taken and ``blocking`` is false."""
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX if blocking else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
