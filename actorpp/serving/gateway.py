"""The one way in: checks a request, turns it into ids, follows it through the engine, turns ids into text.

Command line, ZeroMQ and later HTTP are thin over it. It schedules nothing and keeps nothing of a finished request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from actorpp.errors import ContextLengthExceededError, DeadlineExceededError, InvalidRequestError
from actorpp.serving.api import (
    EngineLike,
    EngineStats,
    Finished,
    FinishReason,
    Progress,
    RequestHandle,
    RequestMetrics,
    Tokens,
)
from actorpp.serving.request import CompletionRequest
from actorpp.serving.tokenizer import IncrementalDecoder, TextCodec

# Texts that are tokenised at once; more wait their turn, so that many long texts leave cores to the stages.
TOKENIZER_THREADS = 2

T = TypeVar("T")


class Delta(msgspec.Struct, frozen=True):
    """New output. ``text`` may lag behind ``ids`` while a character is not complete; the last delta has the rest."""

    ids: tuple[int, ...]
    text: str


class CompletionResult(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer. ``text`` leaves special tokens out; ``token_ids`` has every delivered id."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason
    metrics: RequestMetrics


class Completion:
    """A request that the engine has accepted. Iterate it once, to the end, or call ``abort``.

    Attributes:
        prompt: The text that was tokenised, a chat's after its template; None when ids were given.
        prompt_ids: What the engine was given.
    """

    def __init__(
        self, handle: RequestHandle, prompt: str | None, prompt_ids: list[int], decoder: IncrementalDecoder | None
    ) -> None:
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self._handle = handle
        self._decoder = decoder

    @property
    def prompt_tokens(self) -> int:
        """Their number."""
        return len(self.prompt_ids)

    def abort(self) -> None:
        """End it early; safe at any time and any number of times. The result then says ``abort``."""
        self._handle.abort()

    async def __aiter__(self) -> AsyncIterator[Progress | Delta | CompletionResult]:
        """Progress of the prefill, deltas, and last the result. Raises RequestError; leaving early aborts.

        Who may stop between two events also calls ``abort``: an abandoned iterator is closed only in its own time.
        """
        ids: list[int] = []
        pieces: list[str] = []
        ended = False
        try:
            async for event in self._handle:
                match event:
                    case Progress():
                        yield event
                    case Tokens(new):
                        text = self._decoder.push(new) if self._decoder else ""
                        ids += new
                        pieces.append(text)
                        yield Delta(new, text)
                    case Finished(reason, metrics):
                        ended = True
                        if self._decoder and (rest := self._decoder.finish()):
                            pieces.append(rest)
                            yield Delta((), rest)
                        yield CompletionResult(
                            text="".join(pieces),
                            token_ids=tuple(ids),
                            prompt_tokens=self.prompt_tokens,
                            finish_reason=reason,
                            metrics=metrics,
                        )
        finally:
            if not ended:
                self._handle.abort()


class Gateway:
    """Validates, tokenises and follows requests. An async context manager, inside the engine's.

    Args:
        engine: A started engine.
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
    def context_length(self) -> int:
        """Tokens of prompt and output together."""
        return self.engine.context_length

    def stats(self) -> EngineStats:
        """The engine's figures at this moment."""
        return self.engine.stats()

    async def complete(self, request: CompletionRequest, deadline_s: float | None = None) -> Completion:
        """Tokenise and submit; returns once the engine has accepted.

        Args:
            request: From ``parse_request``.
            deadline_s: Seconds from now until it ends with DeadlineExceededError.

        Raises:
            InvalidRequestError, ContextLengthExceededError, OverloadedError, DeadlineExceededError.
        """
        started = asyncio.get_running_loop().time()
        prompt, prompt_ids = await self._tokenised(request)
        if not prompt_ids:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        if len(prompt_ids) + request.max_tokens > self.context_length:
            raise ContextLengthExceededError(
                f"the maximum context length is {self.context_length} tokens, but the prompt has {len(prompt_ids)} "
                f"tokens and max_tokens is {request.max_tokens}",
                param="max_tokens" if len(prompt_ids) < self.context_length else "prompt",
            )
        if deadline_s is not None:
            deadline_s -= asyncio.get_running_loop().time() - started
            if deadline_s <= 0:
                raise DeadlineExceededError("the deadline passed while the prompt was tokenised", param="deadline_ms")
        handle = self.engine.submit(prompt_ids, request.params(deadline_s))
        return Completion(handle, prompt, prompt_ids, IncrementalDecoder(self._codec) if self._codec else None)

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
