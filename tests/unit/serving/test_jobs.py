"""What is kept of requests that have ended: their output, and nothing of their prompts or of those who asked for it."""

from __future__ import annotations

import asyncio
import gc
import traceback
import weakref

import pytest

from actorpp.config import EngineConfig
from actorpp.errors import StageFailedError
from actorpp.serving.answers import news
from actorpp.serving.gateway import Gateway
from actorpp.serving.jobs import JobLimits, Jobs
from actorpp.serving.request import parse_request
from tests.unit.serving.fakes import FakeEngine, FakeHandle


def frames(error: BaseException | None) -> int:
    return len(traceback.extract_tb(error.__traceback__)) if error is not None else 0


@pytest.mark.parametrize("failing", [False, True])
def test_a_request_that_has_ended_holds_no_prompt_and_nobody_who_was_told(failing: bool) -> None:
    async def main() -> None:
        engine = FakeEngine(EngineConfig(), hold=frozenset({"decode"}))
        async with engine, Gateway(engine, "fake") as gateway, Jobs(gateway, JobLimits()) as jobs:
            request = parse_request({"prompt_tokens": [1, 2, 3], "max_tokens": 3})
            job = jobs.start("job", b"", request, None)
            await engine.reached["decode"].wait()
            handle: weakref.ref[FakeHandle] = weakref.ref(engine.submitted.pop())
            if failing:
                engine.fail(StageFailedError("stage 1 died"))
            else:
                engine.release()
            await job.until()
            await asyncio.sleep(0)  # the task that followed it ends
            gc.collect()
            assert handle() is None
            assert job.prompt_tokens == 3
            if not failing:
                assert news(job, 0, raw=False)[0].status == "end"
                return
            told = []
            for _ in range(3):
                with pytest.raises(StageFailedError):
                    news(job, len(job.deltas), raw=False)
                told.append(frames(job.error))
            assert told == [told[0]] * 3

    asyncio.run(main())
