"""Log-probabilities: against torch's log-softmax, against transformers' logits, for every split and after a replay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from actorpp.serving.logprobs import TokenLogprob, decode_logprobs
from actorpp.stages.logprobs import LogprobRow, token_logprobs
from actorpp.stages.messages import FromOutput, Logprobs, SamplingParams, Segment
from tests.exactness.chain import Chain
from tests.exactness.policy import TINY

IDS = [(7 * n + n * n) % 320 for n in range(60)]
PARAMS = SamplingParams(
    temperature=0.8, top_k=20, repetition_penalty=1.2, logit_bias=((3, 2.0),), seed=3, logprobs=4, prompt_logprobs=2
)


def test_rows_equal_log_softmax_and_carry_as_many_alternatives_as_asked() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1)) * 3
    tokens = torch.tensor([4, 0, 39, 7, 7])
    rows = [LogprobRow(1, 0), LogprobRow(2, 3), LogprobRow(1, 0), LogprobRow(3, 50), LogprobRow(2, 3)]
    found = token_logprobs(logits, tokens, rows).by_request(lambda tensor: tensor)
    assert {rid: (part.top, part.rows) for rid, part in found.items()} == {1: (0, 2), 2: (3, 2), 3: (40, 1)}
    decoded = {rid: iter(decode_logprobs(part)) for rid, part in found.items()}
    for index, row in enumerate(rows):
        expected = torch.log_softmax(logits[index], dim=0)
        order = expected.argsort(descending=True).tolist()
        got = next(decoded[row.rid])
        assert got.token_id == int(tokens[index])
        assert got.rank == order.index(got.token_id) + 1
        assert got.logprob == pytest.approx(float(expected[got.token_id]), abs=1e-5)
        assert [token for token, _ in got.top] == order[: row.top]
        assert [value for _, value in got.top] == pytest.approx(expected[order[: row.top]].tolist(), abs=1e-5)


def test_equal_logits_share_the_best_rank() -> None:
    found = token_logprobs(torch.zeros(1, 8), torch.tensor([5]), [LogprobRow(1, 0)]).by_request(lambda tensor: tensor)
    assert decode_logprobs(found[1])[0].rank == 1


def _run(
    path: Path, stages: int, chunk: int, delivered: tuple[int, ...] = ()
) -> tuple[list[int], list[Logprobs], list[Logprobs]]:
    """12 output ids from position ``len(delivered)`` on, with the log-probabilities of output and prompt.

    A request without log-probabilities shares every step.
    """
    known = [*IDS, *delivered]
    chain = Chain(path, stages, page_size=16)
    chain.admit(1, known, range(8), PARAMS, prompt_len=len(IDS))
    chain.admit(2, known, range(8, 16), SamplingParams(temperature=1.0), prompt_len=len(IDS))
    ids: list[int] = []
    output_rows, prompt_rows = [], []
    start = 0
    while len(ids) < 12 - len(delivered):
        length = min(chunk, len(known) - start) if start < len(known) else 1
        last = start + length >= len(known)
        tokens = [None, None] if start < len(known) else [FromOutput(chain.seq, 0), FromOutput(chain.seq, 1)]
        output = chain.step(*(Segment(rid, start, length, tokens[rid - 1], last) for rid in (1, 2)))
        start += length
        assert set(output.logprobs) == ({1} if last else set())
        output_rows += output.logprobs.values()
        prompt_rows += output.prompt_logprobs.values()
        ids += output.ids[:1]
    return ids, output_rows, prompt_rows


def _decoded(parts: list[Logprobs]) -> list[TokenLogprob]:
    return [row for part in parts for row in decode_logprobs(part)]


@pytest.mark.parametrize("chunk", [1, 7, 25, 59, 60])
def test_they_are_transformers_own_and_the_same_bits_for_every_number_of_stages(tied: Path, chunk: int) -> None:
    """Counts are exact: one for each output token, and for each prompt token but the first."""
    ids, output_rows, prompt_rows = _run(tied, 1, chunk)
    for stages in (2, 3, 4):
        assert _run(tied, stages, chunk) == (ids, output_rows, prompt_rows)
    model = AutoModelForCausalLM.from_pretrained(tied)
    with torch.inference_mode():
        logits = model(torch.tensor([[*IDS, *ids]])).logits[0].float()
    expected = torch.log_softmax(logits, dim=-1)
    tolerance = 2 * TINY.limit(logits)  # a logit's, and as much again for the sum over all of them
    output, prompt = _decoded(output_rows), _decoded(prompt_rows)
    assert [row.token_id for row in prompt] == IDS[1:]
    assert [row.token_id for row in output] == ids
    for row, oracle, top in zip([*prompt, *output], expected, [2] * 59 + [4] * 12, strict=False):
        assert row.logprob == pytest.approx(float(oracle[row.token_id]), abs=tolerance)
        assert [value for _, value in row.top] == pytest.approx(oracle.topk(top).values.tolist(), abs=tolerance)
        better = int((oracle > oracle[row.token_id] + tolerance).sum())
        worse = int((oracle < oracle[row.token_id] - tolerance).sum())
        assert better < row.rank <= len(oracle) - worse


def test_a_replay_gives_the_prompts_again_and_the_outputs_from_where_it_stopped(tied: Path) -> None:
    ids, output_rows, prompt_rows = _run(tied, 2, 25)
    again, output_again, prompt_again = _run(tied, 2, 25, tuple(ids[:5]))
    assert again == ids[5:]
    assert [row.token_id for row in _decoded(prompt_again)] == IDS[1:]
    for row, expected in zip(_decoded(output_again), _decoded(output_rows)[5:], strict=True):
        assert row.logprob == pytest.approx(expected.logprob, abs=1e-3)
    for row, expected in zip(_decoded(prompt_again), _decoded(prompt_rows), strict=True):
        assert row.logprob == pytest.approx(expected.logprob, abs=1e-3)
