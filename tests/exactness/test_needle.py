"""The needle test, small: the whole context of 8000 tokens is ``python -m tests.exactness.needle``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exactness.needle import search

STAGES = (1, 2, 4)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_needle_is_found_with_every_number_of_stages(default_model: Path) -> None:
    options = {"transport": "inproc", "threads_per_stage": 1, "chunked_prefill_size": 200}
    searches = search(default_model, 700, [0.1, 0.7], STAGES, "float32", **options)
    for needle in searches:
        assert len(needle.prompt) == 700
        assert needle.found_by("transformers"), needle.answers
        for stages in STAGES:
            assert needle.found_by(f"{stages} stages"), needle.answers
