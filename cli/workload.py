"""Random prompts of one shape, put through an engine and timed. What is printed of it is not said here."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from time import monotonic

import msgspec

from actorpp.analysis.efficiency import PipelineFigures, pipeline_figures
from actorpp.analysis.steps import traced_steps
from actorpp.analysis.trace import Trace
from actorpp.engine import Engine
from actorpp.errors import AbortedError, ConfigError
from actorpp.progress import ProgressDisplay
from actorpp.serving.activity import RequestRecord, StepRecord
from actorpp.serving.api import Finished, GenerationParams, RequestMetrics


@dataclass(frozen=True)
class Workload:
    """``num_prompts`` requests, at most ``concurrency`` of them at once, of random ids; sizes in tokens."""

    input_len: int
    output_len: int
    num_prompts: int
    concurrency: int

    @property
    def name(self) -> str:
        """Short, for a person."""
        return f"ISL {self.input_len}, OSL {self.output_len}, conc. {self.concurrency}"

    def check(self, context_length: int) -> None:
        """Raises ConfigError when a request would not fit the context."""
        if self.input_len + self.output_len > context_length:
            raise ConfigError(
                f"--input-len {self.input_len} and --output-len {self.output_len}: "
                f"together more than the context of {context_length} tokens",
                param="input_len",
            )

    def prompts(self, vocab_size: int, seed: str) -> list[list[int]]:
        """New ones for every seed, so that nothing computed before helps."""
        source = random.Random(seed)
        return [source.choices(range(vocab_size), k=self.input_len) for _ in range(self.num_prompts)]


class Iteration(msgspec.Struct, frozen=True):
    """One pass of a workload.

    Attributes:
        duration_s: From the first submission to the last request's end.
        requests: In order of submission.
        itls: Seconds from each output token of a request to the next one, over all of them.
        pipeline: Of all steps of the pass.
    """

    duration_s: float
    requests: tuple[RequestMetrics, ...]
    itls: tuple[float, ...]
    pipeline: PipelineFigures


class _Gaps:
    """Keeps what the engine says of the time between tokens; an observer of its activity."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_token_gap(self, seconds: float) -> None:
        self.seconds.append(seconds)

    def on_step(self, step: StepRecord) -> None:
        """Not asked for."""

    def on_first_token(self, seconds: float) -> None:
        """In the request's own figures."""

    def on_ended(self, request: RequestRecord) -> None:
        """Its events say so."""


async def run_once(engine: Engine, workload: Workload, seed: str) -> tuple[Iteration, Trace]:
    """Put the workload through an engine that was started with ``trace=True`` and does nothing else.

    Raises:
        RequestError: A request failed, or does not fit the engine.
    """
    prompts = workload.prompts(engine.checkpoint.vocab_size, seed)
    params = GenerationParams(max_tokens=workload.output_len, ignore_eos=True)
    places = asyncio.Semaphore(workload.concurrency)
    metrics: dict[int, RequestMetrics] = {}
    gaps = _Gaps()

    async def run(index: int, prompt: list[int]) -> None:
        async with places:
            handle = engine.submit(prompt, params)
            try:
                async for event in handle:
                    if isinstance(event, Finished):
                        metrics[index] = event.metrics
            finally:
                handle.abort()

    await engine.trace()  # forgets what came before
    engine.activity.observers.append(gaps)
    begin = monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            for index, prompt in enumerate(prompts):
                group.create_task(run(index, prompt))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        engine.activity.observers.remove(gaps)
    duration = monotonic() - begin
    trace = await engine.trace()
    steps = traced_steps(trace.stages)
    if len(metrics) < len(prompts) or not steps:
        raise AbortedError("the engine ended before the workload")
    requests = tuple(metrics[index] for index in range(len(prompts)))
    return Iteration(duration, requests, tuple(gaps.seconds), pipeline_figures(steps)), trace


async def measure(
    engine: Engine, workload: Workload, *, warmup: int, iterations: int, display: ProgressDisplay | None = None
) -> tuple[list[Iteration], Trace]:
    """Run the workload ``warmup`` times, then ``iterations`` times. Returns these, and the last one's trace."""
    found: list[Iteration] = []
    trace: Trace | None = None
    for index in range(warmup + iterations):
        warming = index < warmup
        done, total = (index, warmup) if warming else (index - warmup, iterations)
        if display is not None:
            display.show("warm-up" if warming else "measure", done, total, "iterations")
        iteration, trace = await run_once(engine, workload, f"{engine.config.seed or 0}/{index}")
        if not warming:
            found.append(iteration)
        if display is not None:
            display.show("warm-up" if warming else "measure", done + 1, total, "iterations")
    if trace is None:
        raise ValueError("nothing was to be measured")
    return found, trace
