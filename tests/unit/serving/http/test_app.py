"""The HTTP front door over a fake engine: forms, errors, streams, disconnects, the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from actorpp.config import EngineConfig
from actorpp.errors import ConfigError, StageFailedError
from actorpp.serving.gateway import Gateway
from actorpp.serving.http.server import HttpServer
from actorpp.serving.tokenizer import TextCodec
from tests.unit.serving.fakes import ANSWER, FakeCheckpoint, FakeEngine
from tests.unit.serving.http.support import client_of, events_of, serving

Body = Callable[[httpx.AsyncClient, FakeEngine], Coroutine[Any, Any, None]]

TEXT = {"prompt": "the cat", "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 4}


@contextlib.asynccontextmanager
async def engine_of(tokenizer_file: Path, **engine: Any) -> AsyncIterator[tuple[FakeEngine, Gateway]]:
    fake = FakeEngine(EngineConfig(), checkpoint=FakeCheckpoint(tokenizer_file), **engine)
    async with fake, Gateway(fake, "tiny") as gateway:
        yield fake, gateway


def served(tokenizer_file: Path, body: Body, *, options: dict[str, Any] | None = None, **engine: Any) -> None:
    async def main() -> None:
        async with (
            engine_of(tokenizer_file, **engine) as (fake, gateway),
            client_of(gateway, **options or {}) as client,
        ):
            await body(client, fake)
        assert not fake.running

    asyncio.run(main())


def test_prompts_come_in_four_forms(tokenizer_file: Path) -> None:
    ids = TextCodec(tokenizer_file).encode("the cat")
    forms: list[tuple[Any, list[list[int]]]] = [
        ("the cat", [ids]),
        (["the cat", "the cat"], [ids, ids]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ]

    async def body(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        for prompt, expected in forms:
            engine.submitted.clear()
            answer = (await client.post("/v1/completions", json={"prompt": prompt})).json()
            assert [handle.prompt_ids for handle in engine.submitted] == expected
            assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
            prompt_tokens, tokens = sum(map(len, expected)), 3 * len(expected)
            assert answer["usage"] == {
                "prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens,
            }  # fmt: skip

    served(tokenizer_file, body)


def test_every_field_reaches_the_engine(tokenizer_file: Path) -> None:
    fields = {
        "n": 2, "temperature": 0.5, "top_k": -1, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "seed": -1,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"7": 1.5}, "stop": ["zzz"],
        "stop_token_ids": [99], "min_tokens": 1, "ignore_eos": True, "priority": 2, "max_tokens": 4, "best_of": 2,
        "response_format": {"type": "text"}, "user": "me", "no such field": 1,
    }  # fmt: skip

    async def body(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        more: dict[str, dict[str, Any]] = {
            "/v1/completions": {"prompt": "x", "logprobs": 3},
            "/v1/chat/completions": {"messages": CHAT["messages"], "logprobs": True, "top_logprobs": 3},
        }
        for path, own in more.items():
            response = await client.post(path, json=fields | own)
            assert response.status_code == 200, response.text
            params = engine.submitted[-1].params
            sampling = params.sampling
            assert (params.max_tokens, params.seed, params.index, params.priority) == (4, 2**63 - 1, 1, 2)
            assert (params.ignore_eos, params.stop_token_ids) == (True, (99,))
            assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 0, 0.9, 0.1)
            assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
            assert (sampling.repetition_penalty, sampling.logit_bias) == (1.2, ((7, 1.5),))
            assert (sampling.min_tokens, sampling.logprobs) == (1, 3)
            assert engine.submitted[-1].stop_text is not None
        await client.post("/v1/chat/completions", json=CHAT | {"max_completion_tokens": 4})
        assert engine.submitted[-1].params.max_tokens == 4
        assert engine.submitted[-1].params.sampling.temperature == 1  # OpenAI's default
        await client.post("/v1/completions", json={"prompt": "x"})
        assert engine.submitted[-1].params.max_tokens == 16
        await client.post("/v1/chat/completions", json={"messages": CHAT["messages"]})
        left = engine.context_length - len(engine.submitted[-1].prompt_ids)
        assert engine.submitted[-1].params.max_tokens == left  # what fits

    served(tokenizer_file, body, context_length=256)


def test_chats_have_parts_names_and_tools(tmp_path: Path) -> None:
    from tests.unit.serving.fakes import make_tokenizer

    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% if think %}T{% endif %}"
        "{% for m in messages %}{{ m.role }}:{{ m.name }}:{{ m.content }};{% endfor %}"
    )
    tokenizer_file = make_tokenizer(tmp_path, chat_template=template)

    async def body(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "cat"}]
        fields = {
            "messages": [{"role": "user", "name": "Ann", "content": parts}],
            "tools": [{"type": "function"}],
            "chat_template_kwargs": {"think": True, "tools": [], "messages": []},
            "max_tokens": 4,
        }
        assert (await client.post("/v1/chat/completions", json=fields)).status_code == 200
        text = TextCodec(tokenizer_file).decode(engine.submitted[-1].prompt_ids)
        assert text == '[{"type": "function"}]Tuser:Ann:the\ncat;'
        fields["messages"] = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        refusal = await client.post("/v1/chat/completions", json=fields)
        assert refusal.status_code == 400
        assert "image_url" in refusal.json()["error"]["message"]

    served(tmp_path / "tokenizer.json", body)


BAD: list[tuple[str, dict[str, Any], int, str, str]] = [
    ("/v1/completions", {}, 400, "invalid_request", "prompt"),
    ("/v1/completions", {"prompt": []}, 400, "invalid_request", "prompt"),
    ("/v1/completions", {"prompt": [1, "x"]}, 400, "invalid_request", "prompt_tokens"),
    ("/v1/completions", {"prompt": ["x", [1]]}, 400, "invalid_request", "prompt"),
    ("/v1/completions", TEXT | {"best_of": 2}, 400, "invalid_request", "best_of"),
    ("/v1/completions", TEXT | {"temperature": "hot"}, 400, "invalid_request", "temperature"),
    ("/v1/completions", TEXT | {"max_tokens": 0}, 400, "invalid_request", "max_tokens"),
    ("/v1/completions", TEXT | {"max_tokens": 0, "echo": True, "stream": True}, 400, "invalid_request", "max_tokens"),
    ("/v1/completions", TEXT | {"logprobs": 21}, 400, "invalid_request", "logprobs"),
    ("/v1/completions", TEXT | {"response_format": {"type": "json_object"}}, 400, "invalid_request", "response_format"),
    ("/v1/completions", TEXT | {"guided_json": {}, "guided_regex": "a"}, 400, "invalid_request", "guided_regex"),
    ("/v1/completions", TEXT | {"stream_options": {}}, 400, "invalid_request", "stream_options"),
    ("/v1/completions", TEXT | {"model": "other"}, 404, "model_not_found", "model"),
    ("/v1/completions", TEXT | {"max_tokens": 512}, 400, "context_length_exceeded", "max_tokens"),
    ("/v1/chat/completions", {"messages": []}, 400, "invalid_request", "messages"),
    ("/v1/chat/completions", {"messages": [{}]}, 400, "invalid_request", "messages"),
    ("/v1/chat/completions", CHAT | {"top_logprobs": 2}, 400, "invalid_request", "top_logprobs"),
    ("/v1/chat/completions", CHAT | {"max_completion_tokens": 5}, 400, "invalid_request", "max_tokens"),
    ("/v1/chat/completions", CHAT | {"tool_choice": "required"}, 400, "invalid_request", "tool_choice"),
    ("/tokenize", {}, 400, "invalid_request", "prompt"),
    ("/detokenize", {"tokens": [320]}, 400, "invalid_request", "tokens"),
]


def test_refusals_have_a_status_a_code_and_a_field(tokenizer_file: Path) -> None:
    async def body(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        for path, fields, status, code, param in BAD:
            response = await client.post(path, json=fields)
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (status, code, param), response.text
            assert error["message"]
            assert error["retryable"] is False
        error = (await client.post("/v1/completions", json=TEXT | {"max_tokens": 512})).json()["error"]
        assert "maximum context length is 512 tokens" in error["message"]
        fields = TEXT | {"response_format": {"type": "json_schema", "json_schema": {}}}
        error = (await client.post("/v1/completions", json=fields)).json()["error"]
        assert "'json_schema' is not supported" in error["message"]
        response = await client.post("/v1/completions", content=b"{")
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_request")
        assert (await client.get("/nowhere")).json()["error"]["code"] == "not_found"
        response = await client.get("/v1/completions")
        assert (response.status_code, response.headers["Allow"]) == (405, "POST")
        response = await client.post("/v1/completions", content=b" " * (33 << 20))
        assert response.status_code == 413

    served(tokenizer_file, body)


def test_a_client_that_leaves_within_its_body_is_no_fault(
    tokenizer_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
        writer.write(head)
        assert (await reader.readline()).startswith(b"HTTP/1.1 100")  # the server waits for the body
        writer.close()
        await writer.wait_closed()
        assert (await client.get("/health")).status_code == 200

    served(tokenizer_file, body)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


def test_headers_without_end_are_cut_off(tokenizer_file: Path) -> None:
    async def body(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"x" * (1 << 20))
        with contextlib.suppress(ConnectionError):  # it may close before it has read all
            async with asyncio.timeout(20):
                assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()
        assert (await client.get("/health")).status_code == 200

    served(tokenizer_file, body)


def test_overload_is_429_with_retry_after_and_leaves_nothing_running(tokenizer_file: Path) -> None:
    async def body(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        response = await client.post("/v1/completions", json={"prompt": [[5], [6]]})
        assert response.status_code == 429
        assert response.headers["Retry-After"] == "1"
        error = response.json()["error"]
        assert (error["code"], error["retryable"], error["retry_after_ms"]) == ("overloaded", True, 1000)

    served(tokenizer_file, body, capacity=0)


def test_a_stream_has_its_frames_and_the_usage_only_when_asked(tokenizer_file: Path) -> None:
    codec = TextCodec(tokenizer_file)
    answer = codec.encode(ANSWER, add_special_tokens=False)

    async def body(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        fields = {"max_tokens": 100, "stream": True}
        response = await client.post("/v1/completions", json=TEXT | fields)
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = events_of(response.text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ANSWER
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert all("usage" not in chunk for chunk in chunks)
        options = {"stream_options": {"include_usage": True}}
        chunks = events_of((await client.post("/v1/chat/completions", json=CHAT | fields | options)).text)
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"  # with the first token, not before it
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == ANSWER
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == len(answer)
        options = {"stream_options": {"continuous_usage_stats": True}, "return_progress": True}
        chunks = events_of((await client.post("/v1/chat/completions", json=CHAT | fields | options)).text)
        progress = [chunk.pop("prompt_progress") for chunk in chunks if "prompt_progress" in chunk]
        total = len(engine.submitted[-1].prompt_ids)
        assert [(step["total"], step["processed"]) for step in progress][-1] == (total, total)
        assert progress[-1]["remaining_s"] == 0
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["choices"]]
        assert counts == sorted(counts)
        assert counts[-1] == len(answer)
        chunks = events_of(
            (await client.post("/v1/completions", json=TEXT | fields | {"n": 2, "prompt": ["a", "b"]})).text
        )
        texts = {index: "" for index in range(4)}
        for chunk in chunks:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert set(texts.values()) == {ANSWER}

    served(tokenizer_file, body, answer=lambda prompt: answer)


def test_log_probabilities_in_both_shapes(tokenizer_file: Path) -> None:
    codec = TextCodec(tokenizer_file)

    async def body(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        fields = {"prompt": [5, 6, 7], "max_tokens": 3, "logprobs": 2, "echo": True}
        (choice,) = (await client.post("/v1/completions", json=fields)).json()["choices"]
        texts = [codec.token_text(token) for token in (5, 6, 7, 7, 8, 9)]
        told = choice["logprobs"]
        assert choice["text"] == "".join(texts)
        assert told["tokens"] == texts
        assert told["text_offset"] == [0, 1, 2, 3, 4, 5]
        assert told["token_logprobs"] == [None, -3.0, -3.5, -3.5, -4.0, -4.5]
        assert told["top_logprobs"][0] is None
        assert told["top_logprobs"][1] == {codec.token_text(0): -0.5, codec.token_text(1): -1.5, texts[1]: -3.0}
        (choice,) = (await client.post("/v1/completions", json=fields | {"max_tokens": 0})).json()["choices"]
        assert choice["text"] == "".join(texts[:3])
        assert choice["logprobs"]["tokens"] == texts[:3]
        chat = CHAT | {"logprobs": True, "top_logprobs": 1}
        (choice,) = (await client.post("/v1/chat/completions", json=chat)).json()["choices"]
        first = choice["logprobs"]["content"][0]
        assert (first["token"], first["logprob"], first["bytes"]) == (texts[3], -3.5, list(texts[3].encode()))
        assert first["top_logprobs"] == [
            {"token": "<unk>", "logprob": -0.5, "bytes": list(b"<unk>")},
        ]
        chunks = events_of((await client.post("/v1/chat/completions", json=chat | {"stream": True})).text)
        streamed = [row for chunk in chunks if (told := chunk["choices"][0]["logprobs"]) for row in told["content"]]
        assert streamed == choice["logprobs"]["content"]

    served(tokenizer_file, body)


def test_tokens_and_models_are_told(tokenizer_file: Path) -> None:
    codec = TextCodec(tokenizer_file)

    async def body(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        asked = {"prompt": "the cat", "return_token_strs": True}
        told = (await client.post("/tokenize", json=asked)).json()
        assert told["tokens"] == codec.encode("the cat")
        assert "".join(told["token_strs"][1:]) == "the cat"
        assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 512)
        bare = (await client.post("/tokenize", json=asked | {"add_special_tokens": False})).json()
        assert bare["tokens"] == told["tokens"][1:]
        chat = (await client.post("/tokenize", json={"messages": CHAT["messages"]})).json()
        assert chat["tokens"] == codec.encode(codec.render_chat(CHAT["messages"]), add_special_tokens=False)  # type: ignore[arg-type]
        text = (await client.post("/detokenize", json={"tokens": told["tokens"]})).json()["prompt"]
        assert text == "<s>the cat"
        info = (await client.get("/tokenizer_info")).json()
        assert (info["eos_token"], info["bos_token"]) == ("</s>", "<s>")
        assert info["chat_template"] == codec.chat_template
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("tiny", 512)
        assert (await client.get("/v1/models/tiny")).json() == model
        assert (await client.get("/v1/models/other")).status_code == 404
        assert (await client.get("/version")).json()["version"]

    served(tokenizer_file, body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("point", ["prefill", "decode"])
def test_a_client_that_leaves_aborts_its_request(tokenizer_file: Path, stream: bool, point: str) -> None:
    async def main() -> None:
        async with (
            engine_of(tokenizer_file, hold=frozenset({point})) as (engine, gateway),
            serving(gateway) as url,
        ):
            async with httpx.AsyncClient(base_url=url) as client:
                asking = asyncio.create_task(client.post("/v1/completions", json=TEXT | {"stream": stream}))
                await engine.reached[point].wait()
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            await engine.submitted[0].aborted.wait()

    asyncio.run(main())


def test_silence_is_filled_with_comments(tokenizer_file: Path) -> None:
    async def main() -> None:
        async with (
            engine_of(tokenizer_file, hold=frozenset({"prefill"})) as (engine, gateway),
            client_of(gateway, keep_alive_s=0.02) as client,
            client.stream("POST", "/v1/completions", json=TEXT | {"stream": True}) as response,
        ):
            lines = response.aiter_lines()
            assert [await anext(lines) for _ in range(4)] == [": keep-alive", ""] * 2
            engine.release()
            assert [line async for line in lines][-2:] == ["data: [DONE]", ""]

    asyncio.run(main())


def test_an_error_in_mid_stream_is_an_object_and_then_done(tokenizer_file: Path) -> None:
    async def main() -> None:
        async with (
            engine_of(tokenizer_file, hold=frozenset({"decode"})) as (engine, gateway),
            client_of(gateway) as client,
        ):
            asking = asyncio.create_task(client.post("/v1/completions", json=TEXT | {"stream": True}))
            await engine.reached["decode"].wait()
            engine.fail(StageFailedError("stage 1 died"))
            chunks = events_of((await asking).text)
            assert chunks[-1]["error"]["code"] == "stage_failed"
            assert "choices" in chunks[0]
            response = await client.post("/v1/completions", json=TEXT)
            assert response.status_code == 503
            assert response.headers["Retry-After"]

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_the_servers_end_is_told_to_every_client(tokenizer_file: Path, stream: bool) -> None:
    async def main() -> None:
        async with (
            engine_of(tokenizer_file, hold=frozenset({"decode"})) as (engine, gateway),
            httpx.AsyncClient() as client,
        ):
            async with serving(gateway) as url:
                asking = asyncio.create_task(client.post(url + "/v1/completions", json=TEXT | {"stream": stream}))
                await engine.reached["decode"].wait()
            response = await asking
            if stream:
                assert events_of(response.text)[-1]["error"]["code"] == "aborted"
            else:
                assert (response.status_code, response.json()["error"]["code"]) == (503, "aborted")

    asyncio.run(main())


def test_the_key_guards_everything_but_health(tokenizer_file: Path) -> None:
    async def body(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        paths = json.loads((await client.get("/openapi.json", headers={"Authorization": "Bearer k"})).text)["paths"]
        for path, methods in paths.items():
            for method in methods:
                status = (await client.request(method, path.replace("{name}", "x"))).status_code
                assert (path, status == 401) == (path, path != "/health")
        for path in ("/", "/live/events", "/live/live.js", "/openapi.json", "/health/"):
            assert (path, (await client.get(path)).status_code) == (path, 401)
        for wrong in ("Bearer x", "k", ""):
            assert (await client.get("/v1/models", headers={"Authorization": wrong})).status_code == 401
        assert (await client.get("/v1/models", headers={"Authorization": "Bearer k"})).status_code == 200

    served(tokenizer_file, body, options={"api_key": "k"})


def test_addresses(tokenizer_file: Path) -> None:
    with HttpServer("127.0.0.1", 0) as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"port {port}"), HttpServer("127.0.0.1", port):
            pass
    with pytest.raises(ConfigError, match="other machines"), HttpServer("0.0.0.0", 0):
        pass
    with HttpServer("0.0.0.0", 0, allow_remote=True) as server:
        assert server.url.startswith("http://0.0.0.0:")


def test_health_is_red_when_work_waits_and_no_step_finishes(tokenizer_file: Path) -> None:
    async def main() -> None:
        async with (
            engine_of(tokenizer_file) as (engine, gateway),
            client_of(gateway, watchdog_s=5.0) as client,
        ):
            assert (await client.get("/health")).status_code == 200
            engine.stalled_s = 4.9
            assert (await client.get("/health")).status_code == 200
            engine.stalled_s = 5.0
            response = await client.get("/health")
            assert (response.status_code, response.json()["error"]["code"]) == (503, "stalled")
            engine.stalled_s = 0.0
            engine.state = "recovering"
            response = await client.get("/health")
            assert (response.status_code, response.json()["error"]["code"]) == (503, "recovering")
            engine.state = "ready"
            await gateway.drain()
            assert (await client.get("/health")).json()["error"]["code"] == "draining"
            assert (await client.post("/v1/completions", json=TEXT)).status_code == 429

    asyncio.run(main())
