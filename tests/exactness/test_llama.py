"""Tiny random llamas, split over 1 to 4 stages, against transformers in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from actorpp.stages.kv import KVArena, PageTable, Run
from actorpp.stages.messages import FromOutput, Segment
from actorpp.stages.packed import PackedCache, pack
from tests.exactness.chain import Chain, recorded_logits
from tests.exactness.oracle import Answer, Case, ask
from tests.exactness.policy import TINY, TokenTally, check_bit_equal, check_logits
from tests.exactness.tiny import save_llama
from tests.support.workers import shared_folder

NEW_TOKENS = 24
LENGTH = 300
SHORT = (1, 17, 90)
CHUNKS = (1, 16, 64, 101, LENGTH)
PAGE = 16


@dataclass(frozen=True)
class Family:
    """One tiny checkpoint with its prompts and what the oracle says to them."""

    path: Path
    prompts: list[list[int]]
    answers: list[Answer]


def _prompts(prompt: list[int]) -> list[list[int]]:
    ids = [token % 320 for token in prompt]
    return [ids[:LENGTH], *(ids[500 + 7 * n : 500 + 8 * n] for n in SHORT)]


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory, prompt_3000: list[int]) -> dict[str, Family]:
    """Tied and untied, five layers, so that neither 2, 3 nor 4 stages divide them; a head for every key in one."""
    options: dict[str, dict[str, Any]] = {
        "tied": {"tied": True},
        "untied": {"seed": 1},
        "ungrouped": {"seed": 2, "num_key_value_heads": 4, "head_dim": 24, "attention_bias": True},
    }
    prompts = _prompts(prompt_3000)
    with shared_folder(tmp_path_factory, "llama") as root:
        paths = {name: root / name for name in options}
        for name, path in paths.items():
            if not path.exists():
                save_llama(path, **options[name])
        cases = [
            Case(f"{name}-{index}", str(path), "float32", ids, list(range(len(ids))), NEW_TOKENS)
            for name, path in paths.items()
            for index, ids in enumerate(prompts)
        ]
        answers = ask(cases, root)
    return {
        name: Family(path, prompts, [answers[f"{name}-{index}"] for index in range(len(prompts))])
        for name, path in paths.items()
    }


@pytest.fixture(scope="module")
def tally() -> Iterator[TokenTally]:
    counted = TokenTally(TINY)
    yield counted
    counted.finish()


@pytest.mark.parametrize("name", ["tied", "untied", "ungrouped"])
def test_oracle_tokens_are_varied_enough_to_see_faults(families: dict[str, Family], name: str) -> None:
    assert min(len(set(answer.tokens)) for answer in families[name].answers) >= 8


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", ["tied", "untied", "ungrouped"])
def test_every_split_gives_the_same_bits_and_the_oracles_tokens(
    families: dict[str, Family], tally: TokenTally, name: str, chunk: int
) -> None:
    """Clauses (a) and (b): 1 to 4 stages, one chunk size, greedy decoding after it."""
    family = families[name]
    ids, answer = family.prompts[0], family.answers[0]
    whole: torch.Tensor | None = None
    for stages in (1, 2, 3, 4):
        chain = Chain(family.path, stages, page_size=PAGE)
        chain.admit(1, ids, range(3, 3 + -(-(LENGTH + NEW_TOKENS) // PAGE)))
        with recorded_logits() as rows:
            chain.prefill(1, LENGTH, chunk)
            prefilled = len(rows)
            tokens = chain.decode(1, LENGTH, NEW_TOKENS)
        logits = torch.stack(rows)
        if whole is None:
            whole = logits
            ends = [min(at + chunk, LENGTH) - 1 for at in range(0, LENGTH, chunk)]
            check_logits(logits[:prefilled], answer.at_positions[ends], TINY)
            check_logits(logits[prefilled - 1 :], answer.logits, TINY)
        check_bit_equal(logits, whole)
        tally.check(f"{name}, chunk {chunk}, {stages} stages", tokens, answer.tokens, answer.logits)


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_requests_packed_into_one_step_do_not_see_each_other(
    families: dict[str, Family], tally: TokenTally, name: str
) -> None:
    """Chunks and decode tokens of four requests of 1 to 300 tokens share steps; pages lie interleaved."""
    family = families[name]
    chain = Chain(family.path, 3, page_size=PAGE, num_pages=256)
    pages = iter(range(200))
    lengths = [len(ids) for ids in family.prompts]
    for rid, ids in enumerate(family.prompts):
        count = -(-(len(ids) + NEW_TOKENS) // PAGE)
        chain.admit(rid, ids, [next(pages) for _ in range(2 * count)][:: 2 if rid % 2 else 1][:count])
    done = [0] * len(lengths)
    tokens: list[list[int]] = [[] for _ in lengths]
    source: dict[int, FromOutput] = {}
    while any(len(picked) < NEW_TOKENS for picked in tokens):
        segments = []
        for rid, length in enumerate(lengths):
            if len(tokens[rid]) == NEW_TOKENS:
                continue
            if done[rid] < length:
                size = min(37, length - done[rid])
                segments.append(Segment(rid, done[rid], size, None, done[rid] + size == length))
            else:
                segments.append(Segment(rid, done[rid], 1, source[rid], True))
            done[rid] += segments[-1].length
        output = chain.step(*segments)
        for index, segment in enumerate(segment for segment in segments if segment.sample):
            tokens[segment.rid].append(output.ids[index])
            source[segment.rid] = FromOutput(chain.seq, index)
    for rid, picked in enumerate(tokens):
        tally.check(f"{name}, packed request {rid}", picked, family.answers[rid].tokens, family.answers[rid].logits)


def test_replay_from_delivered_ids_continues_with_the_same_tokens(families: dict[str, Family]) -> None:
    """A new epoch: prompt and delivered ids come as one, and the rest of the answer is the same."""
    family = families["tied"]
    ids, answer = family.prompts[2], family.answers[2]
    chain = Chain(family.path, 2, page_size=PAGE)
    chain.admit(1, ids, range(10))
    chain.prefill(1, len(ids), 64)
    first = chain.decode(1, len(ids), 9)
    for host in chain.hosts:
        host.reset()
    chain.admit(1, [*ids, *first], range(20, 30), prompt_len=len(ids))
    chain.prefill(1, len(ids) + 9, 64)
    assert [*first, *chain.decode(1, len(ids) + 9, NEW_TOKENS - 9)] == answer.tokens


def test_both_backends_agree_with_the_oracle(families: dict[str, Family]) -> None:
    family = families["untied"]
    for backend in ("sdpa", "flash"):
        chain = Chain(family.path, 1, page_size=PAGE, attention_backend=backend)
        chain.admit(1, family.prompts[0], range(25))
        with recorded_logits() as rows:
            chain.prefill(1, LENGTH, 101)
        check_logits(torch.stack(rows), family.answers[0].at_positions[[100, 201, 299]], TINY)


def test_retired_pages_are_never_read(families: dict[str, Family]) -> None:
    """Pages of a retired request are poisoned with NaN; a request that takes them next is unharmed."""
    family = families["tied"]
    chain = Chain(family.path, 2, page_size=PAGE, poison_freed=True, num_pages=12)
    chain.admit(1, family.prompts[3], range(8))
    chain.prefill(1, len(family.prompts[3]), 64)
    chain.admit(2, family.prompts[2], range(8, 12))
    chain.step(Segment(2, 0, 17, None, True), retire=[1])
    assert all(bool(keys.isnan().all()) for host in chain.hosts for keys in host.arena.page(0))
    chain.admit(3, family.prompts[3], range(8))
    chain.prefill(3, len(family.prompts[3]), 50)
    assert chain.decode(3, len(family.prompts[3]), NEW_TOKENS) == family.answers[3].tokens


_table_runs = PageTable.runs


def _positions_restart(parts: Sequence[tuple[PageTable, int, int]], arena: KVArena) -> tuple[PackedCache, torch.Tensor]:
    cache, positions = pack(parts, arena)
    return cache, positions - positions[0, 0]


def _first_page_is_lost(table: PageTable, start: int, end: int) -> list[Run]:
    return _table_runs(table, PAGE if start == 0 and end > 101 else start, end)


@pytest.mark.parametrize(
    ("target", "fault"),
    [("actorpp.stages.exhaustion.pack", _positions_restart), ("actorpp.stages.kv.PageTable.runs", _first_page_is_lost)],
)
@pytest.mark.parametrize("name", ["tied", "untied", "ungrouped"])
def test_planted_fault_is_seen(families: dict[str, Family], name: str, target: str, fault: object) -> None:
    """What this suite is for: each fault breaks both the logits' tolerance and the tokens."""
    family = families[name]
    answer = family.answers[0]
    chain = Chain(family.path, 2, page_size=PAGE)
    chain.admit(1, family.prompts[0], range(25))
    with patch(target, fault), recorded_logits() as rows:
        chain.prefill(1, LENGTH, 101)
        tokens = chain.decode(1, LENGTH, NEW_TOKENS)
    with pytest.raises(AssertionError, match="logits differ"):
        check_logits(torch.stack(rows[2:]), answer.logits, TINY)
    with pytest.raises(AssertionError, match="the oracle's"):
        TokenTally(TINY).check(name, tokens, answer.tokens, answer.logits)
