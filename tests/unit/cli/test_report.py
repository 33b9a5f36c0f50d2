"""``actorpp report``: files in, a page out."""

from __future__ import annotations

from pathlib import Path

import pytest

from actorpp.analysis.chrome import write_trace
from actorpp.cli.main import main
from tests.unit.analysis.support import hand_made


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["report", *arguments])
    return int(str(ended.value.code))


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    write_trace(hand_made(), tmp_path / "first.json")
    return "first.json"


def test_the_page_is_written_and_named(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(trace) == 0
    assert capsys.readouterr().out == "report.html\n"
    assert "<h2>first</h2>" in Path("report.html").read_text()
    assert run(trace, trace, "--output", "two.html") == 0
    assert Path("two.html").read_text().count("<h2>first</h2>") == 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "TRACE"),
        (["none.json"], 2, "none.json: No such file"),
        (["other.json"], 2, "other.json: not a trace"),
        (["first.json", "-o", "none/r.html"], 1, "--output none/r.html: No such file"),
    ],
)
def test_what_cannot_work_is_one_line(
    trace: str, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    Path("other.json").write_text("[]")
    assert run(*arguments) == code
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert words in err
