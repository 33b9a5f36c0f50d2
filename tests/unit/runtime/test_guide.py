"""The Python of docs/actors.md is one program: it runs, and type-checks."""

from __future__ import annotations

from pathlib import Path

from tests.support.guide import check_runs, check_types, write_program


def test_the_guide_runs(tmp_path: Path) -> None:
    assert write_program("actors", tmp_path).read_text().count("\nclass ") > 10
    check_runs("actors", tmp_path)


def test_the_guide_type_checks(tmp_path: Path) -> None:
    check_types("actors", tmp_path)
