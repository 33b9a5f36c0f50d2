"""Where a stage process begins: ``python -m actorpp.cli stage``, with its settings in the environment.

It sees to it that the process leaves with its parent, imports what the stage computes with, and hands over to
``actorpp.stages.process``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from actorpp.logs import configure_logging
from actorpp.stages.config import SUPPORTED_MODEL_TYPES, read_json
from actorpp.stages.imports import import_lightly
from actorpp.stages.spec import StageSpec
from actorpp.stages.wiring import WiringSpec
from actorpp.transport.process import leave_with_parent


def main() -> NoReturn:
    """Run the stage and end the process: exit code 0 after Shutdown, and 1 after an error."""
    leave_with_parent()
    spec = StageSpec.from_env(os.environ)
    wiring = WiringSpec.from_env(os.environ)
    configure_logging(wiring.log_level)
    config = read_json(Path(spec.model_path) / "config.json") or {}
    if config.get("model_type") in SUPPORTED_MODEL_TYPES:  # of another type we do not know what it needs
        import_lightly(spec.device)
    from actorpp.stages.process import run

    run(spec, wiring)
