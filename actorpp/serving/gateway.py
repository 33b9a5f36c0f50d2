"""The one way in: checks a request, turns it into ids, submits it to the engine.

Command line, ZeroMQ and HTTP are thin over it. It schedules nothing and keeps nothing of a finished request; what is
known of a request under way is its ``Completion``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from actorpp.errors import DeadlineExceededError, InvalidRequestError, RequestError
from actorpp.serving.api import EngineLike, EngineStats, RequestHandle
from actorpp.serving.completion import Completion, output_text
from actorpp.serving.request import CompletionRequest, check_fits
from actorpp.serving.tokenizer import TextCodec

# Texts that are tokenised at once; more wait their turn, so that many long texts leave cores to the stages.
TOKENIZER_THREADS = 2

# Log-probabilities of one request, alternatives included: so that its answer fits one message to a client.
MAX_LOGPROBS = 250_000

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """A request that the model can complete. ``prompt`` is the text that was tokenised; None when ids were given."""

    request: CompletionRequest
    prompt: str | None
    prompt_ids: list[int]


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
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        self._running: set[Future[Any]] = set()

    async def __aenter__(self) -> Gateway:
        """Read the tokenizer. Raises CheckpointError."""
        tokenizer_file = self.engine.checkpoint.tokenizer
        try:
            if tokenizer_file is not None:
                self._codec = await self._off_loop(lambda: TextCodec(tokenizer_file))
        except BaseException:
            self._end_threads()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_threads()

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

    async def prepare(self, request: CompletionRequest) -> Prepared:
        """Tokenise and check; needs of the engine only that its model is located.

        Args:
            request: From ``parse_request``.

        Raises:
            InvalidRequestError, ContextLengthExceededError: It can never be completed.
        """
        prompt, prompt_ids = await self._tokenised(request)
        if request.stop_strings and self._codec is None:
            raise InvalidRequestError("the model has no tokenizer: give stop_token_ids", param="stop")
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

    async def complete(self, request: CompletionRequest, deadline_s: float | None = None) -> Completion:
        """Tokenise and submit; returns once the engine has accepted.

        Args:
            request: From ``parse_request``.
            deadline_s: Seconds from now until it ends with DeadlineExceededError.

        Raises:
            InvalidRequestError, ContextLengthExceededError, OverloadedError, DeadlineExceededError.
        """
        deadline = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s
        try:
            async with asyncio.timeout_at(deadline):  # a long text, or long ones before it
                prepared = await self.prepare(request)
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

    async def _tokenised(self, request: CompletionRequest) -> tuple[str | None, list[int]]:
        """The prompt's text, if it is one, and its ids."""
        if request.prompt_tokens is not None:
            return None, request.prompt_tokens
        codec = self._codec
        if codec is None:
            raise InvalidRequestError("the model has no tokenizer: give prompt_tokens", param="prompt")

        def tokenise() -> tuple[str, list[int]]:
            if request.messages is None:
                text = request.prompt or ""
                return text, codec.encode(text)
            text = codec.render_chat(request.messages)
            return text, codec.encode(text, add_special_tokens=False)  # the template writes them itself

        return await self._off_loop(tokenise)

    async def _off_loop(self, work: Callable[[], T]) -> T:
        running = self._threads.submit(work)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return await asyncio.wrap_future(running)

    def _end_threads(self) -> None:
        """Leave no thread behind, but do not wait for a long text that nobody wants any more."""
        self._threads.shutdown(wait=not self._running, cancel_futures=True)


def _count(top: int | None, tokens: int) -> int:
    """Log-probabilities of so many tokens."""
    return 0 if top is None else tokens * (1 + top)
