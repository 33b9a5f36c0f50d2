"""Tokens as they come, two requests at once, and one that is given up: the asynchronous engine."""

from __future__ import annotations

import asyncio

from actorpp import Engine, EngineConfig, Gateway
from actorpp.serving.completion import CompletionResult, Delta
from actorpp.serving.request import CompletionRequest


async def stream(gateway: Gateway, prompt: str, stop_after: int | None = None) -> None:
    """Print a completion piece by piece; after so many pieces, abort it."""
    completion = await gateway.complete(CompletionRequest(prompt=prompt, max_tokens=24))
    pieces = 0
    async for event in completion:
        match event:
            case Delta(text=text):
                print(f"{prompt!r} + {text!r}")
                pieces += 1
                if pieces == stop_after:
                    completion.abort()
            case CompletionResult(finish_reason=reason, token_ids=ids):
                print(f"{prompt!r} has ended: {reason}, {len(ids)} tokens")


async def main() -> None:
    async with Engine(EngineConfig(stages=2)) as engine, Gateway(engine, "default") as gateway:
        await asyncio.gather(
            stream(gateway, "The capital of France is"),
            stream(gateway, "One, two, three,", stop_after=5),
        )


if __name__ == "__main__":
    asyncio.run(main())
