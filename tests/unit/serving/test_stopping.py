"""Stop strings against a search over the whole text, however it is cut; and over a real tokenizer's ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorpp.errors import InvalidRequestError
from actorpp.serving.completion import CompletionResult, Delta
from actorpp.serving.gateway import Gateway
from actorpp.serving.request import parse_request
from actorpp.serving.stopping import OutputText, StopSearch
from actorpp.serving.tokenizer import TextCodec
from tests.unit.serving.fakes import ANSWER, FakeEngine
from tests.unit.serving.test_gateway import check, collect

TEXT = "the cat and the hat, then Grüße 世界! 👩‍🚀 done"


def first_stop(text: str, strings: list[str], after: int = 0) -> tuple[int, int, str] | None:
    """End, start and string of the stop that ends first beyond ``after``, by trying every end."""
    for end in range(after + 1, len(text) + 1):
        hits = [(end - len(string), string) for string in strings if text[:end].endswith(string)]
        if hits:
            return (end, *min(hits))
    return None


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=5), max_size=8),
    strings=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
    free=st.integers(0, 3),
)
def test_the_first_stop_is_found_across_any_border_and_nothing_is_taken_back(
    pieces: list[str], strings: list[str], include: bool, free: int
) -> None:
    search = StopSearch(tuple(strings), include=include)
    shown = ""
    for index, piece in enumerate(pieces):
        shown += search.push(piece, may_stop=index >= free)
        text = "".join(pieces[: index + 1])
        stop = first_stop(text, strings, after=len("".join(pieces[:free])))
        assert (search.found is None) == (stop is None)
        if stop is not None:
            end, start, found = stop
            assert (search.found, shown) == (found, text[: end if include else start])
        elif include:
            assert shown == text
        else:  # held back is exactly the longest end that could become a stop string
            held = next(
                n for n in range(len(text) + 1) if any(s.startswith(text[n:]) and s != text[n:] for s in strings)
            )
            assert shown == text[:held] or free
            assert text.startswith(shown)
    if search.found is None:
        assert shown + search.finish() == "".join(pieces)
    else:
        assert search.finish() == search.push("ab") == ""


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["cat", "t an", "ü", "世界", "界! 👩‍🚀", "the hat, then Gr", "done", "t", "never"])
def test_a_stop_string_in_a_tokenizers_text(tokenizer_file: Path, stop: str, include: bool) -> None:
    """Whatever token completes it: the text is cut at the string, and no piece shows what a later one takes back."""
    codec = TextCodec(tokenizer_file)
    ids = codec.encode(TEXT, add_special_tokens=False)
    text = OutputText(codec, (stop, "not there"), include=include)
    shown, read = "", 0
    for token in ids:
        shown += text.push(token)
        read += 1
        if text.found:
            break
    shown += text.finish()
    if stop == "never":
        assert (shown, text.found) == (TEXT, None)
    else:
        at = TEXT.index(stop)
        assert (shown, text.found) == (TEXT[: at + len(stop) * include], stop)
        assert stop in codec.decode(ids[:read])
        assert stop not in codec.decode(ids[: read - 1])


def test_stop_strings_count_only_behind_min_tokens(tokenizer_file: Path) -> None:
    codec = TextCodec(tokenizer_file)
    ids = codec.encode("aXbXcXd", add_special_tokens=False)
    assert len(ids) == 7
    for free, expected in {0: "a", 1: "a", 2: "aXb", 3: "aXb", 4: "aXbXc", 5: "aXbXc", 6: "aXbXcXd"}.items():
        text = OutputText(codec, ("X",), min_tokens=free)
        assert "".join(text.push(token) for token in ids) + text.finish() == expected


def test_a_stop_tokens_text_is_left_out_unless_asked(tokenizer_file: Path) -> None:
    codec = TextCodec(tokenizer_file)
    ids = codec.encode("abX", add_special_tokens=False)
    for include, expected in ((False, "ab"), (True, "abX")):
        text = OutputText(codec, (), frozenset(ids[-1:]), include=include)
        assert "".join(text.push(token) for token in ids) + text.finish() == expected


def test_deltas_of_a_stopped_request_join_to_its_text_and_ids(tokenizer_file: Path) -> None:
    async def body(engine: FakeEngine, gateway: Gateway) -> None:
        codec = TextCodec(tokenizer_file)
        events = await collect(gateway, parse_request({"prompt": "x", "max_tokens": 100, "stop": "界!"}))
        deltas, result = [event for event in events if isinstance(event, Delta)], events[-1]
        assert isinstance(result, CompletionResult)
        assert result.text == "".join(delta.text for delta in deltas) == ANSWER[: ANSWER.index("界!")]
        assert result.token_ids == tuple(token for delta in deltas for token in delta.ids)
        assert "界!" in codec.decode(list(result.token_ids))
        assert "界!" not in codec.decode(list(result.token_ids[:-1]))
        assert (result.finish_reason, result.stop_reason) == ("stop", "界!")

    check(tokenizer_file, body)


def test_a_stop_string_in_what_was_undecided_until_the_end(tokenizer_file: Path) -> None:
    """The last character is cut in the middle, so that only the end shows what its bytes read as."""

    async def body(engine: FakeEngine, gateway: Gateway) -> None:
        events = await collect(gateway, parse_request({"prompt": "x", "max_tokens": 3, "stop": "r\ufffd"}))
        result = events[-1]
        assert isinstance(result, CompletionResult)
        assert (result.text, result.finish_reason, result.stop_reason) == ("G", "stop", "r\ufffd")

    check(tokenizer_file, body)


def test_without_a_tokenizer_stop_ids_work_and_stop_strings_are_refused() -> None:
    async def body(engine: FakeEngine, gateway: Gateway) -> None:
        result = (await collect(gateway, parse_request({"prompt_tokens": [5], "stop_token_ids": [8]})))[-1]
        assert isinstance(result, CompletionResult)
        assert (result.token_ids, result.finish_reason, result.stop_reason) == ((7, 8), "stop", 8)
        with pytest.raises(InvalidRequestError, match="no tokenizer: give stop_token_ids"):
            await collect(gateway, parse_request({"prompt_tokens": [5], "stop": "x"}))

    check(None, body)
