"""Every field that a client controls has a type and limits, and an error names the field."""

from __future__ import annotations

from typing import Any

import pytest

from actorpp.errors import InvalidRequestError
from actorpp.serving.request import MAX_MESSAGES, CompletionRequest, parse_request

ONE = {"prompt": "x"}


def test_defaults_are_greedy_and_sixteen_tokens() -> None:
    params = parse_request(ONE).params()
    assert params.max_tokens == 16
    assert params.sampling.temperature == 0
    assert params.seed is None
    assert not params.ignore_eos


def test_every_field_reaches_the_engine() -> None:
    fields = {
        "max_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {7: 1.5, 3: -100.0}, "seed": 5,
        "min_tokens": 2, "stop_token_ids": [9], "logprobs": 5, "prompt_logprobs": 0, "priority": -3,
        "ignore_eos": True,
    }  # fmt: skip
    params = parse_request(ONE | fields).params(deadline_s=2.5)
    reached = {
        name: getattr(params.sampling if name != "seed" and hasattr(params.sampling, name) else params, name)
        for name in fields
    }
    assert reached == fields | {"logit_bias": ((3, -100.0), (7, 1.5)), "stop_token_ids": (9,)}
    assert params.deadline_s == 2.5
    of_the_gateway = {"n", "prompt", "prompt_tokens", "messages", "stop", "include_stop_str_in_output"}
    of_the_gateway |= {"tools", "chat_template_kwargs", "add_special_tokens"}
    assert set(fields) | of_the_gateway == set(CompletionRequest.__struct_fields__)


def test_keys_of_a_logit_bias_may_be_text() -> None:
    assert parse_request({**ONE, "logit_bias": {"5": 1}}).logit_bias == {5: 1.0}


def test_none_asks_for_the_default_but_for_max_tokens() -> None:
    nothing = dict.fromkeys(CompletionRequest.__struct_fields__)
    assert parse_request(nothing | ONE) == CompletionRequest(prompt="x", max_tokens=None)


def test_unknown_fields_are_ignored() -> None:
    assert parse_request({**ONE, "colour": "red"}).prompt == "x"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": [{"role": "user"}]}, "messages"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "x" * 16_000_001}, "prompt"),
        ({"prompt_tokens": [1, -1]}, "prompt_tokens"),
        ({"prompt_tokens": [2**31]}, "prompt_tokens"),
        ({"prompt_tokens": ["a"]}, "prompt_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}] * (MAX_MESSAGES + 1)}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 16_000_001}]}, "messages"),
        *[
            ({**ONE, name: value}, name)
            for name, values in {
                "max_tokens": (0, -1, 1.5, "7", 2**31),
                "temperature": (-0.1, float("nan"), float("inf"), "0"),
                "top_k": (-1, 2**31, 0.5),
                "top_p": (0, 1.01, float("nan")),
                "min_p": (-0.1, 1.01, float("nan")),
                "repetition_penalty": (0, -1, float("nan"), float("inf")),
                "presence_penalty": (-2.1, 2.1, float("nan")),
                "frequency_penalty": (-2.1, 2.1, "1"),
                "logit_bias": (5, {"x": 1}, {-1: 1}, {2**31: 1}, {5: 101}, {5: "1"}, dict.fromkeys(range(1025), 1)),
                "seed": (-1, 2**63, 1.5),
                "min_tokens": (-1, 17, 1.5),
                "stop": ("", [""], ["a"] * 17, "a" * 257, ["a" * 257], 5, [5]),
                "stop_token_ids": ([-1], 5, [2**31], [1] * 129),
                "include_stop_str_in_output": (1, "yes"),
                "logprobs": (-1, 21, True, "5"),
                "prompt_logprobs": (-1, 21, 1.5),
                "priority": (2**31, -(2**31) - 1, 0.5),
                "n": (0, 129, 2, "1"),
                "ignore_eos": (1, "yes"),
            }.items()
            for value in values
        ],
    ],
    ids=lambda value: repr(value)[:60],
)
def test_a_value_out_of_its_limits_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_request(fields)
    assert caught.value.param == param
    assert len(caught.value.message) < 200
