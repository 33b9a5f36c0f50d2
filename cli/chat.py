"""``actorpp chat``: a conversation with a running server over HTTP, its answers as they come.

Ctrl-C ends an answer, and at the prompt the conversation; so does Ctrl-D.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from actorpp.errors import ActorppError, ConfigError, OverloadedError, RequestError

PROMPT = "> "


@dataclass(frozen=True)
class ChatOptions:
    """``url`` is the server's, as ``actorpp run`` prints it."""

    url: str
    api_key: str | None
    system: str | None
    max_tokens: int | None
    temperature: float | None
    stats: bool


def chat(options: ChatOptions) -> int:
    """Ask, answer, and so on, until the input ends. Raises ActorppError: no server is there, or it refuses."""
    messages: list[dict[str, str]] = [] if options.system is None else [{"role": "system", "content": options.system}]
    while True:
        try:
            question = input(PROMPT if sys.stdin.isatty() else "")
        except EOFError:
            return 0
        if not question.strip():
            continue
        messages.append({"role": "user", "content": question})
        answer = _answer(options, messages)
        if answer is None:
            messages.pop()  # stopped: as if it had not been asked
        else:
            messages.append({"role": "assistant", "content": answer})


def _answer(options: ChatOptions, messages: list[dict[str, str]]) -> str | None:
    """Print the answer as it comes; None when Ctrl-C has ended it."""
    body: dict[str, Any] = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    if options.max_tokens is not None:
        body["max_tokens"] = options.max_tokens
    if options.temperature is not None:
        body["temperature"] = options.temperature
    began, first, usage, text = time.monotonic(), None, None, ""
    try:
        for chunk in _stream(options, body):
            for choice in chunk["choices"]:
                first = time.monotonic() if first is None else first
                piece = choice["delta"].get("content") or ""
                text += piece
                print(piece, end="", flush=True)
            usage = chunk.get("usage") or usage
    except KeyboardInterrupt:
        print()
        return None
    print()
    if options.stats and usage is not None and first is not None:
        tokens, seconds = usage["completion_tokens"], time.monotonic() - first
        rate = f" | {(tokens - 1) / seconds:.1f} tokens/s" if tokens > 1 and seconds > 0 else ""
        figures = f"TTFT {first - began:.2f} s{rate} | {usage['prompt_tokens']} + {tokens} tokens"
        print(figures, file=sys.stderr)
    return text


def _stream(options: ChatOptions, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of the answer. Leaving early closes the connection, which aborts the request."""
    try:
        url = urlsplit(options.url)
        port = url.port
    except ValueError:  # brackets that do not close, a port that is no number
        url, port = urlsplit(""), None
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"{options.url!r} is no address of a server, like http://127.0.0.1:8000", param="url")
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    headers = {"Content-Type": "application/json"}
    if options.api_key is not None:
        headers["Authorization"] = f"Bearer {options.api_key}"
    with closing(kind(url.hostname, port)) as connection:
        try:
            connection.request("POST", f"{url.path.rstrip('/')}/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refusal(response.status, response.read())
            for line in response:
                data = line.strip().removeprefix(b"data: ")
                if data == b"[DONE]":
                    return
                if not data or data.startswith(b":"):
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise RequestError(chunk["error"]["message"])
                yield chunk
            raise RequestError(f"{options.url} broke its answer off")
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(f"no answer from {options.url}: {error}") from None


def _refusal(status: int, data: bytes) -> ActorppError:
    try:
        message = str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the server answered {status}"
    return (
        OverloadedError(message) if status == 429 else ConfigError(message) if status < 500 else RequestError(message)
    )
