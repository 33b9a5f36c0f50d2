"""A request that has ended is let go at once, and its prompt with it: Python's collector, which comes when there are
many new objects, knows nothing of how large they are."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

from actorpp.coordinator.request import Request
from actorpp.engine import Engine
from actorpp.errors import RequestError
from actorpp.serving.api import Finished, GenerationParams
from actorpp.serving.gateway import Gateway
from actorpp.serving.handle import Handle
from tests.unit.engine.support import PROMPT, complete, served


async def end(engine: Engine, params: GenerationParams, *, abort: bool = False) -> str:
    """How a request ends that is asked for here."""
    handle = engine.submit(PROMPT, params)
    try:
        async for event in handle:
            if abort:
                handle.abort()
            if isinstance(event, Finished):
                return event.reason
    except RequestError as error:
        return error.code
    raise AssertionError("no last event")


def existing() -> list[Request | Handle]:
    return [each for each in gc.get_objects() if type(each) in (Request, Handle)]


def test_nothing_of_a_request_waits_for_the_collector(model: Path) -> None:
    async def body(gateway: Gateway) -> None:
        engine = gateway.engine
        assert isinstance(engine, Engine)
        long = GenerationParams(max_tokens=500, ignore_eos=True)
        earlier = existing()  # of other tests
        known = set(map(id, earlier))
        gc.disable()
        try:
            assert (await complete(gateway, max_tokens=4, ignore_eos=True)).finish_reason == "length"
            assert await end(engine, long, abort=True) == "abort"
            assert await end(engine, GenerationParams(max_tokens=500, deadline_s=0.02)) == "deadline_exceeded"
            while engine.scheduler.in_flight:  # noqa: ASYNC110 - dead segments come back within milliseconds
                await asyncio.sleep(0)
            left = [type(each).__name__ for each in existing() if id(each) not in known]
        finally:
            gc.enable()
        assert left == []

    served(model, body)
