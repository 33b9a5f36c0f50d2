"""Requests under way over HTTP: started together, answered whole or as a stream, ended with client or server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
import structlog

from actorpp.errors import AbortedError, ActorppError
from actorpp.serving.api import Progress
from actorpp.serving.completion import Completion, CompletionResult, Delta, merged
from actorpp.serving.gateway import Gateway
from actorpp.serving.http.answers import Shape, TextShape, Usage, encode, frame
from actorpp.serving.http.bodies import StreamOptions
from actorpp.serving.http.connection import DONE
from actorpp.serving.http.errors import error_object
from actorpp.serving.request import CompletionRequest

# Output of a chat that does not say how many tokens, at most: its KV pages are reserved when it is admitted.
MAX_UNASKED_TOKENS = 4096

STOPPING = "the server is stopping"

_log = structlog.get_logger(__name__)


class Run:
    """The requests of one HTTP request: one for each prompt."""

    def __init__(self, requests: Sequence[CompletionRequest], completions: Sequence[Completion]) -> None:
        self.requests = requests
        self.completions = completions

    @property
    def n(self) -> int:
        """Outputs of each prompt."""
        return self.requests[0].n

    def abort(self) -> None:
        for completion in self.completions:
            completion.abort()


class Runs:
    """All of one server."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._running: set[Run] = set()
        self.stopped = asyncio.Event()

    def stop(self) -> None:
        """End everything: each client gets an error that says so."""
        self.stopped.set()
        for run in self._running:
            run.abort()

    async def start(self, requests: Sequence[CompletionRequest]) -> Run:
        """All of them, or none: what the engine refuses of one it refuses of all. ``end`` it, however it ends.

        Raises:
            RequestError: As from Gateway.complete.
        """
        completions: list[Completion] = []
        try:
            for request in requests:
                completions.append(await self._gateway.complete(request, room=MAX_UNASKED_TOKENS))
            if self.stopped.is_set():
                raise AbortedError(STOPPING)
        except BaseException:
            for completion in completions:
                completion.abort()
            raise
        run = Run(requests, completions)
        self._running.add(run)
        return run

    def end(self, run: Run) -> None:
        """Abort what has not ended."""
        run.abort()
        self._running.discard(run)

    async def whole(self, run: Run, shape: Shape) -> bytes:
        """The answer of a request without a stream. Raises RequestError."""
        results = await asyncio.gather(*(_result(completion) for completion in run.completions))
        usage = Usage()
        for result in results:
            _count(usage, result, shape)

        def build() -> bytes:
            return encode(
                shape.whole(
                    [
                        shape.choice(prompt * run.n + index, completion, result, output)
                        for prompt, (completion, result) in enumerate(zip(run.completions, results, strict=True))
                        for index, output in enumerate(result.outputs)
                    ],
                    usage,
                )
            )

        size = sum(
            len(c.prompt_ids) * (r.prompt_logprobs is not None) for c, r in zip(run.completions, results, strict=True)
        )
        return await self._gateway.off_loop(build, 64 * size)

    async def stream(self, run: Run, shape: Shape, options: StreamOptions, *, progress: bool) -> AsyncGenerator[bytes]:
        """Frames until ``[DONE]``. What fails in the middle is a frame of its own before it."""
        try:
            async with aclosing(self._chunks(run, shape, options, progress=progress)) as chunks:
                async for chunk in chunks:
                    yield frame(chunk)
        except ActorppError as error:
            yield frame(error_object(error))
        except Exception as fault:  # of ours: this client is told, the others do not notice
            _log.exception("stream failed")
            yield frame(error_object(ActorppError(f"internal error: {type(fault).__name__}")))
        yield DONE

    async def _chunks(
        self, run: Run, shape: Shape, options: StreamOptions, *, progress: bool
    ) -> AsyncGenerator[dict[str, object]]:
        usage = Usage()
        usage.prompt_tokens = sum(completion.prompt_tokens for completion in run.completions)
        more: dict[str, object] = {"usage": None} if options.include_usage else {}
        reached = PromptProgress(run)
        begun: set[int] = set()
        async with aclosing(merged(run.completions)) as events:
            async for prompt, event in events:
                match event:
                    case Progress():
                        reached.update(prompt, event)
                        if progress:
                            yield shape.chunk([], prompt_progress=reached.to_dict())
                    case Delta():
                        index = prompt * run.n + event.index
                        usage.completion_tokens += len(event.ids)
                        first = index not in begun
                        begun.add(index)
                        if first and isinstance(shape, TextShape) and shape.echo:
                            text, _ = shape.echoed(run.completions[prompt])
                            event = msgspec.structs.replace(event, text=text + event.text)
                        if options.continuous_usage_stats:
                            more = {"usage": usage.to_dict()}
                        yield shape.chunk([shape.delta(index, event, first=first)], **more)
                    case CompletionResult():
                        _refuse_aborted(event)
                        for index, output in enumerate(event.outputs):
                            yield shape.chunk([shape.end(prompt * run.n + index, output)], **more)
        if options.include_usage:
            yield shape.chunk([], usage=usage.to_dict())


class PromptProgress:
    """How much of the prompts has been computed, and about how many seconds the rest takes at the pace so far."""

    def __init__(self, run: Run) -> None:
        self._started_at = asyncio.get_running_loop().time()
        self._total = sum(completion.prompt_tokens for completion in run.completions)
        self._computed = [0] * len(run.completions)

    def update(self, prompt: int, progress: Progress) -> None:
        self._computed[prompt] = progress.computed

    def to_dict(self) -> dict[str, object]:
        processed = sum(self._computed)
        elapsed = asyncio.get_running_loop().time() - self._started_at
        return {
            "total": self._total,
            "processed": processed,
            "time_ms": round(1000 * elapsed),
            "remaining_s": round(elapsed * (self._total - processed) / processed, 3) if processed else None,
        }


async def _result(completion: Completion) -> CompletionResult:
    async for event in completion:
        if isinstance(event, CompletionResult):
            _refuse_aborted(event)
            return event
    raise AbortedError(STOPPING)


def _refuse_aborted(result: CompletionResult) -> None:
    """A client that leaves gets no answer, so an aborted one comes of the server's own end."""
    if any(output.finish_reason == "abort" for output in result.outputs):
        raise AbortedError(STOPPING)


def _count(usage: Usage, result: CompletionResult, shape: Shape) -> None:
    usage.prompt_tokens += result.prompt_tokens
    if not (isinstance(shape, TextShape) and shape.echo_only):
        usage.completion_tokens += sum(len(output.token_ids) for output in result.outputs)
