"""Sampling on the last stage: transformers' processors, per-request rows, reproducible randomness, broken logits."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from actorpp.stages.messages import SamplingParams
from actorpp.stages.sampler import OutputPenalty, SampleRow, needs_history, processors, sample, uniform

VOCAB = 50


def _logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def _row(params: SamplingParams, position: int, history: list[int] | None = None) -> SampleRow:
    ids = None if history is None else torch.tensor(history)
    return SampleRow(params, processors(params, len(history or ()) - position), position, ids)


def test_greedy_takes_the_largest() -> None:
    logits = _logits(3)
    ids, broken = sample(logits, [_row(SamplingParams(), n) for n in range(3)])
    assert ids.tolist() == logits.argmax(dim=-1).tolist()
    assert not broken.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_greedy_takes_the_first_of_equals_as_transformers_does(dtype: torch.dtype) -> None:
    logits = _logits(2).to(dtype).round()  # many are equal
    ids, _ = sample(logits, [_row(SamplingParams(), n) for n in range(2)])
    assert ids.tolist() == [row.index(max(row)) for row in logits.tolist()]


def test_processors_come_in_transformers_order() -> None:
    params = SamplingParams(
        temperature=0.7,
        top_k=20,
        top_p=0.8,
        min_p=0.05,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias=((4, 1.5), (9, -3.0)),
        min_tokens=3,
        end_ids=(11, 12),
    )
    logits, history = _logits(1), torch.tensor([[3, 5, 5, 7]])
    expected = logits
    for step in (
        SequenceBiasLogitsProcessor([[[4], 1.5], [[9], -3.0]]),
        RepetitionPenaltyLogitsProcessor(1.2),
        OutputPenalty(2, 0.4, 0.3),
        MinNewTokensLengthLogitsProcessor(2, 3, [11, 12]),
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(20),
        TopPLogitsWarper(0.8),
        MinPLogitsWarper(0.05),
    ):
        expected = step(history, expected)
    assert torch.equal(processors(params, 2)(history, logits), expected)
    assert len(processors(SamplingParams(), 2)) == 0


def test_presence_and_frequency_count_the_outputs_tokens_alone() -> None:
    """By vLLM's definition: frequency times the count, and presence once, off each token of the output."""
    logits = _logits(1)
    penalised = OutputPenalty(3, 0.5, 0.25)(torch.tensor([[8, 8, 9, 5, 5, 9]]), logits)
    expected = logits.clone()
    expected[0, 5] -= 0.5 + 2 * 0.25
    expected[0, 9] -= 0.5 + 0.25
    torch.testing.assert_close(penalised, expected)
    assert torch.equal(OutputPenalty(6, 0.5, 0.25)(torch.tensor([[8, 8, 9, 5, 5, 9]]), logits), logits)


def test_a_bias_forces_and_forbids_a_token_when_greedy_too() -> None:
    logits = _logits(1)
    best = int(logits.argmax())
    assert int(sample(logits, [_row(SamplingParams(logit_bias=((7, 100.0),)), 0)])[0]) == 7
    assert int(sample(logits, [_row(SamplingParams(logit_bias=((best, -100.0),)), 0)])[0]) != best


@pytest.mark.parametrize(
    ("params", "needed"),
    [
        (SamplingParams(temperature=1.0, top_k=3, logit_bias=((1, 1.0),)), False),
        (SamplingParams(repetition_penalty=1.1), True),
        (SamplingParams(presence_penalty=0.1), True),
        (SamplingParams(frequency_penalty=-0.1), True),
        (SamplingParams(min_tokens=1), True),
    ],
)
def test_history_is_kept_only_where_it_is_read(params: SamplingParams, needed: bool) -> None:
    assert needs_history(params) is needed


def test_token_depends_on_seed_and_position_alone() -> None:
    logits = _logits(1).repeat(4, 1)
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    rows = [_row(params[0], 5), _row(params[1], 5), _row(params[2], 5), _row(SamplingParams(), 0)]
    together, _ = sample(logits, rows)
    alone = [int(sample(logits[:1], [row])[0]) for row in rows]
    assert together.tolist() == alone
    assert alone[0] == alone[1]
    picked = {int(sample(logits[:1], [_row(params[0], position)])[0]) for position in range(40)}
    assert len(picked) > 5


def test_frequencies_are_the_distributions() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]])
    row = SamplingParams(temperature=1.0, seed=9)
    counts = torch.zeros(4)
    for position in range(3000):
        counts[sample(logits, [_row(row, position)])[0]] += 1
    torch.testing.assert_close(counts / 3000, torch.softmax(logits[0], dim=-1), rtol=0, atol=0.03)
    assert counts[3] == 0


def test_uniform_numbers_are_spread_and_stable() -> None:
    numbers = [uniform(3, position) for position in range(1000)]
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / 1000 - 0.5) < 0.03
    assert uniform(3, 0) == numbers[0] != uniform(4, 0)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_broken_logits_are_marked_and_harm_no_other_row(poison: float) -> None:
    logits = _logits(3)
    logits[1, 7] = poison
    rows = [_row(SamplingParams(temperature=1.0, seed=n), 0) for n in range(3)]
    ids, broken = sample(logits, rows)
    assert broken.tolist() == [False, True, False]
    assert ids[[0, 2]].tolist() == [int(sample(logits[n : n + 1], [rows[n]])[0]) for n in (0, 2)]


def test_repetition_penalty_works_on_greedy_too() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 9] = 2.0, 1.5
    row = _row(SamplingParams(repetition_penalty=2.0), 0, [4])
    assert sample(logits, [row])[0].tolist() == [9]
