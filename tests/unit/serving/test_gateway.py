"""The gateway over a fake engine: what reaches the engine, what comes back, and what is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from actorpp.config import EngineConfig
from actorpp.errors import (
    CheckpointError,
    ContextLengthExceededError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    StageFailedError,
)
from actorpp.serving.api import Progress
from actorpp.serving.completion import Completion, CompletionResult, Delta
from actorpp.serving.gateway import Gateway
from actorpp.serving.request import CompletionRequest, TokenizeRequest, parse_request
from actorpp.serving.tokenizer import TextCodec
from tests.unit.serving.fakes import ANSWER, FakeCheckpoint, FakeEngine, logprob

T = TypeVar("T")


def check(tokenizer: Path | None, body: Callable[[FakeEngine, Gateway], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with FakeEngine(EngineConfig(), checkpoint=FakeCheckpoint(tokenizer)) as engine:
            if tokenizer is not None:
                ids = TextCodec(tokenizer).encode(ANSWER, add_special_tokens=False)
                engine.answer = lambda prompt_ids: ids
            async with Gateway(engine, "fake") as gateway:
                await body(engine, gateway)

    asyncio.run(main())


async def collect(gateway: Gateway, request: CompletionRequest) -> list[Progress | Delta | CompletionResult]:
    return [event async for event in await gateway.complete(request)]


def ask(**fields: Any) -> CompletionRequest:
    return parse_request({"max_tokens": 100, **fields})


def test_text_in_text_out(tokenizer_file: Path) -> None:
    async def body(engine: FakeEngine, gateway: Gateway) -> None:
        events = await collect(gateway, ask(prompt="the cat"))
        codec = TextCodec(tokenizer_file)
        assert engine.submitted[0].prompt_ids == codec.encode("the cat")
        assert [type(event) for event in events[:3]] == [Progress, Progress, Progress]
        deltas = [event for event in events if isinstance(event, Delta)]
        assert "".join(delta.text for delta in deltas) == ANSWER
        result = events[-1]
        assert isinstance(result, CompletionResult)
        assert result.text == ANSWER
        assert list(result.token_ids) == codec.encode(ANSWER, add_special_tokens=False)
        assert result.prompt_tokens == len(engine.submitted[0].prompt_ids)
        assert result.finish_reason == "stop"
        assert sum(result.metrics.chunks) == result.prompt_tokens

    check(tokenizer_file, body)


def test_output_cut_within_a_character_ends_as_the_whole_decode(tokenizer_file: Path) -> None:
    async def body(engine: FakeEngine, gateway: Gateway) -> None:
        events = await collect(gateway, ask(prompt="x", max_tokens=3))
        result = events[-1]
        assert isinstance(result, CompletionResult)
        assert result.finish_reason == "length"
        assert result.text == "Gr\ufffd" == TextCodec(tokenizer_file).decode(list(result.token_ids))
        assert events[-2] == Delta((), "\ufffd")

    check(tokenizer_file, body)


def test_chat_goes_through_the_template(tokenizer_file: Path) -> None:
    async def body(engine: FakeEngine, gateway: Gateway) -> None:
        await collect(gateway, ask(messages=[{"role": "user", "content": "hi"}]))
        codec = TextCodec(tokenizer_file)
        text = "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert engine.submitted[0].prompt_ids == codec.encode(text, add_special_tokens=False)

    check(tokenizer_file, body)


def test_the_loop_runs_on_while_a_text_is_tokenised(tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Event(), threading.Event()

    def encode(self: TextCodec, text: str, *, add_special_tokens: bool = True) -> list[int]:
        entered.set()
        assert leave.wait(30)
        return [1]

    async def body(engine: FakeEngine, gateway: Gateway) -> None:
        monkeypatch.setattr(TextCodec, "encode", encode)
        slow = asyncio.create_task(collect(gateway, ask(prompt="long")))
        assert await asyncio.to_thread(entered.wait, 30)
        await collect(gateway, ask(prompt_tokens=[1, 2]))  # another request is served meanwhile
        assert not slow.done()
        leave.set()
        await slow

    check(tokenizer_file, body)


@pytest.mark.parametrize(("prompt", "max_tokens"), [(513, 1), (500, 13)])
def test_what_does_not_fit_is_told_with_both_numbers(prompt: int, max_tokens: int) -> None:
    async def body(engine: FakeEngine, gateway: Gateway) -> None:
        with pytest.raises(ContextLengthExceededError, match=rf"512 tokens.* {prompt} tokens"):
            await gateway.complete(ask(prompt_tokens=[1] * prompt, max_tokens=max_tokens))
        assert not engine.submitted
        await collect(gateway, ask(prompt_tokens=[1] * 500, max_tokens=12))

    check(None, body)


def test_an_empty_prompt_is_refused() -> None:
    async def body(engine: FakeEngine, gateway: Gateway) -> None:
        with pytest.raises(InvalidRequestError, match="empty"):
            await gateway.complete(ask(prompt_tokens=[]))

    check(None, body)


def test_without_a_tokenizer_ids_are_served_and_text_is_refused() -> None:
    async def body(engine: FakeEngine, gateway: Gateway) -> None:
        with pytest.raises(InvalidRequestError, match="no tokenizer"):
            await gateway.complete(ask(prompt="x"))
        result = (await collect(gateway, ask(prompt_tokens=[5])))[-1]
        assert isinstance(result, CompletionResult)
        assert (result.text, result.token_ids) == ("", (7, 8, 9))

    check(None, body)


def test_the_engines_refusals_pass_through() -> None:
    async def body(engine: FakeEngine, gateway: Gateway) -> None:
        engine.capacity = 0
        with pytest.raises(OverloadedError):
            await gateway.complete(ask(prompt_tokens=[1]))
        engine.capacity = 1
        with pytest.raises(InvalidRequestError, match="must lie in 0-9999"):
            await gateway.complete(ask(prompt_tokens=[20_000]))

    check(None, body)


def test_log_probabilities_come_with_the_deltas_and_whole_with_the_result() -> None:
    async def body(engine: FakeEngine, gateway: Gateway) -> None:
        events = await collect(gateway, ask(prompt_tokens=[5, 6, 7, 8, 9], logprobs=2, prompt_logprobs=0))
        result = events[-1]
        assert isinstance(result, CompletionResult)
        assert result.logprobs == tuple(logprob(token, 2) for token in (7, 8, 9))
        assert result.prompt_logprobs == (None, *(logprob(token, 0) for token in (6, 7, 8, 9)))
        assert [row for event in events if isinstance(event, Delta) for row in event.logprobs] == [*result.logprobs]

    check(None, body)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 250_001, "logprobs": 0}, "logprobs"),
        ({"max_tokens": 11_905, "logprobs": 20}, "logprobs"),
        ({"prompt_tokens": [1] * 125_001, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_more_log_probabilities_than_an_answer_holds_are_refused(fields: dict[str, Any], param: str) -> None:
    async def body(engine: FakeEngine, gateway: Gateway) -> None:
        engine.context_length = 10**6
        with pytest.raises(InvalidRequestError, match="more than 250000") as caught:
            await gateway.complete(ask(**{"prompt_tokens": [1], **fields}))
        assert caught.value.param == param
        await gateway.complete(ask(prompt_tokens=[1] * 125_000, prompt_logprobs=1))

    check(None, body)


def test_several_outputs_come_in_one_result_in_their_order() -> None:
    async def body(engine: FakeEngine, gateway: Gateway) -> None:
        asked = ask(prompt_tokens=[5, 6], n=3, temperature=1.0, seed=8, prompt_logprobs=0, logprobs=0)
        events = await collect(gateway, asked)
        result = events[-1]
        assert isinstance(result, CompletionResult)
        assert [(handle.params.index, handle.params.seed) for handle in engine.submitted] == [(0, 8), (1, 8), (2, 8)]
        assert [output.token_ids for output in result.outputs] == [(7, 8, 9)] * 3
        deltas = [event for event in events if isinstance(event, Delta)]
        for index in range(3):
            assert [token for delta in deltas if delta.index == index for token in delta.ids] == [7, 8, 9]
        assert len([event for event in events if isinstance(event, Progress)]) == 2  # the first output's
        assert [handle.params.sampling.prompt_logprobs for handle in engine.submitted] == [0, None, None]
        assert result.prompt_logprobs == (None, logprob(6, 0))
        assert set(result.fields()) == {"outputs", "prompt_tokens", "prompt_logprobs"}

    check(None, body)


def test_one_of_several_outputs_that_fails_or_is_refused_ends_the_others() -> None:
    async def body(engine: FakeEngine, gateway: Gateway) -> None:
        several = ask(prompt_tokens=[5], n=3, temperature=1.0)
        engine.hold = frozenset({"prefill"})
        running = asyncio.create_task(collect(gateway, several))
        await engine.reached["prefill"].wait()
        engine.fail(StageFailedError("stage 1 died"))
        with pytest.raises(StageFailedError):
            await running
        assert all(handle.aborted.is_set() and handle.finished for handle in engine.submitted)
        accepted = engine.submit

        def refuse(*args: Any) -> Any:
            if len(engine.submitted) == 5:
                raise OverloadedError("the queue is full")
            return accepted(*args)

        engine.submit = refuse  # type: ignore[method-assign]
        with pytest.raises(OverloadedError):
            await gateway.complete(several)
        assert all(handle.aborted.is_set() for handle in engine.submitted)

    check(None, body)


def test_leaving_several_outputs_early_aborts_them_all() -> None:
    async def body(engine: FakeEngine, gateway: Gateway) -> None:
        engine.hold = frozenset({"decode"})
        completion = await gateway.complete(ask(prompt_tokens=[5], n=2, temperature=1.0))
        reader = asyncio.create_task(_last(completion))
        await engine.reached["decode"].wait()
        completion.abort()
        result = await reader
        assert [output.finish_reason for output in result.outputs] == ["abort", "abort"]
        reader = asyncio.create_task(collect(gateway, ask(prompt_tokens=[5], n=2, temperature=1.0)))
        engine.reached["decode"].clear()
        await engine.reached["decode"].wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert all(handle.aborted.is_set() for handle in engine.submitted)
        assert not engine.running

    check(None, body)


async def _last(completion: Completion) -> CompletionResult:
    (result,) = [event async for event in completion if isinstance(event, CompletionResult)]
    return result


def test_abort_ends_with_what_there_is() -> None:
    async def body(engine: FakeEngine, gateway: Gateway) -> None:
        engine.hold = frozenset({"decode"})
        completion = await gateway.complete(ask(prompt_tokens=[1]))
        events: list[object] = []

        async def read() -> None:
            async for event in completion:
                events.append(event)

        reader = asyncio.create_task(read())
        await engine.reached["decode"].wait()
        completion.abort()
        await reader
        result = events[-1]
        assert isinstance(result, CompletionResult)
        assert (result.finish_reason, result.token_ids) == ("abort", (7, 8))

    check(None, body)


def test_a_reader_that_is_cancelled_aborts_its_request() -> None:
    async def body(engine: FakeEngine, gateway: Gateway) -> None:
        engine.hold = frozenset({"decode"})
        reader = asyncio.create_task(collect(gateway, ask(prompt_tokens=[1])))
        await engine.reached["decode"].wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert engine.submitted[0].aborted.is_set()

    check(None, body)


def test_an_engine_that_fails_raises_from_the_events() -> None:
    async def body(engine: FakeEngine, gateway: Gateway) -> None:
        engine.hold = frozenset({"prefill"})
        reader = asyncio.create_task(collect(gateway, ask(prompt_tokens=[1])))
        await engine.reached["prefill"].wait()
        engine.fail(StageFailedError("stage 1 died"))
        with pytest.raises(StageFailedError, match="stage 1 died"):
            await reader

    check(None, body)


def test_the_deadline_holds_while_a_text_waits_for_the_tokenizer(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = threading.Event()

    def encode(self: TextCodec, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert leave.wait(30)
        return [1]

    async def body(engine: FakeEngine, gateway: Gateway) -> None:
        monkeypatch.setattr(TextCodec, "encode", encode)
        with pytest.raises(DeadlineExceededError, match="tokenised"):
            await gateway.complete(ask(prompt="x"), deadline_s=0.01)
        leave.set()
        assert not engine.submitted
        await gateway.complete(ask(prompt="x"), deadline_s=100.0)
        deadline = engine.submitted[0].params.deadline_s
        assert deadline is not None
        assert 0 < deadline < 100

    check(tokenizer_file, body)


def test_a_broken_tokenizer_leaves_no_thread(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    before = threading.active_count()
    with pytest.raises(CheckpointError):
        check(tmp_path / "tokenizer.json", lambda engine, gateway: asyncio.sleep(0))
    assert threading.active_count() == before


def test_a_draining_gateway_takes_nothing_new_and_waits_for_what_it_has(tokenizer_file: Path) -> None:
    async def main() -> None:
        engine = FakeEngine(EngineConfig(), checkpoint=FakeCheckpoint(tokenizer_file), hold=frozenset({"decode"}))
        async with engine, Gateway(engine, "tiny") as gateway:
            request = parse_request({"prompt": "x"})
            completion = await gateway.complete(request)
            events: list[object] = []

            async def follow() -> None:
                events.extend([event async for event in completion])

            following = asyncio.create_task(follow())
            await engine.reached["decode"].wait()
            draining = asyncio.create_task(gateway.drain())
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError, match="stopping"):
                await gateway.complete(request)
            assert not draining.done()
            engine.release()
            await draining
            await following
            assert isinstance(events[-1], CompletionResult)

    asyncio.run(main())


def test_a_short_text_does_not_wait_behind_long_ones(tokenizer_file: Path) -> None:
    async def main() -> None:
        engine = FakeEngine(EngineConfig(), checkpoint=FakeCheckpoint(tokenizer_file))
        async with engine, Gateway(engine, "tiny") as gateway:
            held = threading.Event()
            long = [asyncio.create_task(gateway.off_loop(held.wait, 1 << 20)) for _ in range(8)]
            assert await gateway.tokenize(TokenizeRequest(prompt="x"))
            held.set()
            await asyncio.gather(*long)

    asyncio.run(main())


async def leaves_the_loop_free(work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, in less than half of whose time, at a stretch, the loop did nothing."""
    loop = asyncio.get_running_loop()
    longest, began, task = 0.0, loop.time(), asyncio.create_task(work)
    last = began
    while not task.done():
        await asyncio.sleep(0)
        longest, last = max(longest, loop.time() - last), loop.time()
    assert longest < (last - began) / 2
    return task.result()


def test_a_long_text_leaves_the_loop_free(tokenizer_file: Path) -> None:
    """Beside the loop is not enough: a thread that holds Python's lock holds the loop up all the same."""

    async def body(engine: FakeEngine, gateway: Gateway) -> None:
        ids = await leaves_the_loop_free(gateway.tokenize(TokenizeRequest(prompt="the cat sat " * 100_000)))
        assert len(await leaves_the_loop_free(gateway.detokenize(ids))) > 1_000_000

    check(tokenizer_file, body)
