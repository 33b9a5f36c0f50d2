"""For every test: nothing may be left behind; and the seconds of each suite are printed at the end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from actorpp.stages.checkpoint import resolve
from actorpp.testing import no_leaks

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors gain nothing from more; who needs them, asks for them
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so do its children

settings.register_profile("repeatable", derandomize=True, database=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaves a task, thread, socket or process. torch keeps its own pool of compute threads."""
    with no_leaks(ignore_threads=("pt_", "OMP")):
        yield


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Folder of the embedded default model, converted on first use."""
    return asyncio.run(resolve()).path


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                parts = Path(report.nodeid.split("::")[0]).parts
                seconds["/".join(parts[1:-1])] += report.duration
    terminalreporter.section("seconds per suite")
    for suite, total in sorted(seconds.items()):
        terminalreporter.write_line(f"{total:8.1f}  {suite}")
