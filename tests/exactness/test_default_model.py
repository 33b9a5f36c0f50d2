"""The embedded default model on 3000 real tokens, split and chunked, against transformers in a process of its own.

The stages run in this process, one after another, all with as many threads: bits may depend on it. One token a step
over the whole prompt takes minutes, so that is done in full only on demand.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tests.exactness.chain import Chain, recorded_logits
from tests.exactness.oracle import Answer
from tests.exactness.policy import DEFAULT_MODEL, TokenTally, check_bfloat16, check_bit_equal, check_logits
from tests.exactness.prompts import CHUNKS, ENDS, LENGTH, NEW_TOKENS, SMALL, rows
from tests.support.workers import THREADS

PAGES = range(2, 2 + -(-(LENGTH + NEW_TOKENS) // 64))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _run(chain: Chain, ids: list[int], chunk: int, forced: list[int] | None = None) -> torch.Tensor:
    """Logits of every chunk's end, then of the generated tokens, of which the first is the last chunk's end."""
    chain.admit(1, ids, PAGES)
    with recorded_logits() as recorded:
        chain.prefill(1, LENGTH, chunk)
        chain.decode(1, LENGTH, NEW_TOKENS, forced or [])
    for host in chain.hosts:
        host.reset()
    return torch.stack(recorded)


def _check_generated(logits: torch.Tensor, oracle: Answer, tally: TokenTally, name: str) -> None:
    check_logits(logits, oracle.logits, DEFAULT_MODEL)
    tally.check(name, logits.argmax(dim=-1).tolist(), oracle.tokens, oracle.logits)


def test_one_stage_with_every_chunk_size_gives_the_oracles_tokens(
    default_model: Path, prompt_3000: list[int], answers: dict[str, Answer], tally: TokenTally
) -> None:
    """Clause (b), for chunks of 64, 701 and the whole prompt, with greedy decoding after each."""
    chain = Chain(default_model, 1, threads=THREADS)
    for chunk in CHUNKS:
        logits = _run(chain, prompt_3000, chunk)
        ends = rows(chunk)
        check_logits(logits[: len(ends)], answers["float32"].at_positions[ends], DEFAULT_MODEL)
        _check_generated(logits[len(ends) - 1 :], answers["float32"], tally, f"chunk {chunk}")


def test_one_to_four_stages_give_the_same_bits(
    default_model: Path, prompt_3000: list[int], answers: dict[str, Answer]
) -> None:
    """Clause (a), over two chunks and some decoding."""
    whole: torch.Tensor | None = None
    for stages in (1, 2, 3, 4):
        chain = Chain(default_model, stages, threads=THREADS)
        chain.admit(1, prompt_3000, PAGES)
        with recorded_logits() as recorded:
            chain.prefill(1, 1402, 701)
            chain.decode(1, 1402, 4)
        logits = torch.stack(recorded)
        whole = logits if whole is None else whole
        check_bit_equal(logits, whole)
    check_logits(whole[:1], answers["float32"].at_positions[ENDS.index(700)][None], DEFAULT_MODEL)


def test_chunks_of_one_token(
    default_model: Path, prompt_3000: list[int], answers: dict[str, Answer], tally: TokenTally
) -> None:
    """Positions go the way of decode tokens: all of them, one a step, if ACTORPP_TEST_FULL is set; else the first 1000,
    a hundred a step, and then one chunk for the rest.
    """
    full = bool(os.environ.get("ACTORPP_TEST_FULL"))
    chain, single = Chain(default_model, 4, threads=THREADS), LENGTH if full else 1000
    chain.admit(1, prompt_3000, PAGES)
    with recorded_logits() as recorded:
        chain.prefill(1, single, 1, per_step=1 if full else 100)
        if not full:
            chain.prefill(1, LENGTH, LENGTH, start=single)
        chain.decode(1, LENGTH, NEW_TOKENS)
    seen = [index for index, end in enumerate(ENDS) if end < single]
    oracle = answers["float32"]
    check_logits(torch.stack([recorded[ENDS[index]] for index in seen]), oracle.at_positions[seen], DEFAULT_MODEL)
    _check_generated(torch.stack(recorded[-NEW_TOKENS:]), oracle, tally, "chunk 1")


def test_bfloat16_error_is_that_of_transformers(
    default_model: Path, prompt_3000: list[int], answers: dict[str, Answer]
) -> None:
    """Clause (c), after the same tokens. The error of a few rows is chance: one plan with many chunks is measured."""
    chain = Chain(default_model, 4, dtype="bfloat16", threads=THREADS)
    logits = _run(chain, prompt_3000, SMALL, forced=answers["float32"].tokens)
    ends = rows(SMALL)
    exact, theirs = (
        torch.cat((a.at_positions[ends[:-1]], a.logits)) for a in (answers["float32"], answers["bfloat16"])
    )
    mine, own = check_bfloat16(logits, theirs, exact)
    print(f"bfloat16 error over {len(logits)} rows: {mine:.4f}, transformers' own {own:.4f}")


def test_converted_model_continues_sensibly(default_model: Path) -> None:
    """Rotary embeddings and the rows of query and key projections came over right: nonsense would follow otherwise."""
    tokenizer = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    ids = tokenizer.encode("The capital of France is", add_special_tokens=False).ids
    chain = Chain(default_model, 2, dtype="bfloat16")
    chain.admit(1, ids, range(2))
    chain.prefill(1, len(ids), len(ids))
    assert tokenizer.decode(chain.decode(1, len(ids), 4)).startswith(" Paris.")
