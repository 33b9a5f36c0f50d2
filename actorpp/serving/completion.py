"""One request that the engine has accepted: its tokens as they come, turned into text, and its whole result.

How a request gets there (checks, tokenising, submission) is the gateway's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec

from actorpp.serving.api import (
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

T = TypeVar("T")


class Delta(msgspec.Struct, frozen=True):
    """New output, of the request's output number ``index``. ``text`` may lag behind ``ids`` while a character is not
    complete, or what there is could become a stop string; the last delta has the rest."""

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    index: int = 0


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One whole output. ``text`` leaves special tokens out; ``token_ids`` has every delivered id.

    ``stop_reason`` is the stop string or stop id that ended it, and None for end-of-sequence. ``logprobs`` has one for
    each of ``token_ids``, if they were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    metrics: RequestMetrics
    logprobs: tuple[TokenLogprob, ...] | None = None


class CompletionResult(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer: as many outputs as were asked for, in order. What is said of one is the first's.

    ``prompt_logprobs`` has one for each prompt token (None for the first), if they were asked for.
    """

    outputs: tuple[CompletionOutput, ...]
    prompt_tokens: int
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.outputs[0].stop_reason

    @property
    def metrics(self) -> RequestMetrics:
        return self.outputs[0].metrics

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.outputs[0].logprobs

    def fields(self) -> dict[str, Any]:
        """For clients: a single output's fields beside the prompt's, several in a list ``outputs``.

        What is inside the fields is left to the encoder: 250,000 log-probabilities as dicts would hold up the loop.
        """
        outputs = [msgspec.structs.asdict(output) for output in self.outputs]
        for output in outputs:
            if output["logprobs"] is None:
                del output["logprobs"]
        body: dict[str, Any] = outputs[0] if len(outputs) == 1 else {"outputs": outputs}
        body["prompt_tokens"] = self.prompt_tokens
        if self.prompt_logprobs is not None:
            body["prompt_logprobs"] = self.prompt_logprobs
        return body


class _Output:
    """One output while it comes."""

    def __init__(self, request: CompletionRequest, index: int, text: OutputText | None) -> None:
        self._request = request
        self._index = index
        self._text = text
        self._ids: list[int] = []
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def take(self, tokens: Tokens) -> Delta:
        text = "".join(self._text.push(token) for token in tokens.ids) if self._text else ""
        self._ids += tokens.ids
        self._pieces.append(text)
        self._logprobs += tokens.logprobs
        return Delta(tokens.ids, text, tokens.logprobs, self._index)

    def rest(self) -> Delta | None:
        """What the end shows that was undecided before."""
        rest = self._text.finish() if self._text else ""
        self._pieces.append(rest)
        return Delta((), rest, (), self._index) if rest else None

    def result(self, end: Finished) -> CompletionOutput:
        reason, stopped_by = self._stopped_by(end.reason)
        return CompletionOutput(
            text="".join(self._pieces),
            token_ids=tuple(self._ids),
            finish_reason=reason,
            stop_reason=stopped_by,
            metrics=end.metrics,
            logprobs=None if self._request.logprobs is None else tuple(self._logprobs),
        )

    def _stopped_by(self, reason: FinishReason) -> tuple[FinishReason, str | int | None]:
        """Why it ended. What was undecided until the end may have held a stop string, unknown to the engine."""
        if self._text is not None and self._text.found is not None:
            return "stop", self._text.found
        if reason == "stop" and self._ids[-1] in self._request.stop_token_ids:
            return reason, self._ids[-1]
        return reason, None


class Completion:
    """A request that the engine has accepted. Iterate it once, to the end, or call ``abort``.

    Attributes:
        prompt: The text that was tokenised, a chat's after its template; None when ids were given.
        prompt_ids: What the engine was given.
    """

    def __init__(
        self,
        request: CompletionRequest,
        handles: list[RequestHandle],
        prompt: str | None,
        prompt_ids: Sequence[int],
        codec: TextCodec | None,
    ) -> None:
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self._request = request
        self._handles = handles
        self._codec = codec

    @property
    def prompt_tokens(self) -> int:
        """Their number."""
        return len(self.prompt_ids)

    def abort(self) -> None:
        """End it early; safe at any time and any number of times. The result then says ``abort``."""
        for handle in self._handles:
            handle.abort()

    async def __aiter__(self) -> AsyncIterator[Progress | Delta | CompletionResult]:
        """Progress of the prefill, deltas, and last the result. Raises RequestError; leaving early aborts.

        Who may stop between two events also calls ``abort``: an abandoned iterator is closed only in its own time.
        """
        request = self._request
        outputs = [_Output(request, index, output_text(self._codec, request)) for index in range(len(self._handles))]
        results: dict[int, CompletionOutput] = {}
        prompt_logprobs: list[TokenLogprob | None] = [None]
        try:
            async with aclosing(merged(self._handles)) as events:
                async for index, event in events:
                    match event:
                        case Progress():
                            if index == 0:
                                yield event
                        case PromptLogprobs(rows):
                            prompt_logprobs += rows
                        case Tokens():
                            yield outputs[index].take(event)
                        case Finished():
                            if (rest := outputs[index].rest()) is not None:
                                yield rest
                            results[index] = outputs[index].result(event)
            yield CompletionResult(
                outputs=tuple(results[index] for index in range(len(outputs))),
                prompt_tokens=self.prompt_tokens,
                prompt_logprobs=None if request.prompt_logprobs is None else tuple(prompt_logprobs),
            )
        finally:
            if len(results) < len(outputs):
                self.abort()


def output_text(codec: TextCodec | None, request: CompletionRequest) -> OutputText | None:
    """A new reader of one output of the request; None where the model has no tokenizer."""
    if codec is None:
        return None
    return OutputText(
        codec,
        request.stop_strings,
        frozenset(request.stop_token_ids),
        min_tokens=request.min_tokens,
        include=request.include_stop_str_in_output,
    )


async def merged(sources: Sequence[AsyncIterable[T]]) -> AsyncGenerator[tuple[int, T]]:
    """The events of all sources as they come, each with its source's number. Closing it closes them."""
    iterators = [aiter(source) for source in sources]
    if len(iterators) == 1:  # the usual case, at the price of no task
        try:
            async for event in iterators[0]:
                yield 0, event
        finally:
            await _closed(iterators)
        return
    waiting = {asyncio.ensure_future(anext(iterator)): index for index, iterator in enumerate(iterators)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting[task]
                try:
                    event = task.result()
                except StopAsyncIteration:
                    del waiting[task]
                    continue
                del waiting[task]
                waiting[asyncio.ensure_future(anext(iterators[index]))] = index
                yield index, event
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await _closed(iterators)


async def _closed(iterators: Sequence[AsyncIterator[T]]) -> None:
    for iterator in iterators:
        if isinstance(iterator, AsyncGenerator):
            await iterator.aclose()
