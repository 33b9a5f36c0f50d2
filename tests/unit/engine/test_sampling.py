"""Sampling parameters from the gateway to the last stage of a real engine, and what it refuses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from actorpp.engine import output_seed
from actorpp.errors import InvalidRequestError
from actorpp.serving.completion import CompletionResult
from actorpp.serving.gateway import Gateway
from actorpp.serving.tokenizer import TextCodec
from tests.unit.engine.support import PROMPT, complete, served


def test_every_sampling_parameter_reaches_the_last_stage(model: Path) -> None:
    variants = [
        {},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 0.9, "seed": 3, "top_k": 3},
        {"repetition_penalty": 1.7},
        {"presence_penalty": -2.0},
        {"frequency_penalty": -2.0},
        {"logit_bias": {"7": 100.0}},
    ]

    async def body(gateway: Gateway) -> None:
        answers = [await complete(gateway, max_tokens=24, ignore_eos=True, **variant) for variant in variants]
        assert len({answer.token_ids for answer in answers}) == len(variants)
        assert set(answers[-1].token_ids) == {7}

    served(model, body)


def test_a_stop_string_ends_request_text_and_ids(model: Path) -> None:
    async def body(gateway: Gateway) -> None:
        codec = TextCodec(model / "tokenizer.json")
        letters = {token: 50.0 for token in codec.encode("abcdefghijklmnopqrstuvwxyz the cat and the hat")}
        fields = {"max_tokens": 24, "ignore_eos": True, "logit_bias": letters}
        whole = await complete(gateway, **fields)
        assert len(whole.text) > 20
        stop = whole.text[5:7]
        at = whole.text.index(stop)
        cut = next(n for n in range(25) if stop in codec.decode(list(whole.token_ids[:n])))
        answer = await complete(gateway, **fields, stop=["no such text", stop])
        assert (answer.text, answer.token_ids) == (whole.text[:at], whole.token_ids[:cut])
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        answer = await complete(gateway, **fields, stop=stop, include_stop_str_in_output=True)
        assert (answer.text, answer.token_ids) == (whole.text[:at] + stop, whole.token_ids[:cut])

    served(model, body)


@pytest.mark.parametrize(
    ("options", "tokens"),
    [({"context_length": 80}, 20), ({"kv_tokens": 96, "page_size": 16, "async_depth": 2}, 96 - 2 - 60)],
    ids=["context", "cache"],
)
def test_without_max_tokens_it_goes_on_until_context_or_cache_is_full(
    model: Path, options: dict[str, int], tokens: int
) -> None:
    async def body(gateway: Gateway) -> None:
        answer = await complete(gateway, max_tokens=None, ignore_eos=True)
        assert (len(answer.token_ids), answer.finish_reason) == (tokens, "length")
        with pytest.raises(InvalidRequestError):
            await complete(gateway, max_tokens=tokens + 1)

    served(model, body, **options)


def test_stop_ids_wait_for_min_tokens(model: Path) -> None:
    async def body(gateway: Gateway) -> None:
        whole = await complete(gateway, max_tokens=24, ignore_eos=True)
        stop = whole.token_ids[3]
        answer = await complete(gateway, max_tokens=24, stop_token_ids=[stop])
        assert answer.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        answer = await complete(gateway, max_tokens=24, min_tokens=10, stop_token_ids=[stop], ignore_eos=True)
        assert stop not in answer.token_ids[:10]
        assert len(answer.token_ids) > 10
        forced = {"logit_bias": {2: 100.0}, "max_tokens": 9}  # end-of-sequence, as soon as it may
        assert (await complete(gateway, **forced)).token_ids == (2,)
        answer = await complete(gateway, min_tokens=4, **forced)
        assert len(answer.token_ids) == 5
        assert answer.token_ids[4] == 2
        assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
        assert len((await complete(gateway, ignore_eos=True, **forced)).token_ids) == 9

    served(model, body)


def test_log_probabilities_are_the_same_for_every_number_of_stages(model: Path) -> None:
    fields = {"max_tokens": 9, "ignore_eos": True, "temperature": 0.8, "seed": 4, "presence_penalty": 1.0}
    results: list[CompletionResult] = []

    async def body(gateway: Gateway) -> None:
        plain, asked = await asyncio.gather(
            complete(gateway, **fields), complete(gateway, **fields, logprobs=3, prompt_logprobs=2)
        )
        assert plain.token_ids == asked.token_ids
        assert plain.logprobs is plain.prompt_logprobs is None
        assert "logprobs" not in msgspec.to_builtins(plain)
        results.append(asked)

    for stages, chunk in ((1, 512), (2, 512), (3, 16), (4, 7)):
        served(model, body, stages=stages, chunked_prefill_size=chunk)
    first = results[0]
    assert first.logprobs is not None
    assert first.prompt_logprobs is not None
    assert [row.token_id for row in first.logprobs] == list(first.token_ids)
    assert [row and row.token_id for row in first.prompt_logprobs] == [None, *PROMPT[1:]]
    for row in first.logprobs:
        assert len(row.top) == 3
        assert [value for _, value in row.top] == sorted((value for _, value in row.top), reverse=True)
        assert row.rank > 3 or row.top[row.rank - 1] == (row.token_id, row.logprob)
    for other in results[1:]:
        for ours, theirs in ((other.logprobs, first.logprobs), (other.prompt_logprobs, first.prompt_logprobs)):
            assert ours is not None
            for row, expected in zip(ours, theirs, strict=True):
                assert (row is None) == (expected is None)
                if row is not None and expected is not None:
                    assert (row.token_id, row.rank, [i for i, _ in row.top]) == (
                        expected.token_id,
                        expected.rank,
                        [i for i, _ in expected.top],
                    )
                    assert row.logprob == pytest.approx(expected.logprob, abs=1e-3)


def test_several_outputs_have_seeds_that_follow_from_the_requests(model: Path) -> None:
    fields = {"max_tokens": 9, "ignore_eos": True, "temperature": 1.0}
    seen: list[list[tuple[int, ...]]] = []

    async def body(gateway: Gateway) -> None:
        several = await complete(gateway, **fields, seed=6, n=4)
        seen.append([output.token_ids for output in several.outputs])
        assert len(set(seen[0])) == 4
        for n in (1, 2):
            fewer = await complete(gateway, **fields, seed=6, n=n)
            assert [output.token_ids for output in fewer.outputs] == seen[0][:n]
        unseeded = await complete(gateway, **fields, n=3)  # the engine's --seed, and still three answers
        assert len({output.token_ids for output in unseeded.outputs}) == 3

    served(model, body, seed=1)
    served(model, body, seed=1, stages=3, max_running_requests=2)
    assert seen[0] == seen[1]


def test_seeds_of_outputs_are_spread_and_pure() -> None:
    seeds = [output_seed(seed, index) for seed in (5, 6) for index in range(100)]
    assert len(set(seeds)) == 200
    assert seeds[0] == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert output_seed(5, 7) == seeds[7]


def test_ids_outside_the_vocabulary_are_refused(model: Path) -> None:
    async def body(gateway: Gateway) -> None:
        with pytest.raises(InvalidRequestError, match="logit_bias: token ids must lie in 0-319") as caught:
            await complete(gateway, logit_bias={320: 1.0})
        assert caught.value.param == "logit_bias"
        with pytest.raises(InvalidRequestError, match="stop_token_ids: token ids must lie in 0-319") as caught:
            await complete(gateway, stop_token_ids=[320])
        assert caught.value.param == "stop_token_ids"

    served(model, body)
