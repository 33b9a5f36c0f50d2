"""Answers in the shapes of OpenAI's API: whole ones, and the chunks of a stream. Plain dicts; no connections here."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from actorpp.serving.completion import Completion, CompletionOutput, CompletionResult, Delta
from actorpp.serving.logprobs import TokenLogprob

TokenText = Callable[[int], str]


class Usage:
    """Counts of one answer, over all its prompts and outputs."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.completion_tokens = 0

    def to_dict(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


class Shape(ABC):
    """What one kind of answer looks like; the two kinds differ in their choices alone.

    Args:
        model: The name that clients are told.
        token_text: One token's text, for log-probabilities.
    """

    prefix: str
    object: str
    chunk_object: str

    def __init__(self, model: str, token_text: TokenText) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self.token_text = token_text

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return self._envelope(self.object) | {"choices": choices, "usage": usage.to_dict()}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return self._envelope(self.chunk_object) | {"choices": choices} | more

    def _envelope(self, object: str) -> dict[str, Any]:
        return {"id": self.id, "object": object, "created": self.created, "model": self.model}

    @abstractmethod
    def choice(
        self, index: int, completion: Completion, result: CompletionResult, output: CompletionOutput
    ) -> dict[str, Any]:
        """One output of a whole answer."""

    @abstractmethod
    def delta(self, index: int, delta: Delta, *, first: bool) -> dict[str, Any]:
        """New text of one output."""

    @abstractmethod
    def end(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        """The last chunk of one output."""


class ChatShape(Shape):
    """``/v1/chat/completions``."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(
        self, index: int, completion: Completion, result: CompletionResult, output: CompletionOutput
    ) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text},
            "logprobs": self._logprobs(output.logprobs),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def delta(self, index: int, delta: Delta, *, first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if first else {}
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
        return {
            "index": index,
            "delta": role | {"content": delta.text},
            "logprobs": logprobs,
            "finish_reason": None,
        }

    def end(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {},
            "logprobs": None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def _logprobs(self, rows: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if rows is None:
            return None
        return {
            "content": [
                self._token(row.token_id, row.logprob)
                | {"top_logprobs": [self._token(token, logprob) for token, logprob in row.top]}
                for row in rows
            ]
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class TextShape(Shape):
    """``/v1/completions``.

    Args:
        echo: Put the prompt before the output, in text and log-probabilities.
        echo_only: Leave the output out.
    """

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, token_text: TokenText, *, echo: bool = False, echo_only: bool = False) -> None:
        super().__init__(model, token_text)
        self.echo, self.echo_only = echo, echo_only
        self._lengths: dict[int, int] = {}  # characters of each output that are out, for text_offset

    def choice(
        self, index: int, completion: Completion, result: CompletionResult, output: CompletionOutput
    ) -> dict[str, Any]:
        text = "" if self.echo_only else output.text
        rows: list[TokenLogprob | None] | None = None
        if output.logprobs is not None:
            rows = [] if self.echo_only else list(output.logprobs)
        if self.echo:
            prompt, prompt_rows = self.echoed(completion, result)
            text, rows = prompt + text, prompt_rows + rows if rows is not None else None
        first = completion.prompt_ids[0] if self.echo else None
        return {
            "index": index,
            "text": text,
            "logprobs": None if rows is None else self._logprobs(rows, first),
            "finish_reason": "length" if self.echo_only else output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def echoed(
        self, completion: Completion, result: CompletionResult | None = None
    ) -> tuple[str, list[TokenLogprob | None]]:
        """The prompt's text, and its tokens' log-probabilities if there are any."""
        text = completion.prompt
        if text is None:
            text = "".join(map(self.token_text, completion.prompt_ids))
        rows = () if result is None else result.prompt_logprobs or ()
        return text, list(rows)

    def delta(self, index: int, delta: Delta, *, first: bool) -> dict[str, Any]:
        offset = self._lengths.get(index, 0)
        self._lengths[index] = offset + len(delta.text)
        logprobs = self._logprobs(list(delta.logprobs), None, offset) if delta.logprobs else None
        return {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": None}

    def end(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        return {
            "index": index,
            "text": "",
            "logprobs": None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def _logprobs(self, rows: list[TokenLogprob | None], first: int | None, offset: int = 0) -> dict[str, Any]:
        """``first`` is the token of the row that is None: the prompt's first, which nothing predicts."""
        tokens: list[str] = []
        offsets: list[int] = []
        for row in rows:
            tokens.append(self.token_text(row.token_id if row is not None else first or 0))
            offsets.append(offset)
            offset += len(tokens[-1])
        return {
            "tokens": tokens,
            "token_logprobs": [None if row is None else row.logprob for row in rows],
            "top_logprobs": [None if row is None else self._top(row) for row in rows],
            "text_offset": offsets,
        }

    def _top(self, row: TokenLogprob) -> dict[str, float]:
        """By text, best first; of tokens with the same text the likeliest. The token itself is always among them."""
        top: dict[str, float] = {}
        for token, logprob in row.top:
            top.setdefault(self.token_text(token), logprob)
        top.setdefault(self.token_text(row.token_id), row.logprob)
        return top


def encode(answer: dict[str, Any]) -> bytes:
    """JSON bytes."""
    return msgspec.json.encode(answer)


def frame(answer: dict[str, Any]) -> bytes:
    """One event of a stream: it ends in exactly two newlines."""
    return b"data: " + encode(answer) + b"\n\n"
