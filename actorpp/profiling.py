"""Measures a pipeline's stage times on a live engine, over histories and chunk sizes: a ``Profile``.

It computes prompts of random ids as ordinary requests, cut as it says: they pass all stages at once, as real ones do.
First every size once, cold, and not counted; then first chunks of many lengths; then long prompts whose chunks have all
sizes in a mixed order, so that each size is met behind short and long histories. Pages are free afterwards, and prompts
that others send meanwhile are cut as before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

from actorpp.coordinator.chunking.fit import StageSample
from actorpp.coordinator.chunking.policy import ChunkPolicy, ChunkRequest
from actorpp.coordinator.chunking.profile import Profile
from actorpp.coordinator.scheduler import Scheduler
from actorpp.errors import ProfilingError, RequestError
from actorpp.planning import Planning
from actorpp.serving.api import Finished, GenerationParams, Progress
from actorpp.serving.handle import Handle
from actorpp.stages.checkpoint import Checkpoint

LONGEST_PROMPT = 16384  # tokens; longer histories follow from the formula
LONGEST_FIRST_CHUNK = 4096
FIRST_CHUNKS = 12
LONG_PROMPTS = 2
SIZES = (64, 128, 256, 512, 1024, 2048)
LEAST_SAMPLES = 8


class Profiled(Protocol):
    """What of an engine is needed here."""

    @property
    def scheduler(self) -> Scheduler: ...

    planning: Planning

    @property
    def checkpoint(self) -> Checkpoint: ...
    def submit(self, prompt_ids: Sequence[int], params: GenerationParams) -> Handle: ...


async def measure_profile(engine: Profiled, *, on_progress: Callable[[int, int], None] | None = None) -> Profile:
    """Measure, and fit. Nothing is saved: ``Profile.save`` does.

    Args:
        engine: It should do nothing else meanwhile.
        on_progress: Called with the prompt tokens computed and to compute.

    Raises:
        ProfilingError: The engine is busy, too small to give samples, or a prompt failed.
    """
    scheduler, planning = engine.scheduler, engine.planning
    if scheduler.requests():
        raise ProfilingError("the engine is busy: a profile is measured when it has nothing else to do")
    room = min(planning.context_length, scheduler.pool.num_pages * scheduler.config.page_size)
    room -= 1 + scheduler.config.async_depth  # for the token that each prompt samples
    prompts = list(_prompts(min(room, LONGEST_PROMPT), planning.max_chunk))
    if sum(map(len, prompts)) < LEAST_SAMPLES:
        raise ProfilingError(f"there is no room for a profile: {room} tokens of context and KV cache")
    total = sum(map(sum, prompts))
    own = _OwnPrompts(scheduler.policy)
    generator = random.Random(0)
    vocabulary = engine.checkpoint.vocab_size
    samples: list[StageSample] = []
    done = 0
    scheduler.policy = own
    try:
        for index, chunks in enumerate(prompts):
            ids = [generator.randrange(vocabulary) for _ in range(sum(chunks))]
            handle = engine.submit(ids, GenerationParams(max_tokens=1, ignore_eos=True))
            own.plans[int(handle.id)] = list(reversed(chunks))
            measured = await _samples(handle, partial(_report, on_progress, done, total))
            if index:  # the first one warms up
                samples += measured
            done += len(ids)
    finally:
        scheduler.policy = own.policy
    if len(samples) < LEAST_SAMPLES:
        raise ProfilingError(f"{len(samples)} steps held one chunk and nothing else; {LEAST_SAMPLES} are needed")
    return Profile.of(planning.key, tuple(samples))


def _prompts(longest: int, largest: int) -> Iterator[list[int]]:
    """The chunks of every prompt, the warm-up first."""
    sizes = [size for size in SIZES if size <= min(largest, longest)]
    warm_up: list[int] = []
    for size in reversed(sizes):
        if sum(warm_up) + size <= longest:
            warm_up.append(size)
    yield warm_up or [min(largest, longest)]
    most = min(largest, longest, LONGEST_FIRST_CHUNK)
    for length in sorted({max(1, most * n // FIRST_CHUNKS) for n in range(1, FIRST_CHUNKS + 1)}):
        yield [length]
    for seed in range(LONG_PROMPTS):
        generator = random.Random(seed)
        chunks: list[int] = []
        left = longest
        while sizes and left >= sizes[0]:
            round_of_sizes = generator.sample(sizes, len(sizes))
            fitting = [size for size in round_of_sizes if size <= left]
            for size in fitting:
                if size <= left:
                    chunks.append(size)
                    left -= size
        if chunks:
            yield chunks


async def _samples(handle: Handle, on_progress: Callable[[int], None]) -> list[StageSample]:
    """What the chunks of one prompt took, where a step held nothing else."""
    try:
        async for event in handle:
            if isinstance(event, Progress):
                on_progress(event.computed)
            if isinstance(event, Finished):
                times = event.metrics.chunk_times
                last = len(times) - 1
                return [
                    StageSample(chunk.history, chunk.tokens, index == last, chunk.measured_s)
                    for index, chunk in enumerate(times)
                    if chunk.alone and chunk.measured_s is not None
                ]
    except RequestError as error:
        raise ProfilingError(f"a prompt failed: {error}") from error
    finally:
        handle.abort()
    raise ProfilingError("a prompt ended without a result")


def _report(on_progress: Callable[[int, int], None] | None, before: int, total: int, computed: int) -> None:
    if on_progress is not None:
        on_progress(before + computed, total)


class _OwnPrompts:
    """Cuts this module's prompts as it says, and others as before."""

    def __init__(self, policy: ChunkPolicy) -> None:
        self.policy = policy
        self.plans: dict[int, list[int]] = {}  # by rid: chunks left, the next one last

    def next_chunk(self, request: ChunkRequest, history_len: int, remaining: int, budget: int) -> int:
        plan = self.plans.get(request.rid)
        if not plan:
            return self.policy.next_chunk(request, history_len, remaining, budget)
        if request.step_tokens:
            return 0
        return min(plan.pop(), remaining, budget)
