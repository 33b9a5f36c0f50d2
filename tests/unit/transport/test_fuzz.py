"""A short run of every fuzzer, always the same one; ``python -m tests.fuzz`` is the long one."""

from __future__ import annotations

import pytest

from tests.fuzz.runs import RUNS


@pytest.mark.parametrize("name", RUNS)
def test_malformed_messages_do_no_harm(name: str) -> None:
    report = RUNS[name](20_261_129, 2_000)
    assert sum(report.counts.values()) >= 2_000
