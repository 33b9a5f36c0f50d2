"""``LLM`` on the default model: prompts of mixed lengths in one batch, greedy, against transformers one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from actorpp import LLM, SamplingParams
from actorpp.transport.sockets import close_context
from tests.exactness.oracle import Case, ask
from tests.exactness.policy import TokenTally

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NEW_TOKENS = 12
LENGTHS = (1, 2, 7, 64, 250)


def test_a_batch_of_mixed_lengths_gives_the_oracles_tokens(
    default_model: Path, prompt_3000: list[int], tally: TokenTally, tmp_path: Path
) -> None:
    prompts = {f"{n} tokens": prompt_3000[4 * n : 5 * n] for n in LENGTHS}
    cases = [Case(name, str(default_model), "float32", ids, [], NEW_TOKENS) for name, ids in prompts.items()]
    answers = ask(cases, tmp_path)
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)
    with LLM(stages=2, dtype="float32", chunked_prefill_size=96, use_tqdm_on_load=False) as llm:
        assert llm.model_path == default_model
        outputs = llm.generate(list(prompts.values()), greedy, use_tqdm=False)
    close_context()
    for name, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == prompts[name]
        (answer,) = output.outputs
        tally.check(name, answer.token_ids, answers[name].tokens, answers[name].logits)
        assert answer.logprobs is not None
        expected = answers[name].logits.log_softmax(-1)
        for place, (token, found) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
            assert found[token].rank == 1
            best = {other: logprob.logprob for other, logprob in found.items()}
            assert best == pytest.approx({other: float(expected[place, other]) for other in best}, abs=1e-3)
            assert len(best) == 2
