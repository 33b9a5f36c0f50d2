"""Starts the child process that downloads or converts a checkpoint, follows its progress and ends it. No torch here.

The child (``python -m actorpp.stages.convert``) prints one JSON object a line: ``{"phase", "done", "total"}`` as it
goes on, and last ``{"path"}`` or ``{"error", "code"}``. It holds the reading end of a pipe, so that it leaves when
this process dies, and it has a session of its own, so that a terminal's Ctrl-C reaches this process only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from actorpp.errors import ActorppError, CheckpointError, ModelNotFoundError, UnsupportedModelError
from actorpp.stages.cache import cache_folder, remove_leftovers

Progress = Callable[[str, int, int], None]
CHILD_COMMAND = (sys.executable, "-m", "actorpp.stages.convert")
STOP_GRACE = 3.0

_ERRORS: dict[str, type[ActorppError]] = {
    error.code: error for error in (CheckpointError, ModelNotFoundError, UnsupportedModelError)
}


async def fetch_checkpoint(
    arguments: Sequence[str],
    *,
    cache: Path | None = None,
    progress: Progress | None = None,
    command: Sequence[str] = CHILD_COMMAND,
) -> Path:
    """Run the child with ``arguments`` and return the folder that it made or found.

    Args:
        arguments: What to fetch, as ``actorpp.stages.convert.main`` takes it.
        command: How to start the child.

    Raises:
        ActorppError: What the child reported, of the class it named; CheckpointError if it died without a word.
    """
    folder = cache or cache_folder()
    child = await asyncio.create_subprocess_exec(
        *command,
        "--parent-pipe",
        "--cache",
        str(folder),
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=2**20,
        env=os.environ | {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        start_new_session=True,
    )
    try:
        if child.stdout is None:
            raise RuntimeError("the child has no output pipe")
        result: dict[str, Any] = {}
        noise: deque[str] = deque(maxlen=1)
        async for line in child.stdout:
            report = _report(line)
            if report is None:
                noise.append(line.decode(errors="replace").strip())
            elif "phase" in report:
                if progress is not None:
                    progress(report["phase"], report["done"], report["total"])
            else:
                result = report
        code = await child.wait()
    finally:
        await _end(child, folder)
    if "path" in result:
        return Path(result["path"])
    if "error" in result:
        raise _ERRORS.get(result.get("code", ""), CheckpointError)(result["error"], param="model")
    raise CheckpointError(f"fetching the model failed with status {code}: {' '.join(noise) or 'no message'}")


def _report(line: bytes) -> dict[str, Any] | None:
    """The JSON object on ``line``, or None for anything else that was printed."""
    if not line.startswith(b"{"):
        return None
    try:
        report: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return report


async def _end(child: asyncio.subprocess.Process, cache: Path) -> None:
    """Stop the child and what it started: by its pipe and SIGTERM first, that it may tidy up, then by force."""
    if child.stdin is not None:
        child.stdin.close()
    if child.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    try:
        await asyncio.wait_for(child.wait(), STOP_GRACE)
    except TimeoutError:
        pass
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    await child.wait()
    remove_leftovers(cache)
