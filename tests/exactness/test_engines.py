"""Tiny models of every type through the whole engine: requests of mixed lengths at once, every depth, real processes.

test_families.py holds the logits; here the coordinator makes the plan, and tokens are what is compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import cycle

import pytest

from actorpp.config import EngineConfig
from actorpp.engine import Engine
from actorpp.serving.api import Finished, GenerationParams, Tokens
from actorpp.transport.sockets import close_context
from tests.exactness.families import ONE_OF_EACH_TYPE, SHORT_NEW_TOKENS, Held
from tests.exactness.plans import DIMENSIONS
from tests.exactness.policy import TINY, TokenTally

pytestmark = pytest.mark.timeout(300)  # the first test waits for the oracle's answers about all families

DEPTHS = (0, 1, 2, 3, 4)
CIRCUMSTANCES = list(zip(cycle(DIMENSIONS["partition"]), cycle((16, 5, 64, 1)), cycle((16, 4)), DEPTHS * 8))


@pytest.fixture(scope="module")
def tally() -> Iterator[TokenTally]:
    counted = TokenTally(TINY)
    yield counted
    counted.finish()


async def complete(engine: Engine, ids: list[int]) -> list[int]:
    """Greedy tokens for one prompt."""
    tokens: list[int] = []
    async for event in engine.submit(ids, GenerationParams(max_tokens=SHORT_NEW_TOKENS, ignore_eos=True)):
        match event:
            case Tokens(new):
                tokens += new
            case Finished():
                return tokens
    raise AssertionError("no final event")


async def check(held: Held, tally: TokenTally, circumstances: str, **options: object) -> None:
    """All short prompts at once, and no page in use after them."""
    config = EngineConfig(
        model=str(held.path),
        dtype="float32",
        context_length=held.family.context_length,
        kv_tokens=1024,
        threads_per_stage=1,
        **options,
    )
    async with Engine(config) as engine:
        found = await asyncio.gather(*(complete(engine, ids) for ids, _ in held.short))
        assert engine.stats().pages_used == 0
    for tokens, (_, answer) in zip(found, held.short, strict=True):
        logits = answer.logits[:SHORT_NEW_TOKENS]
        tally.check(f"{held.name}, {circumstances}", tokens, answer.tokens[:SHORT_NEW_TOKENS], logits)


@pytest.mark.parametrize("which", range(2 * len(ONE_OF_EACH_TYPE)))
def test_requests_at_once_get_the_oracles_tokens_at_every_depth(
    which: int, held: dict[str, Held], tally: TokenTally
) -> None:
    one = held[ONE_OF_EACH_TYPE[which % len(ONE_OF_EACH_TYPE)]]
    layers, chunk, page_size, depth = CIRCUMSTANCES[which]
    options = {"layer_partition": layers, "chunked_prefill_size": chunk, "page_size": page_size, "async_depth": depth}
    asyncio.run(check(one, tally, str(options), transport="inproc", **options))


@pytest.mark.slow
def test_processes_give_the_oracles_tokens(held: dict[str, Held], tally: TokenTally) -> None:
    """Windows, sinks and experts, with hidden states over gloo."""
    options = {"layer_partition": (2, 3), "chunked_prefill_size": 16, "async_depth": 2}
    try:
        asyncio.run(check(held["gpt_oss"], tally, f"processes, {options}", transport="process", **options))
    finally:
        close_context()
