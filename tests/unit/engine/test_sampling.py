"""Sampling parameters from the gateway to the last stage of a real engine, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from actorpp.errors import InvalidRequestError
from actorpp.serving.gateway import Gateway
from tests.unit.engine.support import complete, served


def test_every_sampling_parameter_reaches_the_last_stage(model: Path) -> None:
    variants = [
        {},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 0.9, "seed": 3, "top_k": 3},
        {"repetition_penalty": 1.7},
        {"presence_penalty": -2.0},
        {"frequency_penalty": -2.0},
        {"logit_bias": {"7": 100.0}},
    ]

    async def body(gateway: Gateway) -> None:
        answers = [await complete(gateway, max_tokens=24, ignore_eos=True, **variant) for variant in variants]
        assert len({answer.token_ids for answer in answers}) == len(variants)
        assert set(answers[-1].token_ids) == {7}

    served(model, body)


def test_a_bias_outside_the_vocabulary_is_refused(model: Path) -> None:
    async def body(gateway: Gateway) -> None:
        with pytest.raises(InvalidRequestError, match="logit_bias: token ids must lie in 0-319") as caught:
            await complete(gateway, logit_bias={320: 1.0})
        assert caught.value.param == "logit_bias"

    served(model, body)
