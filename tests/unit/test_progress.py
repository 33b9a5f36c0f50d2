"""Progress on stderr, on a terminal and elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from actorpp.progress import ProgressDisplay


def passes(display: ProgressDisplay) -> None:
    for done in range(4):
        display.show("measure", done, 3, "iterations")


def test_without_a_terminal_every_part_has_lines_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    display = ProgressDisplay()
    display.show("load", 2, 2, "stages")
    for number in range(2):
        display.part(f"cell {number + 1}/2", number, 2, "cells")
        passes(display)
    display.part("sweep", 2, 2, "cells")
    display.close()
    lines = [f"cell {number}/2: measuring: {done} of 3 iterations" for number in (1, 2) for done in range(4)]
    assert capsys.readouterr().err.splitlines() == ["loading: 2 of 2 stages", *lines]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_part_has_its_name_and_its_number_above_bars_that_begin_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    display = ProgressDisplay()
    display.part("cell 1/2: ISL 256", 0, 2, "cells")
    passes(display)
    display.part("cell 2/2: ISL 512", 1, 2, "cells")
    display.show("measure", 1, 3, "iterations")
    display.close()
    *_, overall, phase = (line for line in terminal.getvalue().splitlines() if " of " in line)
    assert "cell 2/2: ISL 512" in overall
    assert "1 of 2 cells" in overall
    assert "measuring" in phase
    assert "1 of 3 iterations" in phase
