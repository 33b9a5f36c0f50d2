"""Long lists of ids in a body are decoded in slices, and come out as everything else does."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from actorpp.errors import InvalidRequestError
from actorpp.serving.http.bodies import CompletionBody, DetokenizeBody, completion_requests
from actorpp.serving.http.decoding import SLICE_BYTES, decode

LONG = [7 * n % 50_000 for n in range(200_000)]  # several slices


@pytest.mark.parametrize(
    "prompt",
    [LONG, [LONG, [1, 2], LONG[:70_000]], [[token] for token in LONG[:1000]] + [LONG]],
    ids=["one", "few", "many"],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_long_lists_are_read_as_they_are(prompt: list[Any], indent: int | None) -> None:
    data = json.dumps({"user": "[0]", "prompt": prompt, "max_tokens": 3}, indent=indent).encode()
    assert len(data) > SLICE_BYTES
    requests = completion_requests(decode(data, CompletionBody))
    expected = prompt if isinstance(prompt[0], list) else [prompt]
    assert [list(request.prompt_tokens or ()) for request in requests] == expected
    assert {request.max_tokens for request in requests} == {3}


def test_texts_and_other_fields_of_a_long_body_are_left_alone() -> None:
    for prompt in ("x" * SLICE_BYTES, ["x" * SLICE_BYTES, "y"]):
        assert decode(json.dumps({"prompt": prompt}).encode(), CompletionBody).prompt == prompt
    assert decode(json.dumps({"prompt": [1], "other": LONG}).encode(), CompletionBody).prompt == [1]
    assert list(decode(json.dumps({"tokens": LONG}).encode(), DetokenizeBody).tokens) == LONG


@pytest.mark.parametrize("wrong", [-1, 2**31, 1.5, "1", None, [1], {"a": 1}])
@pytest.mark.parametrize("at", [0, 100_000, -1])
def test_what_is_no_id_is_refused_by_name(wrong: Any, at: int) -> None:
    ids: list[Any] = list(LONG)
    ids[at] = wrong
    for prompt in (ids, [[1], ids]):
        with pytest.raises(InvalidRequestError) as refusal:
            completion_requests(decode(json.dumps({"prompt": prompt}).encode(), CompletionBody))
        assert refusal.value.param == "prompt"


@pytest.mark.parametrize("broken", [b"[%s", b"[%s,]", b"[%s 1]", b"[%s,,1]"])
def test_a_broken_list_is_no_json(broken: bytes) -> None:
    listed = msgspec.json.encode(LONG)[1:-1]
    with pytest.raises(InvalidRequestError, match="JSON"):
        decode(b'{"prompt": ' + broken % listed + b"}", CompletionBody)
