"""Sampling in real stages: the same tokens for every split, batch and replay; transformers' own where it has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from actorpp.stages.messages import FromOutput, SamplingParams, Segment
from tests.exactness.chain import Chain

IDS = [(7 * n + n * n) % 320 for n in range(60)]
COUNT = 12
SEEDED = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": 11}
PARAMS = {
    "greedy": SamplingParams(),
    "seeded": SamplingParams(**SEEDED),
    "another seed": SamplingParams(**SEEDED | {"seed": 12}),
    "repetition": SamplingParams(repetition_penalty=1.7),
    "presence": SamplingParams(presence_penalty=-2.0),
    "frequency": SamplingParams(frequency_penalty=-2.0),
    "bias": SamplingParams(logit_bias=tuple((token, 3.0) for token in range(0, 320, 7))),
    "min_tokens": SamplingParams(min_tokens=7, end_ids=tuple(range(0, 320, 3))),
    "all": SamplingParams(
        **SEEDED,
        min_tokens=3,
        end_ids=tuple(range(1, 320, 3)),
        min_p=0.01,
        repetition_penalty=1.3,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        logit_bias=((5, 4.0), (9, -100.0)),
    ),
}


def _tokens(path: Path, stages: int, sampling: SamplingParams, delivered: tuple[int, ...] = ()) -> list[int]:
    """``COUNT`` ids of the output; what has been delivered comes with the prompt, as in a replay."""
    known = [*IDS, *delivered]
    chain = Chain(path, stages, page_size=16)
    chain.admit(1, known, range(8), sampling, prompt_len=len(IDS))
    chain.prefill(1, len(known), 25)
    return [*delivered, *chain.decode(1, len(known), COUNT - len(delivered))]


def _mixed(path: Path, stages: int) -> dict[str, list[int]]:
    """All of ``PARAMS`` as requests that share every step."""
    chain = Chain(path, stages, page_size=16, num_pages=8 * len(PARAMS))
    for rid, params in enumerate(PARAMS.values()):
        chain.admit(rid, IDS, range(8 * rid, 8 * rid + 8), params)
    for start in (0, 25, 50):
        length = min(25, 60 - start)
        output = chain.step(*(Segment(rid, start, length, None, start == 50) for rid in range(len(PARAMS))))
    tokens = [[token] for token in output.ids]
    for index in range(COUNT - 1):
        source = chain.seq
        output = chain.step(*(Segment(rid, 60 + index, 1, FromOutput(source, rid), True) for rid in range(len(PARAMS))))
        for picked, token in zip(tokens, output.ids, strict=True):
            picked.append(token)
    return dict(zip(PARAMS, tokens, strict=True))


@pytest.fixture(scope="module")
def alone(tied: Path) -> dict[str, list[int]]:
    """Each request by itself, on one stage."""
    return {name: _tokens(tied, 1, params) for name, params in PARAMS.items()}


def test_every_parameter_makes_a_difference(alone: dict[str, list[int]]) -> None:
    assert len({tuple(tokens) for tokens in alone.values()}) == len(PARAMS)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_mixed_in_one_batch_each_request_gets_its_own_tokens_on_any_number_of_stages(
    tied: Path, alone: dict[str, list[int]], stages: int
) -> None:
    assert _mixed(tied, stages) == alone


@pytest.mark.parametrize("delivered", [1, 5, COUNT - 1])
@pytest.mark.parametrize("name", PARAMS)
def test_a_replay_from_prompt_and_delivered_ids_goes_on_with_the_same_tokens(
    tied: Path, alone: dict[str, list[int]], name: str, delivered: int
) -> None:
    assert _tokens(tied, 2, PARAMS[name], tuple(alone[name][:delivered])) == alone[name]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("greedy", {}),
        ("repetition", {"repetition_penalty": 1.7}),
        ("min_tokens", {"min_new_tokens": 7, "eos_token_id": list(range(0, 320, 3))}),
        ("bias", {"sequence_bias": [[[token], 3.0] for token in range(0, 320, 7)]}),
    ],
)
def test_greedy_tokens_are_those_of_transformers_generate(
    tied: Path, alone: dict[str, list[int]], name: str, options: dict[str, object]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tied)
    out = model.generate(
        torch.tensor([IDS]),
        attention_mask=torch.ones(1, 60, dtype=torch.int64),
        max_new_tokens=COUNT,
        do_sample=False,
        pad_token_id=0,
        **{"eos_token_id": None, **options},
    )
    expected = out[0, 60:].tolist()  # transformers stops at an end, the stages go on
    assert expected == alone[name][: len(expected)]
    assert len(expected) >= 7
