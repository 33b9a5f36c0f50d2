"""Requests as benchmark tools make them, and what they read of the answers.

Recorded from guidellm 0.8.1, vLLM 0.32 and lm-eval 0.4.13. The tools themselves are run by hand: CONTRIBUTING.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from actorpp.serving.gateway import Gateway
from tests.unit.engine.support import served
from tests.unit.serving.http.support import client_of, events_of

PARTS = [{"type": "text", "text": "the cat sat on the mat"}]


async def streamed(client: httpx.AsyncClient, path: str, fields: dict[str, Any]) -> list[Any]:
    response = await client.post(path, json=fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


def test_guidellm(model: Path) -> None:
    async def body(gateway: Gateway) -> None:
        async with client_of(gateway) as client:
            assert (await client.get("/health")).status_code == 200
            name = (await client.get("/v1/models")).json()["data"][0]["id"]
            fields = {
                "model": name,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
                "max_completion_tokens": 16,
                "ignore_eos": True,
                "messages": [{"role": "user", "content": PARTS}],
            }
            chunks = await streamed(client, "/v1/chat/completions", fields)
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts == sorted(counts)
            assert counts[-1] == 16
            assert chunks[-1]["choices"] == []
            assert chunks[-1]["usage"]["prompt_tokens"] > 0

    served(model, body)


def test_vllm_bench_serve(model: Path) -> None:
    async def body(gateway: Gateway) -> None:
        async with client_of(gateway) as client:
            fields: dict[str, Any] = {"model": "tiny", "prompt": " the cat", "add_special_tokens": False}
            tokenized = (await client.post("/tokenize", json=fields)).json()
            assert tokenized["count"] == len(tokenized["tokens"]) > 0
            assert "actorpp_num_requests_running" in (await client.get("/metrics")).text
            common = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
            text = {"prompt": " the cat", "repetition_penalty": 1.0, "max_tokens": 16, "logprobs": None}
            chat = {"messages": [{"role": "user", "content": PARTS}], "max_completion_tokens": 16}
            for path, fields in (("/v1/completions", text), ("/v1/chat/completions", chat)):
                *chunks, last = await streamed(client, path, common | fields)
                assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)
                assert last["choices"] == []
                assert last["usage"]["completion_tokens"] == 16

    served(model, body)


def test_lm_eval_with_the_servers_tokenizer(model: Path) -> None:
    async def body(gateway: Gateway) -> None:
        async with client_of(gateway) as client:
            info = (await client.get("/tokenizer_info")).json()
            assert {"eos_token", "bos_token", "chat_template"} <= set(info)
            ids = (await client.post("/tokenize", json={"prompt": "test", "add_special_tokens": False})).json()[
                "tokens"
            ]
            fields = {"model": "tiny", "prompt": [[*ids, *ids]], "temperature": 0, "max_tokens": 1, "logprobs": 1,
                      "seed": 1234, "echo": True}  # fmt: skip
            (choice,) = (await client.post("/v1/completions", json=fields)).json()["choices"]
            logprobs = choice["logprobs"]
            assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 2 * len(ids) + 1
            assert logprobs["token_logprobs"][0] is None
            assert max(logprobs["top_logprobs"][1].values()) >= logprobs["token_logprobs"][1]

    served(model, body)
