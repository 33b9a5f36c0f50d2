"""The one way in: checks a request, turns it into ids, submits it to the engine.

Command line, ZeroMQ and HTTP are thin over it. It schedules nothing and keeps nothing of a finished request; what is
known of a request under way is its ``Completion``.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from actorpp.errors import DeadlineExceededError, InvalidRequestError, OverloadedError, RequestError
from actorpp.serving.api import EngineLike, EngineStats, RequestHandle
from actorpp.serving.completion import Completion, output_text
from actorpp.serving.offloop import OffLoop
from actorpp.serving.request import CompletionRequest, TokenizeRequest, all_within, check_fits
from actorpp.serving.tokenizer import TextCodec

# Log-probabilities of one request, alternatives included: so that its answer fits one message to a client.
MAX_LOGPROBS = 250_000

DRAIN_CHECK_S = 0.05

SLICE = 65_536  # ids that are copied at once

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """A request that the model can complete. ``prompt`` is the text that was tokenised; None when ids were given."""

    request: CompletionRequest
    prompt: str | None
    prompt_ids: Sequence[int]


class Gateway:
    """Validates, tokenises and follows requests. An async context manager.

    Args:
        engine: A started engine, or one whose model is located and that is started before the first ``submit``.
        model_name: What clients are told.
    """

    def __init__(self, engine: EngineLike, model_name: str) -> None:
        self.engine = engine
        self.model_name = model_name
        self._codec: TextCodec | None = None
        self._texts = OffLoop()
        self._draining = False

    async def __aenter__(self) -> Gateway:
        """Read the tokenizer. Raises CheckpointError."""
        tokenizer_file = self.engine.checkpoint.tokenizer
        try:
            if tokenizer_file is not None:
                self._codec = await self._texts.run(lambda: TextCodec(tokenizer_file), 0)
        except BaseException:
            self._texts.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._texts.close()

    @property
    def codec(self) -> TextCodec | None:
        """The model's tokenizer, if it has one."""
        return self._codec

    @property
    def context_length(self) -> int:
        """Tokens of prompt and output together."""
        return self.engine.context_length

    def stats(self) -> EngineStats:
        """The engine's figures at this moment."""
        return self.engine.stats()

    # --- the end ---

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because the server is about to stop."""
        return self._draining

    async def drain(self) -> None:
        """Take no new request, and wait until those under way have ended."""
        self._draining = True
        while (stats := self.stats()).requests_running or stats.requests_waiting:  # noqa: ASYNC110 - of no one's making
            await asyncio.sleep(DRAIN_CHECK_S)

    # --- text and ids ---

    async def tokenize(self, request: TokenizeRequest) -> array[int]:
        """The ids that a request with this text, or chat, would give the engine. Raises InvalidRequestError."""
        _, ids = await self._encoded(request)
        return ids

    async def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens included. Raises InvalidRequestError."""
        codec = self._require_codec("tokens")
        vocab = codec.tokenizer.get_vocab_size()
        if ids and not all_within(ids, vocab):
            raise InvalidRequestError(f"tokens: ids must lie in 0-{vocab - 1}", param="tokens")
        return await self.off_loop(lambda: codec.decode(list(ids), skip_special_tokens=False), 4 * len(ids))

    def tokenizer_info(self) -> dict[str, Any]:
        """The tokenizer's configuration, with its special tokens as text and its chat template."""
        codec = self._require_codec("tokenizer")
        return {**codec.config, **codec.special_tokens, "chat_template": codec.chat_template}

    @property
    def has_chat_template(self) -> bool:
        return self._codec is not None and self._codec.chat_template is not None

    def token_text(self, token: int) -> str:
        """One token's text; without a tokenizer, and for ids outside it, its number."""
        return f"token_id:{token}" if self._codec is None else self._codec.token_text(token)

    async def off_loop(self, work: Callable[[], T], size: int) -> T:
        """Run ``work()``, on about ``size`` characters, in a thread for such things."""
        return await self._texts.run(work, size)

    def _require_codec(self, param: str) -> TextCodec:
        if self._codec is None:
            raise InvalidRequestError("the model has no tokenizer: give prompt_tokens", param=param)
        return self._codec

    # --- requests ---

    async def prepare(self, request: CompletionRequest, room: int | None = None) -> Prepared:
        """Tokenise and check; needs of the engine only that its model is located.

        Args:
            request: From ``parse_request``.
            room: Output tokens at most of a request that does not say how many; None is all there is room for.

        Raises:
            InvalidRequestError, ContextLengthExceededError: It can never be completed.
        """
        prompt: str | None = None
        if request.prompt_tokens is not None:
            prompt_ids: Sequence[int] = request.prompt_tokens
        else:
            prompt, prompt_ids = await self._encoded(request)
        if request.stop_strings and self._codec is None:
            raise InvalidRequestError("the model has no tokenizer: give stop_token_ids", param="stop")
        if request.max_tokens is None and room is not None:
            request = msgspec.structs.replace(request, max_tokens=self._room(len(prompt_ids), room))
        check_fits(prompt_ids, request.params(), self.engine.checkpoint.vocab_size, self.context_length)
        max_tokens = request.max_tokens or self.context_length - len(prompt_ids)
        logprobs = _count(request.logprobs, request.n * max_tokens)
        logprobs += _count(request.prompt_logprobs, len(prompt_ids))
        if logprobs > MAX_LOGPROBS:
            raise InvalidRequestError(
                f"{logprobs} log-probabilities, alternatives included, are more than {MAX_LOGPROBS}: "
                "ask for fewer tokens or alternatives",
                param="logprobs" if request.prompt_logprobs is None else "prompt_logprobs",
            )
        return Prepared(request, prompt, prompt_ids)

    async def complete(
        self, request: CompletionRequest, deadline_s: float | None = None, room: int | None = None
    ) -> Completion:
        """Tokenise and submit; returns once the engine has accepted.

        Args:
            request: From ``parse_request``.
            deadline_s: Seconds from now until it ends with DeadlineExceededError.
            room: As in ``prepare``.

        Raises:
            InvalidRequestError, ContextLengthExceededError, OverloadedError, DeadlineExceededError.
        """
        self._refuse_when_draining()
        deadline = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s
        try:
            async with asyncio.timeout_at(deadline):  # a long text, or long ones before it
                prepared = await self.prepare(request, room)
        except TimeoutError:
            raise DeadlineExceededError(
                "the deadline passed while the prompt was tokenised", param="deadline_ms"
            ) from None
        if deadline is not None:
            deadline_s = max(0.0, deadline - asyncio.get_running_loop().time())
        return self.submit(prepared, deadline_s)

    def submit(self, prepared: Prepared, deadline_s: float | None = None) -> Completion:
        """Ask the engine: one request for each output. When it refuses one of them, none is left.

        Raises:
            InvalidRequestError: It needs more than the KV cache ever holds.
            OverloadedError: The queue is full.
            StageFailedError: The pipeline has failed.
        """
        self._refuse_when_draining()
        request, prompt_ids = prepared.request, prepared.prompt_ids
        handles: list[RequestHandle] = []
        try:
            for index in range(request.n):
                # Two readers of the same text: the coordinator's ends the request, the client's may lag behind it.
                stop_text = output_text(self._codec, request) if request.stop_strings else None
                handles.append(self.engine.submit(prompt_ids, request.params(deadline_s, index), stop_text))
        except RequestError:
            for handle in handles:
                handle.abort()
            raise
        return Completion(request, handles, prepared.prompt, prompt_ids, self._codec)

    def _room(self, prompt_len: int, room: int) -> int:
        """Output tokens of a request that does not say how many: what it may have, and what fits."""
        stats = self.stats()
        # The window is over the async depth, for which the scheduler reserves pages too.
        cache = stats.pages_total * stats.page_size - stats.window
        return max(1, min(room, self.context_length - prompt_len, cache - prompt_len))

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise OverloadedError("the server is stopping: it takes no new requests")

    async def _encoded(self, request: CompletionRequest | TokenizeRequest) -> tuple[str, array[int]]:
        """The prompt's text, a chat's after its template, and its ids."""
        codec = self._require_codec("prompt")
        special, messages, text = request.add_special_tokens, request.messages, request.prompt or ""

        def encode() -> tuple[str, array[int]]:
            if messages is None:
                return text, _packed(codec.encode(text, add_special_tokens=special is not False))
            chat = codec.render_chat(messages, tools=request.tools, variables=request.chat_template_kwargs)
            # The template writes special tokens itself.
            return chat, _packed(codec.encode(chat, add_special_tokens=special is True))

        size = len(text) if messages is None else sum(_size(message) for message in messages)
        return await self.off_loop(encode, size)


def _packed(ids: list[int]) -> array[int]:
    """In an array, whose users hold up no one; made in slices, because Python's lock is held for each."""
    packed = array("i")
    for start in range(0, len(ids), SLICE):
        packed.fromlist(ids[start : start + SLICE])
    return packed


def _size(message: Mapping[str, Any]) -> int:
    """About the characters of a message."""
    content = message.get("content")
    return len(content) if isinstance(content, str) else len(str(content))


def _count(top: int | None, tokens: int) -> int:
    """Log-probabilities of so many tokens."""
    return 0 if top is None else tokens * (1 + top)
