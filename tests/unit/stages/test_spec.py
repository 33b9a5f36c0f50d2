"""The value that describes a stage to its process."""

from __future__ import annotations

import pytest

from actorpp.errors import ConfigError
from actorpp.stages.spec import STAGE_SPEC_VARIABLE, StageSpec


def test_spec_survives_the_environment() -> None:
    spec = StageSpec(stage=1, num_stages=3, lo=4, hi=9, model_path="/models/ä", dtype="bfloat16", load_format="dummy")
    assert StageSpec.from_env(spec.to_env()) == spec
    assert (spec.is_first, spec.is_last) == (False, False)


def test_missing_or_garbled_spec_is_named() -> None:
    with pytest.raises(ConfigError, match="not set"):
        StageSpec.from_env({})
    with pytest.raises(ConfigError, match="does not decode"):
        StageSpec.from_env({STAGE_SPEC_VARIABLE: '{"stage": "two"}'})
