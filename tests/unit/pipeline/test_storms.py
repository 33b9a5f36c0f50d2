"""Long sieges in virtual time: a queue at its limit for minutes, and thousands of tiny requests among a few long ones.

Shipped Coordinator and sessions; what aborts and deadlines meet is in test_random_lives.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from actorpp.errors import OverloadedError
from actorpp.runtime import ActorSystem
from actorpp.stages.messages import Step
from actorpp.testing import FakeNetwork, run
from tests.support.pipeline import Answer, SimulatedPipeline, expected_ids

Prompt = tuple[int, ...]


def prompt(number: int, length: int) -> Prompt:
    generator = random.Random(1000 * number + length)
    return tuple(generator.randrange(1000) for _ in range(length))


def with_pipeline(body: Callable[[SimulatedPipeline], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def main() -> None:
        async with ActorSystem() as system:
            pipeline = SimulatedPipeline(system, FakeNetwork(max_delay=0.001), stages=4, **options)
            await pipeline.open()
            await body(pipeline)
            await pipeline.finish()
            scheduler = pipeline.scheduler
            assert (scheduler.pool.used_pages, len(scheduler.running), len(scheduler.waiting)) == (0, 0, 0)
            assert pipeline.failures == []

    run(main)


def test_a_queue_at_its_limit_for_minutes_refuses_what_is_too_much_and_answers_the_rest_in_order() -> None:
    limit, running, minutes = 8, 4, 2.0

    async def body(pipeline: SimulatedPipeline) -> None:
        now = asyncio.get_running_loop().time
        scheduler = pipeline.scheduler
        asked: list[tuple[Prompt, float, Answer]] = []
        full = 0
        while now() < 60 * minutes:
            ids = prompt(len(asked), 32)
            asked.append((ids, now(), pipeline.submit(ids, 4)))
            await asyncio.sleep(0.1)  # far more than can be answered
            full += len(scheduler.waiting) == limit
            assert len(scheduler.waiting) <= limit
            assert len(scheduler.waiting) >= limit - running or now() < 5
        assert full > len(asked) / 2
        await pipeline.finish()
        taken = [(ids, arrival, answer) for ids, arrival, answer in asked if answer.end == "length"]
        refused = [(arrival, answer) for _, arrival, answer in asked if isinstance(answer.end, OverloadedError)]
        assert len(taken) + len(refused) == len(asked)
        assert min(len(taken), len(refused)) > 100
        assert all(answer.ended_at - arrival < 0.01 for arrival, answer in refused)
        assert all(tuple(answer.ids) == expected_ids(ids, 4) for ids, _, answer in taken)
        ends = [answer.ended_at for _, _, answer in taken]
        places = limit + running
        assert all(ended < ends[place + places] for place, ended in enumerate(ends[:-places]))  # nobody is passed by
        waits = [answer.ended_at - arrival for _, arrival, answer in taken]
        assert max(waits[len(waits) // 2 :]) < 1.5 * max(waits[: len(waits) // 2])  # it gets no worse with time

    with_pipeline(body, queued=limit, running=running, chunk=32)


def test_thousands_of_tiny_requests_among_a_few_of_8000_tokens_start_within_a_few_chunks_and_starve_none() -> None:
    chunk, tiny, long = 512, 2000, 3

    def seconds(stage: int, step: Step) -> float:
        return 0.02 + 0.0002 * step.num_tokens

    async def body(pipeline: SimulatedPipeline) -> None:
        now = asyncio.get_running_loop().time
        generator = random.Random(0)
        plan = [(generator.uniform(0, 100), generator.randint(1, 8), generator.randint(1, 2)) for _ in range(tiny)]
        plan += [(20.0 * number, 8000, 4) for number in range(long)]
        asked: list[tuple[int, float, Answer]] = []
        expected: list[Prompt] = []
        for number, (arrival, length, count) in enumerate(sorted(plan)):
            await asyncio.sleep(max(0.0, arrival - now()))
            ids = prompt(number, length)
            asked.append((length, now(), pipeline.submit(ids, count)))
            expected.append(expected_ids(ids, count))
        await pipeline.finish()
        for (_, _, answer), told in zip(asked, expected, strict=True):
            assert (answer.end, tuple(answer.ids)) == ("length", told)
        one = seconds(0, Step(0, 0, 0, ())) + 0.0002 * chunk  # of a chunk on a stage
        tokens_2 = 2 * (pipeline.stages + 1)  # a decode step goes through all stages too
        waits = [answer.ended_at - arrival for length, arrival, answer in asked if length <= 8]
        assert max(waits) < (pipeline.scheduler.config.window + 2 + tokens_2) * one
        for length, arrival, answer in asked:
            if length == 8000:
                alone = (length / chunk + pipeline.stages) * one
                assert answer.ended_at - arrival < 6 * alone

    with_pipeline(body, running=64, queued=256, chunk=chunk, pages=4 * 8000 // 16, seconds=seconds)
