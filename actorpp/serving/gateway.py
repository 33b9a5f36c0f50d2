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
from actorpp.serving.stopping import OutputText
from actorpp.serving.tokenizer import TextCodec

# Texts that are tokenised at once; more wait their turn, so that many long texts leave cores to the stages.
TOKENIZER_THREADS = 2

T = TypeVar("T")


class Delta(msgspec.Struct, frozen=True):
    """New output. ``text`` may lag behind ``ids`` while a character is not complete, or what there is could become a
    stop string; the last delta has the rest."""

    ids: tuple[int, ...]
    text: str


class CompletionResult(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer. ``text`` leaves special tokens out; ``token_ids`` has every delivered id.

    ``stop_reason`` is the stop string or stop id that ended it, and None for end-of-sequence.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason
    stop_reason: str | int | None
    metrics: RequestMetrics


class Completion:
    """A request that the engine has accepted. Iterate it once, to the end, or call ``abort``."""

    def __init__(
        self, handle: RequestHandle, prompt_tokens: int, text: OutputText | None, stop_token_ids: frozenset[int]
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self._handle = handle
        self._text = text
        self._stop_token_ids = stop_token_ids

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
                        text = "".join(self._text.push(token) for token in new) if self._text else ""
                        ids += new
                        pieces.append(text)
                        yield Delta(new, text)
                    case Finished(reason, metrics):
                        ended = True
                        if self._text and (rest := self._text.finish()):
                            pieces.append(rest)
                            yield Delta((), rest)
                        reason, stopped_by = self._stopped_by(reason, ids)
                        yield CompletionResult(
                            text="".join(pieces),
                            token_ids=tuple(ids),
                            prompt_tokens=self.prompt_tokens,
                            finish_reason=reason,
                            stop_reason=stopped_by,
                            metrics=metrics,
                        )
        finally:
            if not ended:
                self._handle.abort()

    def _stopped_by(self, reason: FinishReason, ids: list[int]) -> tuple[FinishReason, str | int | None]:
        """Why it ended. What was undecided until the end may have held a stop string, unknown to the engine."""
        if self._text is not None and self._text.found is not None:
            return "stop", self._text.found
        if reason == "stop" and ids[-1] in self._stop_token_ids:
            return reason, ids[-1]
        return reason, None


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
        prompt_ids = await self._prompt_ids(request)
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
        if request.stop_strings and self._codec is None:
            raise InvalidRequestError("the model has no tokenizer: give stop_token_ids", param="stop")
        # Two readers of the same text: the coordinator's ends the request, the client's may lag behind it.
        stop_text = self._output_text(request) if request.stop_strings else None
        handle = self.engine.submit(prompt_ids, request.params(deadline_s), stop_text)
        return Completion(handle, len(prompt_ids), self._output_text(request), frozenset(request.stop_token_ids))

    def _output_text(self, request: CompletionRequest) -> OutputText | None:
        if self._codec is None:
            return None
        return OutputText(
            self._codec,
            request.stop_strings,
            frozenset(request.stop_token_ids),
            min_tokens=request.min_tokens,
            include=request.include_stop_str_in_output,
        )

    async def _prompt_ids(self, request: CompletionRequest) -> list[int]:
        if request.prompt_tokens is not None:
            return request.prompt_tokens
        codec = self._codec
        if codec is None:
            raise InvalidRequestError("the model has no tokenizer: give prompt_tokens", param="prompt")
        text, messages = request.prompt, request.messages
        if messages is not None:  # the template writes the special tokens itself
            return await self._off_loop(lambda: codec.encode(codec.render_chat(messages), add_special_tokens=False))
        return await self._off_loop(lambda: codec.encode(text or ""))

    async def _off_loop(self, work: Callable[[], T]) -> T:
        running = self._threads.submit(work)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return await asyncio.wrap_future(running)

    def _end_threads(self) -> None:
        """Leave no thread behind, but do not wait for a long text that nobody wants any more."""
        self._threads.shutdown(wait=not self._running, cancel_futures=True)
