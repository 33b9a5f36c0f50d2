"""Every supported model type as a tiny random model, split and chunked, against transformers.

One long prompt shows that all splits give the same bits; an array of plans that covers all pairs of stages, chunks,
pages, slots and requests holds each sampled row to the oracle. ``python -m tests.exactness --full`` runs all plans.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from actorpp.stages.config import SUPPORTED_MODEL_TYPES, read_json
from actorpp.stages.messages import Segment
from tests.exactness.chain import Chain, recorded_logits
from tests.exactness.families import FAMILIES, MANY, MANY_LENGTH, NEW_TOKENS, ONE_OF_EACH_TYPE, Held
from tests.exactness.faults import FAULTS, FLOAT8_CACHE, FOR_ALL
from tests.exactness.plans import DIMENSIONS, Chains, Plan, check_plan, covering_plans, pairs
from tests.exactness.policy import TINY, TokenTally, check_bfloat16, check_bit_equal, check_logits

pytestmark = pytest.mark.timeout(300)  # the first test waits for the oracle's answers about all families

CHUNK, PAGE = 131, 16
WITH_EXPERTS = [name for name, family in FAMILIES.items() if "num_experts_per_tok" in family.options]


@pytest.fixture(scope="module")
def tally() -> Iterator[TokenTally]:
    counted = TokenTally(TINY)
    yield counted
    counted.finish()


def test_every_supported_type_is_held_to_the_oracle() -> None:
    assert {family.model_type for family in FAMILIES.values()} == SUPPORTED_MODEL_TYPES


@pytest.mark.parametrize("name", FAMILIES)
def test_every_split_gives_the_same_bits_and_the_oracles_tokens(
    name: str, held: dict[str, Held], tally: TokenTally
) -> None:
    """A prompt of several blocks of rows and many windows; the last chunk is short. Both backends are held."""
    one = held[name]
    ids, answer = one.prompts[0], one.answers[0]
    assert len(set(answer.tokens)) >= 8
    ends = [min(at + CHUNK, len(ids)) - 1 for at in range(0, len(ids), CHUNK)]
    whole: torch.Tensor | None = None
    for stages in (1, 2, 4):
        chain = Chain(one.path, stages, page_size=PAGE, context_length=one.family.context_length)
        chain.admit(1, ids, range(1, 2 + (len(ids) + NEW_TOKENS) // PAGE))
        with recorded_logits() as rows:
            chain.prefill(1, len(ids), CHUNK)
            tokens = chain.decode(1, len(ids), NEW_TOKENS)
        logits = torch.stack(rows)
        whole = logits if whole is None else whole
        check_bit_equal(logits, whole)
        check_logits(logits[: len(ends)], answer.at_positions[ends], TINY)
        check_logits(logits[len(ends) - 1 :], answer.logits, TINY)
        tally.check(f"{name}, {stages} stages", tokens, answer.tokens, answer.logits)
    other = Chain(one.path, 3, page_size=PAGE, context_length=one.family.context_length, attention_backend="sdpa")
    other.admit(1, ids, range(1, 2 + len(ids) // PAGE))
    with recorded_logits() as rows:
        other.prefill(1, len(ids), CHUNK)
    check_logits(torch.stack(rows), answer.at_positions[ends], TINY)


@pytest.mark.parametrize("name", ONE_OF_EACH_TYPE)
def test_every_pair_of_circumstances_gives_the_oracles_answers(
    name: str, held: dict[str, Held], tally: TokenTally
) -> None:
    chains = Chains(held[name])
    for plan in covering_plans():
        check_plan(chains[plan.partition], plan, held[name], tally)


def check_many_in_bfloat16(one: Held) -> None:
    """Clause (c): many prompts share steps on two stages, in chunks of 8; the end of each chunk is a row."""
    pages, ends = MANY_LENGTH // PAGE, range(7, MANY_LENGTH, 8)
    context = one.family.context_length
    chain = Chain(one.path, 2, page_size=PAGE, num_pages=MANY * pages, context_length=context, dtype="bfloat16")
    for rid, ids in enumerate(one.many):
        chain.admit(rid, ids, range(rid * pages, (rid + 1) * pages))
    with recorded_logits() as rows:
        for end in ends:
            chain.step(*(Segment(rid, end - 7, 8, None, True) for rid in range(MANY)))
    ours = torch.stack(rows).view(len(ends), MANY, -1).transpose(0, 1)
    mine, own = check_bfloat16(ours, one.bfloat16[:, ends], one.exact[:, ends])
    print(f"{one.name}: bfloat16 error {mine:.4f}, {mine / own:.2f} times transformers' own")


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_errs_hardly_more_than_transformers(name: str, held: dict[str, Held]) -> None:
    check_many_in_bfloat16(held[name])


@pytest.mark.parametrize("name", ["gemma2", *WITH_EXPERTS])
def test_a_coarser_cache_is_seen_in_bfloat16(name: str, held: dict[str, Held]) -> None:
    """Also where experts make single rows err by chance."""
    with FLOAT8_CACHE(), pytest.raises(AssertionError, match="times transformers' own"):
        check_many_in_bfloat16(held[name])


def test_latents_are_what_is_cached(held: dict[str, Held]) -> None:
    """Pages hold the compressed latents and the shared rotary key of a token, once for all heads."""
    chain = Chain(held["deepseek_v3"].path, 2, page_size=PAGE)
    assert [host.kv_bytes_per_page for host in chain.hosts] == [PAGE * layers * (16 + 8) * 4 for layers in (2, 3)]


def test_the_array_covers_every_pair_with_at_most_forty_plans() -> None:
    plans = covering_plans()
    assert len(plans) <= 40
    covered = set().union(*(pairs(vars(plan)) for plan in plans))
    sizes = [len(values) for values in DIMENSIONS.values()]
    assert len(covered) == (sum(sizes) ** 2 - sum(size**2 for size in sizes)) // 2


@pytest.mark.parametrize("name", FAMILIES)
def test_planted_fault_is_seen(name: str, held: dict[str, Held]) -> None:
    """What this suite is for: one plan that passes, and fails with each fault that concerns the family."""
    plan = Plan((2, 3), chunk=16, page_size=4, slots=1, requests=4, interleaved=True)
    check_plan(Chains(held[name])[plan.partition], plan, held[name], TokenTally(TINY))
    for fault in sorted(held[name].family.faults | FOR_ALL.keys()):
        with FAULTS[fault](), pytest.raises(AssertionError, match="logits differ"):
            check_plan(Chains(held[name])[plan.partition], plan, held[name], TokenTally(TINY))


CONCERNED = {
    "window one longer": lambda config: config.get("sliding_window") and config.get("use_sliding_window", True),
    "window one shorter": lambda config: config.get("sliding_window") and config.get("use_sliding_window", True),
    "no soft-cap on scores": lambda config: config.get("attn_logit_softcapping"),
    "no soft-cap on logits": lambda config: config.get("final_logit_softcapping"),
    "no sink": lambda config: config["model_type"] == "gpt_oss",
    "no embedding scale": lambda config: config["model_type"].startswith("gemma") or "embedding_multiplier" in config,
    "second stage scaled again": lambda config: "embedding_multiplier" in config,
    "second stage not scaled": lambda config: "residual_multiplier" in config,
    "factors of a short context": lambda config: (
        config["rope_parameters"].get("rope_type") == "longrope" and config["original_max_position_embeddings"] < 128
    ),
}


def test_each_family_is_tried_with_every_fault_that_concerns_it(held: dict[str, Held]) -> None:
    assert FOR_ALL.keys() | CONCERNED.keys() == FAULTS.keys()
    for name, one in held.items():
        config = read_json(one.path / "config.json") or {}
        assert one.family.faults == {fault for fault, concerns in CONCERNED.items() if concerns(config)}, name
