"""docs/support.md promises tests by name: each of them exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "support.md").read_text()


def functions_in(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_test_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
    assert len(named) > 40
    assert [f"{path}::{name}" for path, name in named if name not in functions_in(ROOT / path)] == []


def test_every_feature_names_its_test_and_says_where_it_is_proven() -> None:
    rows = [line.strip("|").split(" | ") for line in TEXT.splitlines() if re.match(r"\| (?!feature |figure )", line)]
    assert len(rows) > 40
    for feature, shown_by, cpu, cuda in rows:
        assert "tests/" in shown_by, feature
        assert cpu.strip() in ("yes", "refused", "—"), feature
        assert cuda.strip().startswith(("unproven", "not yet", "—")), feature


def test_every_test_of_the_reliability_page_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "reliability.md").read_text())
    assert len(named) > 35
    assert [f"{path}::{name}" for path, name in named if name not in functions_in(ROOT / path)] == []


def test_commands_named_exist() -> None:
    for module in re.findall(r"`python -m ([\w.]+)`", TEXT):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module


def test_every_limit_of_the_security_page_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and "`tests/" in line]
    assert len(rows) > 15
    for row in rows:
        for path in re.findall(r"`(tests/[\w/]+\.py)`", row):
            assert (ROOT / path).is_file(), row
