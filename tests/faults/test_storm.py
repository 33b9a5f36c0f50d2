"""A storm of aborts over four stages: every request ends once, nothing stalls, nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

from actorpp.config import EngineConfig
from actorpp.engine import Engine
from actorpp.serving.api import Finished, GenerationParams
from tests.exactness.tiny import VOCAB, save_llama

ABORTS = 250
SECONDS = 7.5  # so many in 30 s are a thousand


def test_aborts_at_random_moments_leave_nothing_behind(tmp_path: Path) -> None:
    model = save_llama(tmp_path, tied=True, eos_token_id=2)
    generator = random.Random(0)
    params = GenerationParams(max_tokens=8, ignore_eos=True)
    ends: Counter[str] = Counter()

    async def complete(engine: Engine, abort_after: float | None) -> None:
        prompt = [generator.randrange(5, VOCAB) for _ in range(generator.randint(1, 80))]
        handle = engine.submit(prompt, params)
        if abort_after is not None:
            asyncio.get_running_loop().call_later(abort_after, handle.abort)
        async for event in handle:
            if isinstance(event, Finished):
                ends[event.reason] += 1

    async def main() -> None:
        config = EngineConfig(
            model=str(model),
            stages=4,
            transport="inproc",
            dtype="float32",
            kv_tokens=4096,
            threads_per_stage=1,
            chunked_prefill_size=32,
            max_queued_requests=ABORTS,
        )
        async with Engine(config) as engine, asyncio.timeout(20 * SECONDS):
            async with asyncio.TaskGroup() as group:
                for _ in range(ABORTS):
                    group.create_task(complete(engine, generator.uniform(0, 1)))
                    await asyncio.sleep(SECONDS / ABORTS)
            await complete(engine, None)
            while engine.scheduler.in_flight:  # noqa: ASYNC110 - dead segments come back within milliseconds
                await asyncio.sleep(0)
            stats = engine.stats()
            assert (stats.pages_used, stats.requests_running, stats.requests_waiting) == (0, 0, 0)
            assert stats.state == "ready"

    asyncio.run(main())
    assert ends.total() == ABORTS + 1
    assert ends["abort"] > ABORTS // 4
    assert ends["length"] >= 1
