"""Measures a pipeline's stage times on a live engine, over histories and chunk sizes: a ``Profile``.

It computes prompts of random ids as ordinary requests, cut as it says: they pass all stages at once, as real ones do.
First every size once, cold, and not counted. Then the grid, in several passes: first chunks of many lengths, and a long
prompt whose chunks have all sizes in a mixed order, so that each size is met behind short and long histories. A pass
takes seconds and has an order of its own, and the median over the passes counts: what slows the machine for a while
falls on other chunks each time. Some prompts are under way at once, so that every chunk is timed while the other stages
compute as well: where they share memory or cores, it takes longer then. Pages are free afterwards, and prompts that
others send meanwhile are cut as before.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np
import structlog

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
FIRST_CHUNKS = 10
SIZES = (64, 128, 256, 512, 1024, 2048)
PASSES = 3
LEAST_SAMPLES = 8
LEAST_PROMPT, LEAST_CHUNK = 4096, 1024  # tokens that a profile covers if it is kept, or half the model's context

log = structlog.get_logger(__name__)


class Profiled(Protocol):
    """What of an engine is needed here."""

    @property
    def scheduler(self) -> Scheduler: ...

    planning: Planning

    @property
    def checkpoint(self) -> Checkpoint: ...
    def submit(self, prompt_ids: Sequence[int], params: GenerationParams) -> Handle: ...


async def measure_profile(engine: Profiled, *, on_progress: Callable[[int, int], None] | None = None) -> Profile:
    """Measure, and fit; a fit that is not to be trusted is a warning in the log. ``keep_profile`` saves it.

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
    longest = min(room, LONGEST_PROMPT)
    grid = _grid(longest, planning.max_chunk) if longest > 0 else []
    if sum(map(len, grid)) < LEAST_SAMPLES:
        raise ProfilingError(f"there is no room for a profile: {room} tokens of context and KV cache")
    warm_up = _warm_up(longest, planning.max_chunk)
    counted = list(chain.from_iterable(random.Random(number).sample(grid, len(grid)) for number in range(PASSES)))
    total = sum(map(sum, [warm_up, *counted]))
    own = _OwnPrompts(scheduler.policy)
    generator = random.Random(0)

    def submit(chunks: Sequence[int]) -> Handle:
        ids = [generator.randrange(engine.checkpoint.vocab_size) for _ in range(sum(chunks))]
        handle = engine.submit(ids, GenerationParams(max_tokens=1, ignore_eos=True))
        own.plans[int(handle.id)] = list(reversed(chunks))
        return handle

    at_once = min(scheduler.config.num_stages + 1, scheduler.config.max_running_requests)  # no stage shall be idle
    under_way: deque[Handle] = deque()
    measured: list[StageSample] = []
    scheduler.policy = own
    try:
        await _samples(submit(warm_up), partial(_report, on_progress, 0, total))
        done = sum(warm_up)
        under_way.extend(map(submit, counted[:at_once]))
        for number, chunks in enumerate(counted):
            measured += await _samples(under_way.popleft(), partial(_report, on_progress, done, total))
            done += sum(chunks)
            under_way.extend(map(submit, counted[number + at_once : number + at_once + 1]))
    finally:
        scheduler.policy = own.policy
        for handle in under_way:
            handle.abort()
    medians = _medians(measured)
    if len(medians) < LEAST_SAMPLES:
        raise ProfilingError(f"{len(medians)} chunks had a step to themselves; {LEAST_SAMPLES} are needed")
    profile = Profile(planning.key, medians)
    if profile.doubts:
        advice = "run `actorpp profile` when the machine does nothing else"
        log.warning("the profile fits badly", reason="; ".join(profile.doubts), advice=advice)
    return profile


def keep_profile(engine: Profiled, profile: Profile) -> Path:
    """Save the profile where every engine with this pipeline finds it, whatever its limits. Returns the file.

    Raises:
        ProfilingError: It covers too little for the others, since this engine's limits are small.
        OSError: It cannot be written.
    """
    half = engine.checkpoint.max_position_embeddings // 2
    prompt = max(sample.history + sample.tokens for sample in profile.samples)
    chunk = max(sample.tokens for sample in profile.samples)
    if prompt < min(LEAST_PROMPT, half) or chunk < min(LEAST_CHUNK, half):
        raise ProfilingError(
            f"it covers prompts up to {prompt} tokens and chunks up to {chunk}, too little for engines with larger "
            "limits: leave out --context-length, --kv-tokens and the limits of chunks and steps, or raise them"
        )
    return profile.save()


def _warm_up(longest: int, largest: int) -> list[int]:
    """The chunks of a prompt with every size that has room, the largest first."""
    chunks: list[int] = []
    for size in reversed(SIZES):
        if size <= largest and sum(chunks) + size <= longest:
            chunks.append(size)
    return chunks or [min(largest, longest)]


def _grid(longest: int, largest: int) -> list[list[int]]:
    """The chunks of every prompt that counts."""
    most = min(largest, longest, LONGEST_FIRST_CHUNK)
    prompts = [[length] for length in sorted({max(1, most * n // FIRST_CHUNKS) for n in range(1, FIRST_CHUNKS + 1)})]
    sizes = [size for size in SIZES if size <= min(largest, longest)]
    generator = random.Random(0)
    chunks: list[int] = []
    left = longest
    while sizes and left >= sizes[0]:
        for size in generator.sample(sizes, len(sizes)):
            if size <= left:
                chunks.append(size)
                left -= size
    return [*prompts, chunks] if chunks else prompts


def _medians(measured: Sequence[StageSample]) -> tuple[StageSample, ...]:
    """One sample for each chunk: on every stage the median of its times."""
    times: dict[tuple[int, int, bool], list[tuple[float, ...]]] = {}
    for sample in measured:
        times.setdefault((sample.history, sample.tokens, sample.samples), []).append(sample.seconds)
    return tuple(
        StageSample(*chunk, tuple(np.median(several, axis=0).tolist())) for chunk, several in sorted(times.items())
    )


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
