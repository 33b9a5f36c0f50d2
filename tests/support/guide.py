"""A guide whose Python blocks are one program: run it, and type-check it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

MYPY = ("-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache"))
"""The project's own settings and cache: what ``mypy -p actorpp`` has checked is not checked again."""


def write_program(guide: str, folder: Path) -> Path:
    """The Python blocks of ``docs/{guide}.md``, at their own line numbers."""
    lines, inside = [], False
    for line in (ROOT / "docs" / f"{guide}.md").read_text().splitlines():
        fence = line.startswith("```")
        inside = line == "```python" if fence else inside
        lines.append(line if inside and not fence else "")
    path = folder / f"{guide}_guide.py"
    path.write_text("\n".join(lines) + "\n")
    return path


def check_runs(guide: str, folder: Path) -> None:
    """The program ends without an error or a warning."""
    ran = _python(write_program(guide, folder), "-W", "error")
    assert ran.returncode == 0, ran.stderr


def check_types(guide: str, folder: Path) -> None:
    """mypy has nothing to say about the program."""
    ran = _python(write_program(guide, folder), *MYPY)
    assert ran.returncode == 0, ran.stdout


def _python(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MYPYPATH": str(ROOT)}
    command = [sys.executable, *arguments, path.name]
    return subprocess.run(command, cwd=path.parent, env=environment, capture_output=True, text=True, check=False)
