"""Offline inference from plain Python: prompts in, answers out, in the shape that people know from vLLM.

``LLM`` wraps an engine in a thread of its own; a program with an asyncio loop may use ``actorpp.Engine``. No torch
here, unless the stages run in this process (``transport="inproc"``).
"""

from __future__ import annotations

import asyncio
import operator
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from math import fsum
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import structlog

from actorpp.background import EngineThread
from actorpp.config import SERVER_FLAGS, EngineConfig, by_field
from actorpp.errors import AbortedError, ConfigError, InvalidRequestError, RequestError, StageFailedError
from actorpp.logs import configure_structlog
from actorpp.progress import ProgressDisplay
from actorpp.serving.api import EngineStats, FinishReason, RequestMetrics
from actorpp.serving.completion import CompletionResult
from actorpp.serving.gateway import Prepared
from actorpp.serving.logprobs import TokenLogprob
from actorpp.serving.request import MAX_OUTPUTS, CompletionRequest, SamplingOptions, parse_request
from actorpp.serving.tokenizer import TextCodec


class TextPrompt(TypedDict):
    """A text, completed as it stands."""

    prompt: str


class TokensPrompt(TypedDict):
    """Token ids."""

    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
Message = Mapping[str, Any]


class SamplingParams(SamplingOptions, frozen=True, kw_only=True):
    """What to ask of one prompt. Names and defaults are vLLM's: it samples unless ``temperature=0``, and ``top_k`` may
    be -1. What each field means is said by ``actorpp.serving.request.SamplingOptions``.

    Raises:
        InvalidRequestError: A value is of the wrong type or out of range.
    """

    temperature: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        self.request(prompt="")

    def request(self, **prompt: Any) -> CompletionRequest:
        """The request with these parameters for a prompt, given as CompletionRequest takes it."""
        fields = msgspec.structs.asdict(self)
        if self.top_k == -1:
            fields["top_k"] = 0
        return parse_request(fields | prompt)


class Logprob(msgspec.Struct, frozen=True):
    """Natural log-probability of a token at one place, and its rank there; 1 is the likeliest.

    ``decoded_token`` is the text of the token by itself; None when the model has no tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]
"""At one place, by token id: the token that is there, then the likeliest ones."""


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One answer.

    Attributes:
        text: Without special tokens; empty when the model has no tokenizer.
        finish_reason: ``stop`` or ``length``.
        stop_reason: The stop string or stop id that ended it; None for end-of-sequence.
        logprobs: One for each of ``token_ids``; None unless the request asked for them.
        cumulative_logprob: The sum of the tokens' own; None unless the request asked for them.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: list[Logprobs] | None = None
    cumulative_logprob: float | None = None

    def finished(self) -> bool:
        """Always: what ``generate`` returns has ended."""
        return True


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """All about one prompt.

    Attributes:
        request_id: Unique in this LLM, counted from 0 in the order of the calls.
        prompt: Its text, a chat's after the template, or None when token ids were given.
        prompt_logprobs: One for each prompt token, None for the first; None unless the request asked for them.
        finished: Always: what ``generate`` returns has ended.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[Logprobs | None] | None = None
    finished: bool = True


