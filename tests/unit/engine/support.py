"""Runs a test's body with a gateway over the shipped engine, its stages on the same loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from actorpp.config import EngineConfig
from actorpp.engine import Engine
from actorpp.serving.completion import CompletionResult
from actorpp.serving.gateway import Gateway
from actorpp.serving.request import parse_request

PROMPT = [(7 * n + n * n) % 300 + 5 for n in range(60)]


def served(model: Path, body: Callable[[Gateway], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run ``body``; afterwards no KV page may be in use."""

    async def main() -> None:
        defaults = {"stages": 2, "dtype": "float32", "kv_tokens": 4096, "threads_per_stage": 1, "transport": "inproc"}
        config = EngineConfig(model=str(model), **defaults | options)
        async with Engine(config) as engine, Gateway(engine, "tiny") as gateway:
            await body(gateway)
            while engine.scheduler.in_flight:  # noqa: ASYNC110 - dead segments come back within milliseconds
                await asyncio.sleep(0)
            assert engine.stats().pages_used == 0

    asyncio.run(main())


async def complete(gateway: Gateway, **fields: Any) -> CompletionResult:
    """The result of one request, of ``PROMPT`` unless it has a prompt."""
    prompt = {} if "prompt" in fields else {"prompt_tokens": PROMPT}
    async for event in await gateway.complete(parse_request(prompt | fields)):
        if isinstance(event, CompletionResult):
            return event
    raise AssertionError("no result")
