"""Text to token ids and back, as transformers does it, from a checkpoint's own files and without transformers.

Everything here is synchronous and may take seconds for a long text; the gateway calls it off the loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from actorpp.errors import CheckpointError, InvalidRequestError, RequestError

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TextCodec:
    """A checkpoint's tokenizer and chat template.

    Args:
        tokenizer_file: ``tokenizer.json``; ``tokenizer_config.json`` and ``chat_template.jinja`` may lie beside it.

    Raises:
        CheckpointError: A file is missing or broken.
    """

    def __init__(self, tokenizer_file: Path) -> None:
        try:
            self.tokenizer: Tokenizer = Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # tokenizers raises bare Exception
            raise CheckpointError(f"{tokenizer_file}: {error}") from None
        config = _read_json(tokenizer_file.with_name("tokenizer_config.json"))
        self.config = config
        special = {**_read_json(tokenizer_file.with_name("special_tokens_map.json")), **config}
        self.special_tokens = {name: text for name in SPECIAL_NAMES if (text := _token_text(special.get(name)))}
        self.chat_template = _chat_template(tokenizer_file.parent, config)
        self._compiled: jinja2.Template | None = None
        self._texts: dict[int, str] = {}  # of single tokens
        # A file may ask for truncation or padding that was meant for its training.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of ``text``; with ``add_special_tokens``, also those that the tokenizer itself puts around a text.

        Raises:
            InvalidRequestError: It has halves of surrogate pairs, as bytes of a command line that are no UTF-8 become.
        """
        try:
            # As a batch of one: `encode` would hold Python's lock, and so every thread up, until it is done.
            (encoded,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError:
            raise InvalidRequestError("prompt: the text is no valid Unicode", param="prompt") from None
        ids: list[int] = encoded.ids
        return ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``, special tokens left out unless asked for; bytes that are no UTF-8 become U+FFFD."""
        text: str
        (text,) = self.tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)  # a batch as in `encode`
        return text

    def token_text(self, token: int) -> str:
        """What one token adds to a text in whose middle it stands. Part of a character is U+FFFD."""
        text = self._texts.get(token)
        if text is None:
            # Decoders treat the first token of a text differently (many strip its space), so one stands before it.
            before = self.encode("a", add_special_tokens=False)
            start = self.decode(before)
            whole = self.decode([*before, token], skip_special_tokens=False)
            text = whole[len(start) :] if whole.startswith(start) else self.decode([token], skip_special_tokens=False)
            self._texts[token] = text
        return text

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a chat that the model is to continue as the assistant; its special tokens are written out.

        Args:
            messages: Each with a ``role``. Content in parts of text becomes one text, a part a line.
            tools: What the template tells the model of functions it may call.
            variables: What else the template may ask for, like ``enable_thinking``. None of them replaces the above.

        Raises:
            InvalidRequestError: The model has no template, or the template refuses these messages.
        """
        if self.chat_template is None:
            raise InvalidRequestError("the model has no chat template", param="messages")
        plain = [_plain(message) for message in messages]
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self.chat_template)
            known = {"messages": plain, "add_generation_prompt": True, "tools": tools or None, **self.special_tokens}
            return self._compiled.render({**(variables or {}), **known})
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise InvalidRequestError(f"the chat template refuses the messages: {error}", param="messages") from None


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: no nulls, and its content one text."""
    plain = {key: value for key, value in message.items() if value is not None}
    if isinstance(content := plain.get("content"), list):
        plain["content"] = "\n".join(_part_text(part) for part in content)
    return plain


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(text := part.get("text"), str):
        return text
    raise InvalidRequestError(f"messages: content parts of text only, not {kind!r}", param="messages")


class IncrementalDecoder:
    """Decodes ids as they come. The pieces, ``finish`` included, join to exactly ``TextCodec.decode`` of all ids.

    A character whose bytes are spread over several tokens comes out whole, with the last of them.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._length = 0  # characters given out

    def push(self, ids: tuple[int, ...]) -> str:
        """Take the next ids; returns the text that is now certain. Raises RequestError when there is none for them."""
        self._ids.extend(ids)
        try:
            text = "".join(self._stream.step(self._codec.tokenizer, token) or "" for token in ids)
        except Exception as error:  # tokenizers raises bare Exception
            raise RequestError(f"the output cannot be decoded: {error}") from None
        self._length += len(text)
        return text

    def finish(self) -> str:
        """The rest: what ends in the middle of a character, as U+FFFD."""
        rest = self._codec.decode(self._ids)[self._length :]
        self._length += len(rest)
        return rest


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's own tokens for training; here it only passes its content on."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates on the hub expect to find. The sandbox is there because a template is code from outside."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:  # jinja2's own escapes HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; a file that is not there is an empty one."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return values


def _token_text(token: object) -> str | None:
    """A special token is written as text, or as an object with its ``content``."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The default template: of the file, else of the config, where it may be one of several by name."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        template = config.get("chat_template")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / 'chat_template.jinja'}: {error}") from None
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None
