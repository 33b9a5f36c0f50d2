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
    PromptLogprobs,
    RequestHandle,
    RequestMetrics,
    Tokens,
)
from actorpp.serving.logprobs import TokenLogprob
from actorpp.serving.request import CompletionRequest
from actorpp.serving.stopping import OutputText
from actorpp.serving.tokenizer import TextCodec

# Texts that are tokenised at once; more wait their turn, so that many long texts leave cores to the stages.
TOKENIZER_THREADS = 2

# Log-probabilities of one request, alternatives included: so that its answer fits one message to a client.
MAX_LOGPROBS = 250_000

T = TypeVar("T")


class Delta(msgspec.Struct, frozen=True):
    """New output. ``text`` may lag behind ``ids`` while a character is not complete, or what there is could become a
    stop string; the last delta has the rest."""

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class CompletionResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The whole answer. ``text`` leaves special tokens out; ``token_ids`` has every delivered id.

    ``stop_reason`` is the stop string or stop id that ended it, and None for end-of-sequence. If they were asked for,
    ``logprobs`` has one for each of ``token_ids``, ``prompt_logprobs`` one for each prompt token (None for the first).
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason
    stop_reason: str | int | None
    metrics: RequestMetrics
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


class Completion:
    """A request that the engine has accepted. Iterate it once, to the end, or call ``abort``."""

    def __init__(
        self, request: CompletionRequest, handle: RequestHandle, prompt_tokens: int, text: OutputText | None
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self._request = request
        self._handle = handle
        self._text = text

    def abort(self) -> None:
        """End it early; safe at any time and any number of times. The result then says ``abort``."""
        self._handle.abort()

    async def __aiter__(self) -> AsyncIterator[Progress | Delta | CompletionResult]:
        """Progress of the prefill, deltas, and last the result. Raises RequestError; leaving early aborts.

        Who may stop between two events also calls ``abort``: an abandoned iterator is closed only in its own time.
        """
        ids: list[int] = []
        pieces: list[str] = []
        logprobs: list[TokenLogprob] = []
        prompt_logprobs: list[TokenLogprob | None] = [None]
        ended = False
        try:
            async for event in self._handle:
                match event:
                    case Progress():
                        yield event
                    case PromptLogprobs(rows):
                        prompt_logprobs += rows
                    case Tokens(new, rows):
                        text = "".join(self._text.push(token) for token in new) if self._text else ""
                        ids += new
                        pieces.append(text)
                        logprobs += rows
                        yield Delta(new, text, rows)
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
                            logprobs=None if self._request.logprobs is None else tuple(logprobs),
                            prompt_logprobs=None if self._request.prompt_logprobs is None else tuple(prompt_logprobs),
                        )
        finally:
            if not ended:
                self._handle.abort()

    def _stopped_by(self, reason: FinishReason, ids: list[int]) -> tuple[FinishReason, str | int | None]:
        """Why it ended. What was undecided until the end may have held a stop string, unknown to the engine."""
        if self._text is not None and self._text.found is not None:
            return "stop", self._text.found
        if reason == "stop" and ids[-1] in self._request.stop_token_ids:
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
        logprobs = _count(request.logprobs, request.max_tokens) + _count(request.prompt_logprobs, len(prompt_ids))
        if logprobs > MAX_LOGPROBS:
            raise InvalidRequestError(
                f"{logprobs} log-probabilities, alternatives included, are more than {MAX_LOGPROBS}: "
                "ask for fewer tokens or alternatives",
                param="logprobs" if request.prompt_logprobs is None else "prompt_logprobs",
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
        return Completion(request, handle, len(prompt_ids), self._output_text(request))

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


def _count(top: int | None, tokens: int) -> int:
    """Log-probabilities of so many tokens."""
    return 0 if top is None else tokens * (1 + top)
