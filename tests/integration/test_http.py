"""OpenAI's client against ``actorpp serve`` with stage processes and the default model: the Python API's answers."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from actorpp import LLM, SamplingParams
from tests.support.cli import running

pytestmark = pytest.mark.slow

PROMPT = "The capital of France is"
CHAT: Any = [{"role": "user", "content": "Count from one to five."}]
FLAGS = ["--stages", "2", "--dtype", "float32", "--kv-tokens", "16384"]


def test_answers_are_the_python_apis(environment: dict[str, str], default_model: object) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
    sampled = SamplingParams(temperature=0.8, seed=7, max_tokens=12, n=2)
    stopped = SamplingParams(temperature=0, max_tokens=40, stop=["."])
    with LLM(stages=1, dtype="float32", kv_tokens=16384, transport="inproc", use_tqdm_on_load=False) as llm:
        expected = [llm.generate(PROMPT, params, use_tqdm=False)[0].outputs for params in (greedy, sampled, stopped)]
        chat = llm.chat(CHAT, greedy, use_tqdm=False)[0].outputs[0]
    with running("serve", *FLAGS, "--json", environment=environment) as server:
        server.wait_for("context_length")
        url = json.loads(server.stdout)["http"]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            ask = client.completions.create
            model = client.models.list().data[0].id
            answer = ask(model=model, prompt=PROMPT, temperature=0, max_tokens=12, logprobs=2)
            assert answer.choices[0].text == expected[0][0].text
            told, rows = answer.choices[0].logprobs, expected[0][0].logprobs
            assert told is not None
            assert rows is not None
            ours = [row[token].logprob for row, token in zip(rows, expected[0][0].token_ids, strict=True)]
            assert told.token_logprobs == pytest.approx(ours, abs=1e-3)
            answer = ask(model=model, prompt=PROMPT, temperature=0.8, seed=7, max_tokens=12, n=2)
            assert [choice.text for choice in answer.choices] == [output.text for output in expected[1]]
            answer = ask(model=model, prompt=PROMPT, temperature=0, max_tokens=40, stop=["."])
            assert answer.choices[0].text == expected[2][0].text
            stream = client.chat.completions.create(
                model=model, messages=CHAT, temperature=0, max_completion_tokens=12, stream=True
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            assert text == chat.text
        server.interrupt()
        assert server.finish() == 130
