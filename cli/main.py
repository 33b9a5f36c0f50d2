"""The ``actorpp`` command: runs it and turns how it ended into one line and an exit code.

Exit codes: 0 done; 1 failed while running; 2 a bad option, model or request; 128 + N ended by signal N (130
for Ctrl-C). Everything heavier than this file is imported inside ``main``, so that Ctrl-C is quiet from the start.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

STAGE = "stage"
"""The command of a stage process, started by the engine or a launcher, which says the rest through the environment. It
is no command for people, and does without what reads their flags."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line ``argv`` (default: the process's own) and exit the process."""
    try:
        code = _run(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:  # before the event loop takes signals over, or after it
        code = 130
    sys.exit(code)


def _run(argv: list[str]) -> int:
    from actorpp.errors import (
        ActorppError,
        ConfigError,
        InvalidRequestError,
        ModelNotFoundError,
        UnsupportedModelError,
    )

    try:
        return _stage() if argv == [STAGE] else _command(argv)
    except (ConfigError, InvalidRequestError, ModelNotFoundError, UnsupportedModelError) as error:
        return _report(str(error), 2)
    except ActorppError as error:
        return _report(str(error), 1)


def _stage() -> NoReturn:
    from actorpp.stages.entry import main as run_stage

    run_stage()


def _command(argv: list[str]) -> int:
    import typer

    from actorpp.cli.app import app

    try:
        return int(app(argv, prog_name="actorpp", standalone_mode=False) or 0)
    except typer.TyperException as error:
        return _report(error.format_message(), 2)


def _report(message: str, code: int) -> int:
    print("actorpp: " + " ".join(message.split()), file=sys.stderr)
    return code
