"""``actorpp report``: traces in, one HTML page out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from actorpp.cli import options as o

Traces = Annotated[list[Path], typer.Argument(metavar="TRACE", help="Files of --trace.", show_default=False)]
OutputFile = Annotated[
    Path, typer.Option("--output", "-o", help="The page to write.", metavar="FILE", rich_help_panel=o.OUTPUT)
]


def report(traces: Traces, output: OutputFile = Path("report.html")) -> None:
    """Write a page about traces: time line, bubbles, chunks, predictions; it needs nothing but a browser.

    Several traces stand below each other, with the time to first token over all of them, by prompt length or by trace.
    """
    from actorpp.analysis.chrome import read_trace
    from actorpp.analysis.report import report as html_of
    from actorpp.cli.display import reserved_stdout
    from actorpp.errors import OutputError

    html = html_of([(trace.stem, read_trace(trace)) for trace in traces])
    try:
        output.write_text(html, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"--output {output}: {error.strerror}") from None
    with reserved_stdout() as stdout:
        stdout.write(f"{output}\n")
