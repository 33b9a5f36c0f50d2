"""The Python of docs/python.md is one program: it runs on the default model, and type-checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.guide import check_runs, check_types


@pytest.mark.slow
def test_the_guide_runs(tmp_path: Path, default_model: Path) -> None:
    check_runs("python", tmp_path)


def test_the_guide_type_checks(tmp_path: Path) -> None:
    check_types("python", tmp_path)
