"""Tables on stdout, drawn by rich: as wide as the terminal, and plain text where there is none."""

from __future__ import annotations

import io
import shutil

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 120


def table(title: str, *columns: str) -> Table:
    """An empty one: the first column holds names, which keep to one line, the others numbers."""
    made = Table(title=title, box=SIMPLE_HEAD, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index else "left", overflow="fold", no_wrap=not index)
    return made


def text_of(made: Table) -> str:
    """The table as text."""
    stream = io.StringIO()
    width = shutil.get_terminal_size((PIPE_WIDTH, 24)).columns
    Console(file=stream, width=max(width, 60), color_system=None).print(made)
    return stream.getvalue()
