"""OpenAI's own client against a real engine with a tiny model: answers equal the Python API's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import openai
import pytest

from actorpp.serving.completion import CompletionResult
from actorpp.serving.gateway import Gateway
from actorpp.serving.request import parse_request
from tests.unit.engine.support import served
from tests.unit.serving.http.support import serving

CHAT: Any = [{"role": "user", "content": "the cat"}]
SAMPLED = {"temperature": 0.9, "seed": 3}
Ours = Callable[..., Coroutine[Any, Any, CompletionResult]]


def asked(model: Path, body: Callable[[openai.AsyncOpenAI, Ours], Coroutine[Any, Any, None]]) -> None:
    async def with_client(gateway: Gateway) -> None:
        async def ours(**fields: Any) -> CompletionResult:
            """What the Python API answers to the same."""
            async for event in await gateway.complete(parse_request(fields)):
                if isinstance(event, CompletionResult):
                    return event
            raise AssertionError("no result")

        async with serving(gateway) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            await body(client, ours)

    served(model, with_client)


def test_completions(model: Path) -> None:
    async def body(client: openai.AsyncOpenAI, ours: Ours) -> None:
        fields: dict[str, Any] = {"prompt": "the cat", "max_tokens": 12}
        for more in (
            {"temperature": 0.0},
            SAMPLED,
            SAMPLED | {"n": 3},
            SAMPLED | {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {"7": 5}, "top_p": 0.9},
        ):
            expected = await ours(**fields, **more)
            answer = await client.completions.create(model="tiny", **fields, **more)
            assert [choice.text for choice in answer.choices] == [output.text for output in expected.outputs]
            assert [c.finish_reason for c in answer.choices] == [output.finish_reason for output in expected.outputs]
            assert answer.usage is not None
            assert answer.usage.completion_tokens == sum(len(output.token_ids) for output in expected.outputs)
            assert answer.usage.prompt_tokens == expected.prompt_tokens
            texts = [""] * len(expected.outputs)
            stream = await client.completions.create(model="tiny", **fields, **more, stream=True)
            async for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
            assert texts == [output.text for output in expected.outputs]

    asked(model, body)


def test_chats(model: Path) -> None:
    async def body(client: openai.AsyncOpenAI, ours: Ours) -> None:
        for more in ({"temperature": 0.0}, SAMPLED, SAMPLED | {"n": 2}):
            expected = await ours(messages=CHAT, max_tokens=12, **more)
            answer = await client.chat.completions.create(model="tiny", messages=CHAT, max_completion_tokens=12, **more)
            assert [c.message.content for c in answer.choices] == [output.text for output in expected.outputs]
            texts = [""] * len(expected.outputs)
            stream = await client.chat.completions.create(
                model="tiny", messages=CHAT, max_tokens=12, stream=True, stream_options={"include_usage": True}, **more
            )
            async for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
            assert texts == [output.text for output in expected.outputs]
            assert chunk.usage is not None
            assert chunk.usage.prompt_tokens == expected.prompt_tokens

    asked(model, body)


def test_stop_strings_and_ids(model: Path) -> None:
    async def body(client: openai.AsyncOpenAI, ours: Ours) -> None:
        fields: dict[str, Any] = {"prompt": "the cat", "max_tokens": 24, "temperature": 0.0}
        whole = await ours(**fields, ignore_eos=True)
        stop = next(text for at in range(4, 20) if (text := whole.text[at : at + 2]).isprintable() and text.strip())
        for wanted in (stop, [stop, "no such text"]):
            expected = await ours(**fields, ignore_eos=True, stop=wanted)
            answer = await client.completions.create(
                model="tiny", **fields, stop=wanted, extra_body={"ignore_eos": True}
            )
            assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected.text, "stop")
            assert stop not in answer.choices[0].text
        ids = {"ignore_eos": True, "stop_token_ids": [whole.token_ids[5]], "min_tokens": 2}
        expected = await ours(**fields, **ids)
        answer = await client.completions.create(model="tiny", **fields, extra_body=ids)
        assert answer.choices[0].text == expected.text

    asked(model, body)


def test_log_probabilities(model: Path) -> None:
    async def body(client: openai.AsyncOpenAI, ours: Ours) -> None:
        fields: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0}
        expected = await ours(prompt="the cat", logprobs=2, **fields)
        assert expected.logprobs is not None
        answer = await client.completions.create(model="tiny", prompt="the cat", logprobs=2, **fields)
        told = answer.choices[0].logprobs
        assert told is not None
        assert told.token_logprobs == pytest.approx([row.logprob for row in expected.logprobs])
        expected = await ours(messages=CHAT, logprobs=2, **fields)
        assert expected.logprobs is not None
        chat = await client.chat.completions.create(
            model="tiny", messages=CHAT, logprobs=True, top_logprobs=2, **fields
        )
        content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
        assert content is not None
        assert [row.logprob for row in content] == pytest.approx([row.logprob for row in expected.logprobs])
        assert [[top.logprob for top in row.top_logprobs] for row in content] == [
            pytest.approx([logprob for _, logprob in row.top]) for row in expected.logprobs
        ]
        streamed: list[float] = []
        stream = await client.chat.completions.create(
            model="tiny", messages=CHAT, logprobs=True, top_logprobs=2, stream=True, **fields
        )
        async for chunk in stream:
            for choice in chunk.choices:
                streamed += [row.logprob for row in (choice.logprobs and choice.logprobs.content) or ()]
        assert streamed == pytest.approx([row.logprob for row in content])

    asked(model, body)


def test_what_lm_eval_asks_for_a_loglikelihood(model: Path) -> None:
    """Several prompts of ids with echo: of each the continuation's log-probabilities, and whether they are greedy."""

    async def body(client: openai.AsyncOpenAI, ours: Ours) -> None:
        prompts = [[5, 9, 30, 31, 7], [8, 11, 40, 6]]
        answer = await client.completions.create(
            model="tiny", prompt=prompts, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234
        )
        for ids, choice in zip(prompts, sorted(answer.choices, key=lambda c: c.index), strict=True):
            expected = await ours(prompt_tokens=ids, prompt_logprobs=1, max_tokens=1)
            assert expected.prompt_logprobs is not None
            told = choice.logprobs
            assert told is not None
            assert told.token_logprobs is not None
            assert told.top_logprobs is not None
            rows = [row for row in expected.prompt_logprobs if row is not None]
            assert told.token_logprobs[1:-1] == pytest.approx([row.logprob for row in rows])
            greedy = [
                value == max(top.values())
                for value, top in zip(told.token_logprobs[1:-1], told.top_logprobs[1:-1], strict=True)
            ]
            assert greedy == [row.rank == 1 for row in rows]

    asked(model, body)


def test_errors_have_the_clients_own_types(model: Path) -> None:
    async def body(client: openai.AsyncOpenAI, ours: Ours) -> None:
        with pytest.raises(openai.BadRequestError, match="maximum context length is") as caught:
            await client.completions.create(model="tiny", prompt="the cat", max_tokens=100_000)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="the cat")
        models = await client.models.list()
        assert models.data[0].id == "tiny"

    asked(model, body)


def test_many_at_once_get_each_its_own(model: Path) -> None:
    async def body(client: openai.AsyncOpenAI, ours: Ours) -> None:
        prompts = [f"the cat {n}" for n in range(12)]
        expected = await asyncio.gather(*(ours(prompt=prompt, max_tokens=8) for prompt in prompts))
        answers = await asyncio.gather(
            *(client.completions.create(model="tiny", prompt=p, max_tokens=8, temperature=0) for p in prompts)
        )
        assert [answer.choices[0].text for answer in answers] == [result.text for result in expected]
        together = await client.completions.create(model="tiny", prompt=prompts, max_tokens=8, temperature=0)
        assert [choice.text for choice in together.choices] == [result.text for result in expected]

    asked(model, body)
