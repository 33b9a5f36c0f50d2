"""Text to ids, chat to ids and ids to text equal transformers' own, which stands as the oracle in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorpp.errors import CheckpointError, InvalidRequestError, RequestError
from actorpp.serving.tokenizer import IncrementalDecoder, TextCodec
from tests.unit.serving.fakes import make_tokenizer

TEXTS = ["the cat", "", " leading", "Grüße, 世界! 👩‍🚀\n\n\ttabs", "a<|im_start|>b</s>", "x" * 3000]
MESSAGES = [{"role": "system", "content": "Be <b>brief</b>."}, {"role": "user", "content": "世界? </s>"}]


def oracle(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_eos_token": True},
        {"split_special_tokens": True},
    ],
)
def test_text_equals_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    codec = TextCodec(make_tokenizer(tmp_path, **config))
    theirs = oracle(tmp_path)
    for text in TEXTS:
        assert codec.encode(text) == theirs(text)["input_ids"]
        assert codec.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]


def test_a_truncation_left_in_the_file_is_not_applied(tmp_path: Path) -> None:
    file = make_tokenizer(tmp_path)
    codec = TextCodec(file)
    codec.tokenizer.enable_truncation(4)
    codec.tokenizer.enable_padding(length=4)
    codec.tokenizer.save(str(file))
    assert TextCodec(file).encode("the cat " * 50) == oracle(tmp_path)("the cat " * 50)["input_ids"]


TEMPLATES = {
    "plain": {},
    "tojson, strftime_now, loop controls": {
        "chat_template": "{{ strftime_now('%Y') }}{% for m in messages %}{% if m.role == 'system' %}{% continue %}"
        "{% endif %}{{ m | tojson }}{% endfor %}{{ eos_token }}"
    },
    "named": {
        "chat_template": [{"name": "other", "template": "x"}, {"name": "default", "template": "{{ bos_token }}y"}]
    },
    "generation block": {
        "chat_template": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}"
    },
    "namespace and dict": {
        "chat_template": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n }}{{ dict(a=1) | tojson(indent=2) }}"
    },
}


@pytest.mark.parametrize("config", TEMPLATES.values(), ids=TEMPLATES)
def test_chat_equals_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    codec = TextCodec(make_tokenizer(tmp_path, **config))
    theirs = oracle(tmp_path).apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    assert codec.encode(codec.render_chat(MESSAGES), add_special_tokens=False) == theirs


def test_a_template_file_goes_before_the_config(tmp_path: Path) -> None:
    file = make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert TextCodec(file).render_chat(MESSAGES) == "Be <b>brief</b>.!"


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{% for %}", "refuses"),
        ("{{ 1 // 0 }}", "division"),
    ],
)
def test_a_template_that_refuses_is_a_bad_request(tmp_path: Path, template: str, word: str) -> None:
    codec = TextCodec(make_tokenizer(tmp_path, chat_template=template))
    with pytest.raises(InvalidRequestError, match=word):
        codec.render_chat(MESSAGES)


def test_what_a_client_tells_the_template_replaces_nothing_else(tmp_path: Path) -> None:
    codec = TextCodec(make_tokenizer(tmp_path, chat_template="{{ messages | length }}{{ tools }}{{ own }}"))
    variables = {"messages": [], "tools": [], "bos_token": 1, "own": "!"}
    assert codec.render_chat(MESSAGES, variables=variables).startswith(f"{len(MESSAGES)}None")
    assert codec.render_chat(MESSAGES, variables=variables).endswith("!")


def test_a_text_that_is_no_unicode_is_a_bad_request(tmp_path: Path) -> None:
    codec = TextCodec(make_tokenizer(tmp_path))
    with pytest.raises(InvalidRequestError, match="no valid Unicode"):
        codec.encode("a \udcff")


def test_without_a_template_chat_is_refused(tmp_path: Path) -> None:
    codec = TextCodec(make_tokenizer(tmp_path, chat_template=None))
    with pytest.raises(InvalidRequestError, match="no chat template"):
        codec.render_chat(MESSAGES)


def test_broken_files_are_named(tmp_path: Path) -> None:
    file = make_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        TextCodec(file)
    file.write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        TextCodec(file)


def test_characters_over_several_tokens_come_out_whole(codec: TextCodec) -> None:
    text = "Grüße, 世界! 👩‍🚀 done"
    ids = codec.encode(text, add_special_tokens=False)
    decoder = IncrementalDecoder(codec)
    pieces = [decoder.push((token,)) for token in ids]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(ids) > len(text)  # each piece was tested on parts of characters
    assert decoder.finish() == ""


@given(st.lists(st.lists(st.integers(0, 319), max_size=5), max_size=30))
@settings(max_examples=200, deadline=None)
def test_pieces_of_any_ids_join_to_the_whole(codec: TextCodec, groups: list[list[int]]) -> None:
    vocabulary = codec.tokenizer.get_vocab_size()
    groups = [[token % vocabulary for token in group] for group in groups]
    decoder = IncrementalDecoder(codec)
    pieces = [decoder.push(tuple(group)) for group in groups]
    pieces.append(decoder.finish())
    assert "".join(pieces) == codec.decode([token for group in groups for token in group])


def test_ids_that_cannot_be_decoded_are_an_error_of_their_request(codec: TextCodec) -> None:
    with pytest.raises(RequestError, match="cannot be decoded"):
        IncrementalDecoder(codec).push((-1,))