class LLM:
    """A model on its pipeline stages, for this program alone.

    Use it in a ``with`` block, or call ``close``; what is left open ends with the program. Methods may be called from
    any thread, and where an asyncio loop is running, as in a notebook; they block until the answers are there.

    Args:
        model: Hub id, local folder or GGUF file; the embedded default model when not given.
        config: YAML, JSON or TOML file with options, as the command line takes it.
        use_tqdm_on_load: Show on stderr how far the start has come.
        options: What ``actorpp run`` has flags for, with underscores: ``stages=4, dtype="float32"``. Other systems'
            names (``pipeline_parallel_size``) and ACTORPP_ variables work as there.

    Raises:
        ConfigError: An option is unknown or cannot work.
        ModelNotFoundError, UnsupportedModelError, CheckpointError: The message says what was wrong.
        StageFailedError: A stage did not come up.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        config: str | os.PathLike[str] | None = None,
        use_tqdm_on_load: bool = True,
        **options: Any,
    ) -> None:
        fields = by_field(options if model is None else {"model": os.fspath(model), **options})
        for name in SERVER_FLAGS:
            if name in fields:
                raise ConfigError(f"{name} is for serving: an LLM listens nowhere", param=name)
        engine = EngineConfig.load(None if config is None else Path(config), **fields)
        if not structlog.is_configured():
            configure_structlog(engine.log_level)
        # Nobody else asks this engine, so prompts beyond its limits wait here, and are never refused as overload.
        # Places are for prompts, not outputs: calls that had a part of what they need would wait for each other.
        places = engine.max_running_requests + engine.max_queued_requests
        self._places = asyncio.Semaphore(places)
        self._request_ids = count()
        display = ProgressDisplay()
        try:
            self._thread = EngineThread(
                engine.model_copy(update={"max_queued_requests": places * MAX_OUTPUTS}),
                engine.model or "",
                display.startup if use_tqdm_on_load else None,
            )
        finally:
            display.close()
        self._end = weakref.finalize(self, self._thread.close)

    def close(self) -> None:
        """End the engine with all its processes, and calls under way with AbortedError. Safe to call again."""
        self._end()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def model_path(self) -> Path:
        """Folder of the checkpoint in use."""
        return self._thread.engine.checkpoint.path

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, many at once. Ctrl-C aborts all of them; the LLM can be used again.

        Args:
            prompts: One or many: a text, a list of token ids, ``{"prompt": …}`` or ``{"prompt_token_ids": […]}``.
            sampling_params: For all prompts, or one for each; SamplingParams() when not given.
            use_tqdm: Show on stderr how many of several prompts are done.
            priority: One for each prompt: among those that wait lower goes first, equal ones in their order.

        Returns:
            One result for each prompt, in their order.

        Raises:
            InvalidRequestError: A prompt or its parameters cannot work, so none is answered. A note says which one.
            RequestError: A prompt failed, and the others were aborted. A note says which one.
        """
        requests = [_request_fields(prompt) for prompt in _each(prompts)]
        if priority is not None:
            _check_count(priority, "priority", requests)
            requests = [fields | {"priority": own} for fields, own in zip(requests, priority, strict=True)]
        return self._complete(requests, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one chat, or a list of chats, through the model's template. As ``generate`` otherwise.

        Args:
            messages: ``[{"role": "user", "content": "…"}, …]``, or a list of such lists.
            tools: What the template tells the model of functions it may call; its answer is a text all the same.
            chat_template_kwargs: What else the template may ask for, like ``enable_thinking``.
        """
        chats = [messages] if messages and isinstance(messages[0], Mapping) else messages
        shared = {"tools": tools and list(tools), "chat_template_kwargs": chat_template_kwargs}
        return self._complete([{"messages": list(chat), **shared} for chat in chats], sampling_params, use_tqdm)

    def stats(self) -> EngineStats:
        """The engine's figures at this moment."""

        async def figures() -> EngineStats:
            return self._thread.gateway.stats()

        return self._thread.call(figures)

    def _complete(
        self,
        prompts: list[dict[str, Any]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        each = [params or SamplingParams()] * len(prompts) if isinstance(params, SamplingParams | None) else params
        _check_count(each, "sampling_params", prompts)
        requests = []
        for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            with _noting(index, len(prompts)):
                requests.append(own.request(**prompt))
        display = ProgressDisplay() if use_tqdm and len(requests) > 1 else None
        return self._thread.call(lambda: self._run(requests, display))

    async def _run(self, requests: list[CompletionRequest], display: ProgressDisplay | None) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        ids = [str(next(self._request_ids)) for _ in requests]

        async def prepare(index: int, request: CompletionRequest) -> Prepared:
            with _noting(index, len(requests)):
                return await self._thread.gateway.prepare(request)

        async def run(index: int, prepared: Prepared) -> None:
            with _noting(index, len(requests)):
                outputs[index] = await self._run_one(ids[index], prepared)
            if display is not None:
                display.show("generate", len(outputs), len(requests), "prompts")

        try:
            # All of them before any is answered: a prompt that cannot work is not found after an hour of others.
            async with asyncio.TaskGroup() as group:
                preparing = [group.create_task(prepare(index, request)) for index, request in enumerate(requests)]
            # In order of priority here too, for not all of them may be waiting in the engine.
            order = sorted(range(len(requests)), key=lambda index: requests[index].priority)
            async with asyncio.TaskGroup() as group:
                for index in order:
                    await self._places.acquire()
                    task = group.create_task(run(index, preparing[index].result()))
                    task.add_done_callback(lambda _: self._places.release())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            if display is not None:
                display.close()
        return [outputs[index] for index in range(len(requests))]

    async def _run_one(self, request_id: str, prepared: Prepared) -> RequestOutput:
        codec = self._thread.gateway.codec
        completion = self._thread.gateway.submit(prepared)
        result: CompletionResult | None = None
        try:
            async for event in completion:
                if isinstance(event, CompletionResult):
                    result = event
        finally:
            completion.abort()
        if result is None:
            raise AbortedError("the request ended without a result")
        return RequestOutput(
            request_id=request_id,
            prompt=completion.prompt,
            prompt_token_ids=list(completion.prompt_ids),
            outputs=[
                CompletionOutput(
                    index=index,
                    text=output.text,
                    token_ids=list(output.token_ids),
                    finish_reason=output.finish_reason,
                    stop_reason=output.stop_reason,
                    logprobs=None if output.logprobs is None else [_by_id(token, codec) for token in output.logprobs],
                    cumulative_logprob=None
                    if output.logprobs is None
                    else fsum(token.logprob for token in output.logprobs),
                )
                for index, output in enumerate(result.outputs)
            ],
            metrics=result.metrics,
            prompt_logprobs=None
            if result.prompt_logprobs is None
            else [None if token is None else _by_id(token, codec) for token in result.prompt_logprobs],
        )


def _by_id(token: TokenLogprob, codec: TextCodec | None) -> Logprobs:
    found = {token.token_id: (token.logprob, token.rank)}
    found |= {id: (logprob, rank) for rank, (id, logprob) in enumerate(token.top, start=1)}
    return {id: Logprob(*values, codec.token_text(id) if codec else None) for id, values in found.items()}


def _check_count(each: Sequence[Any], name: str, prompts: Sequence[Any]) -> None:
    if len(each) != len(prompts):
        raise InvalidRequestError(f"{len(each)} {name} for {len(prompts)} prompts", param=name)


@contextmanager
def _noting(index: int, count: int) -> Iterator[None]:
    """Says with an error of one prompt's own which of several it is."""
    try:
        yield
    except RequestError as error:
        if count > 1 and not isinstance(error, StageFailedError | AbortedError):
            error.add_note(f"prompt number {index}, counted from 0")
        raise


def _each(prompts: Prompt | Iterable[Prompt]) -> list[Any]:
    """One prompt is a list of one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    several = list(prompts)
    return [several] if several and hasattr(several[0], "__index__") else several  # numpy's and torch's numbers too


def _request_fields(prompt: Prompt) -> dict[str, Any]:
    """The prompt as CompletionRequest takes it."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    ids: Any = prompt
    if isinstance(prompt, Mapping):
        if list(prompt) == ["prompt"]:
            return dict(prompt)
        if list(prompt) != ["prompt_token_ids"]:
            raise InvalidRequestError(
                "a prompt is a text, a list of token ids, {'prompt': …} or {'prompt_token_ids': […]}, "
                f"not a mapping with {', '.join(map(repr, prompt)) or 'nothing in it'}",
                param="prompt",
            )
        ids = prompt["prompt_token_ids"]  # type: ignore[typeddict-item]
    try:
        return {"prompt_tokens": [operator.index(token) for token in ids]}
    except TypeError as error:
        raise InvalidRequestError(f"token ids are integers: {error}", param="prompt_token_ids") from None
