"""A compiled library beside sources that it is not of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actorpp.errors import ConfigError
from actorpp.stages import native

OTHERS = {"without a number": {}, "of another number": {"actorpp_interface": lambda: native.INTERFACE - 1}}


@pytest.mark.parametrize("compiled", OTHERS.values(), ids=OTHERS.keys())
def test_a_stale_library_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, compiled: dict[str, Any]) -> None:
    monkeypatch.setattr(native, "find_spec", lambda name: SimpleNamespace(origin="folder/_native.so"))
    monkeypatch.setattr(native.ctypes, "CDLL", lambda path: SimpleNamespace(**compiled))
    with pytest.raises(
        ConfigError, match=r"folder/_native\.so is not of this version: install again \(pip install \.\)"
    ):
        native.library.__wrapped__()


def test_without_a_library_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find_spec", lambda name: None)
    assert native.library.__wrapped__() is None
