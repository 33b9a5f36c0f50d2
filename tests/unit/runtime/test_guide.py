"""The Python of docs/actors.md is one program: it runs, and type-checks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs" / "actors.md"


def program() -> str:
    """The guide's Python blocks at their own line numbers."""
    lines, inside = [], False
    for line in GUIDE.read_text().splitlines():
        fence = line.startswith("```")
        inside = line == "```python" if fence else inside
        lines.append(line if inside and not fence else "")
    return "\n".join(lines) + "\n"


def python(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MYPYPATH": str(ROOT)}
    command = [sys.executable, *arguments, path.name]
    return subprocess.run(command, cwd=path.parent, env=environment, capture_output=True, text=True, check=False)


def test_the_guide_runs(tmp_path: Path) -> None:
    assert len(re.findall("```python", GUIDE.read_text())) > 10
    path = tmp_path / "actors_guide.py"
    path.write_text(program())
    ran = python(path, "-W", "error")
    assert ran.returncode == 0, ran.stderr


def test_the_guide_type_checks(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("mypy")
    cache = request.config.cache
    assert cache is not None
    path = tmp_path / "actors_guide.py"
    path.write_text(program())
    ran = python(path, "-m", "mypy", "--strict", "--cache-dir", str(cache.mkdir("mypy")))
    assert ran.returncode == 0, ran.stdout
