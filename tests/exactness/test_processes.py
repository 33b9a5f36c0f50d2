"""The default model in one to four stage processes, float32, on 3000 real tokens: the oracle's tokens.

Same weights, prompt and policy as test_default_model.py, which holds the logits; here everything is real that lies
between a request and its tokens: coordinator, sockets, gloo, processes. One token a chunk over the whole prompt takes
minutes per case, so that is done in full only with ACTORPP_TEST_FULL=1.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from actorpp.config import EngineConfig
from actorpp.coordinator.chunking.fixed import FixedChunks
from actorpp.coordinator.chunking.policy import ChunkRequest
from actorpp.engine import Engine
from actorpp.serving.api import Finished, GenerationParams, Tokens
from actorpp.transport.sockets import close_context
from tests.exactness.chain import Chain
from tests.exactness.oracle import Answer
from tests.exactness.policy import TokenTally
from tests.exactness.prompts import LENGTH, NEW_TOKENS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FULL = bool(os.environ.get("ACTORPP_TEST_FULL"))


@dataclass(frozen=True)
class Singles:
    """One token a chunk, for the first ``count`` tokens; then the rest in one."""

    count: int
    size: ClassVar[int] = 1  # of the first chunk

    def next_chunk(self, request: ChunkRequest, history_len: int, remaining: int, budget: int) -> int:
        return 1 if history_len < self.count else remaining


POLICIES = {
    "one token": Singles(LENGTH if FULL else 40),
    "64": FixedChunks(64),
    "701": FixedChunks(701),
    "the whole prompt": FixedChunks(LENGTH),
}


async def complete(engine: Engine, ids: list[int], count: int) -> tuple[list[int], Finished]:
    """Greedy tokens, and how it ended."""
    tokens: list[int] = []
    async for event in engine.submit(ids, GenerationParams(max_tokens=count, ignore_eos=True)):
        match event:
            case Tokens(new):
                tokens += new
            case Finished():
                return tokens, event
    raise AssertionError("no final event")


@pytest.fixture(autouse=True)
def _no_context_left() -> Iterator[None]:
    """ZeroMQ's context is the process's own; a program that embeds an engine closes it when it likes."""
    yield
    close_context()


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_every_number_of_processes_gives_the_oracles_tokens(
    stages: int, default_model: Path, prompt_3000: list[int], answers: dict[str, Answer], tally: TokenTally
) -> None:
    async def main() -> None:
        config = EngineConfig(model=str(default_model), stages=stages, dtype="float32", chunked_prefill_size=LENGTH)
        async with Engine(config) as engine:
            for name, policy in POLICIES.items():
                engine.scheduler.policy = policy
                tokens, end = await complete(engine, prompt_3000, NEW_TOKENS)
                assert sum(end.metrics.chunks) == LENGTH
                assert end.metrics.chunks[0] == policy.size
                oracle = answers["float32"]
                tally.check(f"{stages} processes, chunks of {name}", tokens, oracle.tokens, oracle.logits)
            assert engine.stats().pages_used == 0

    asyncio.run(main())


def test_bfloat16_processes_compute_what_the_measured_stages_do(default_model: Path, prompt_3000: list[int]) -> None:
    """Clause (c) is measured on stages chained by hand (test_default_model.py); the same plan gives the same tokens."""
    ids, chunk = prompt_3000[:900], 60
    chain = Chain(default_model, 2, dtype="bfloat16", page_size=16, num_pages=70)
    chain.admit(1, ids, range(70))
    chain.prefill(1, len(ids), chunk)
    expected = chain.decode(1, len(ids), NEW_TOKENS)

    async def main() -> list[int]:
        config = EngineConfig(
            model=str(default_model), stages=2, dtype="bfloat16", chunked_prefill_size=chunk, threads_per_stage=1
        )
        async with Engine(config) as engine:
            return (await complete(engine, ids, NEW_TOKENS))[0]

    assert asyncio.run(main()) == expected


def test_a_stage_materialises_its_own_layers_only(default_model: Path) -> None:
    """Bytes of tensors loaded, and resident memory: a stage of four is smaller than the whole by what it lacks."""

    async def measure(stages: int) -> tuple[list[int], list[int]]:
        config = EngineConfig(model=str(default_model), stages=stages, dtype="float32", kv_tokens=64)
        async with Engine(config) as engine:
            stats = engine.stats()
            resident = [psutil.Process(stage.pid).memory_full_info().uss for stage in stats.stages]
            return [stage.weight_bytes for stage in stats.stages], resident

    (whole,), (whole_resident,) = asyncio.run(measure(1))
    parts, resident = asyncio.run(measure(4))
    config = json.loads((default_model / "config.json").read_text())
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_key_value_heads"] / config["num_attention_heads"]
    layer = 4 * (2 * hidden**2 + 2 * hidden * hidden * heads + 3 * hidden * inner + 2 * hidden)
    embedding = 4 * vocab * hidden
    norm = 4 * hidden
    assert parts == [7 * layer + embedding, 7 * layer, 8 * layer, 8 * layer + embedding + norm]
    assert whole == 30 * layer + embedding + norm
    for part, own in zip(parts, resident, strict=True):
        assert whole_resident - own > 0.8 * (whole - part), f"{own >> 20} of {whole_resident >> 20} MiB resident"
