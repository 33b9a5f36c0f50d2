"""``LLM`` over a fake engine: what reaches the engine, what comes back, and how it ends."""

from __future__ import annotations

import asyncio
import gc
import io
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import actorpp.background
from actorpp import LLM, SamplingParams
from actorpp.config import EngineConfig
from actorpp.errors import (
    AbortedError,
    ConfigError,
    ContextLengthExceededError,
    InvalidRequestError,
    ModelNotFoundError,
    StageFailedError,
)
from actorpp.serving.api import OnStartup
from actorpp.serving.request import MAX_OUTPUTS, CompletionRequest
from actorpp.serving.tokenizer import TextCodec
from tests.unit.serving.fakes import ANSWER, FakeCheckpoint, FakeEngine, FakeHandle, make_tokenizer

PATIENCE = 30.0


class Point(asyncio.Event):
    """A point of the fake engine that other threads can wait for."""

    def __init__(self, seen: threading.Event) -> None:
        super().__init__()
        self.seen = seen

    def set(self) -> None:
        super().set()
        self.seen.set()


class Fakes:
    """Engines as LLMs make them. ``more`` are further fields of theirs."""

    def __init__(self, tokenizer: Path) -> None:
        self.codec = TextCodec(tokenizer)
        self.tokenizer = tokenizer
        self.made: list[FakeEngine] = []
        self.more: dict[str, Any] = {"capacity": 1000}
        self.points = {name: threading.Event() for name in ("startup", "prefill", "decode")}

    def __call__(self, config: EngineConfig, *, on_startup: OnStartup | None = None) -> FakeEngine:
        engine = FakeEngine(config, on_startup, checkpoint=FakeCheckpoint(self.tokenizer), **self.more)
        engine.reached = {name: Point(seen) for name, seen in self.points.items()}
        self.made.append(engine)
        return engine

    @property
    def engine(self) -> FakeEngine:
        return self.made[-1]

    @contextmanager
    def when(self, point: str, what: Callable[[], object]) -> Iterator[None]:
        """Meanwhile, in another thread: wait until an engine has reached the point, then call ``what``."""

        def wait() -> None:
            assert self.points[point].wait(PATIENCE)
            what()

        thread = threading.Thread(target=wait, name="helper")
        thread.start()
        try:
            yield
        finally:
            thread.join()


def interrupt() -> None:
    """Ctrl-C, as the main thread gets it."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    fakes = Fakes(make_tokenizer(tmp_path / "tokenizer"))
    monkeypatch.setattr(actorpp.background, "Engine", fakes)
    return fakes


@pytest.fixture
def llm(fakes: Fakes) -> Iterator[LLM]:
    with LLM(use_tqdm_on_load=False) as llm:
        yield llm


# --- prompts and results ---


def test_every_form_of_a_prompt(fakes: Fakes, llm: LLM) -> None:
    prompts = ["the cat", {"prompt": "the hat"}, [5, 6], (7,), {"prompt_token_ids": [8, 9]}]
    outputs = llm.generate(prompts, use_tqdm=False)
    ids = [fakes.codec.encode("the cat"), fakes.codec.encode("the hat"), [5, 6], [7], [8, 9]]
    assert [output.prompt_token_ids for output in outputs] == ids
    assert [output.prompt for output in outputs] == ["the cat", "the hat", None, None, None]
    assert sorted(handle.prompt_ids for handle in fakes.engine.submitted) == sorted(ids)
    assert len(llm.generate(prompt for prompt in prompts)) == len(prompts)
    for single in prompts:  # each is also accepted alone, and still gives a list
        assert len(llm.generate(single)) == 1
    assert llm.generate([]) == []


def test_a_result_has_everything(fakes: Fakes, llm: LLM) -> None:
    ids = fakes.codec.encode(ANSWER, add_special_tokens=False)
    fakes.engine.answer = lambda prompt: ids
    (output,) = llm.generate("the cat", SamplingParams(max_tokens=100))
    (answer,) = output.outputs
    assert (answer.index, answer.text, answer.token_ids, answer.finish_reason) == (0, ANSWER, ids, "stop")
    assert (answer.logprobs, answer.cumulative_logprob, answer.finished()) == (None, None, True)
    assert (output.request_id, output.finished) == ("0", True)
    assert output.metrics.ttft_s == 0.5
    assert sum(output.metrics.chunks) == len(output.prompt_token_ids)
    (short,) = llm.generate("the cat", SamplingParams(max_tokens=2))
    assert (short.request_id, short.outputs[0].finish_reason) == ("1", "length")
    assert llm.model_path == Path("fake")
    assert llm.stats().requests_finished == 2


def test_numbers_of_numpy_are_ids(fakes: Fakes, llm: LLM) -> None:
    numpy = pytest.importorskip("numpy")
    assert llm.generate(numpy.array([3, 4]))[0].prompt_token_ids == [3, 4]
    assert llm.generate({"prompt_token_ids": numpy.array([3, 4])})[0].prompt_token_ids == [3, 4]


def test_chats(fakes: Fakes, llm: LLM) -> None:
    def rendered(text: str) -> str:
        return f"<s><|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"

    chats = [[{"role": "user", "content": text}] for text in ("hi", "ho")]
    outputs = llm.chat(chats, SamplingParams(max_tokens=3), use_tqdm=False)
    assert [output.prompt for output in outputs] == [rendered("hi"), rendered("ho")]
    assert outputs[0].prompt_token_ids == fakes.codec.encode(rendered("hi"), add_special_tokens=False)
    (alone,) = llm.chat(chats[1])
    assert alone.prompt == rendered("ho")


def test_a_chats_template_gets_tools_and_variables(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def render(codec: TextCodec, messages: list[Any], **given: Any) -> str:
        seen.append(given)
        return "the cat"

    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(TextCodec, "render_chat", render)
    tools = [{"type": "function", "function": {"name": "weather"}}]
    chat = [{"role": "user", "content": "hi"}]
    llm.chat(chat, tools=tools, chat_template_kwargs={"enable_thinking": False})
    llm.chat(chat)
    assert seen == [{"tools": tools, "variables": {"enable_thinking": False}}, {"tools": None, "variables": {}}]


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ({"text": "x"}, "'text'"),
        ({}, "nothing"),
        ({"prompt": 3}, "prompt: expected"),
        ([1.5], "integers"),
        ([[1, "x"]], "integers"),
        ([[-1]], "prompt_tokens"),
        ("x" * 3000, "maximum context length"),
        ([[]], "empty"),
    ],
)
def test_a_bad_prompt_is_one_clear_error(prompt: Any, complaint: str, llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        llm.generate(prompt)
    with pytest.raises(InvalidRequestError, match="role"):
        llm.chat([{"content": "no role"}])
    assert len(llm.generate("the cat")) == 1


def test_a_prompt_that_cannot_work_is_found_before_any_is_answered(fakes: Fakes, llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="token ids must lie in 0-9999") as raised:
        llm.generate([[1], [2], [20_000]], use_tqdm=False)
    assert raised.value.__notes__ == ["prompt number 2, counted from 0"]
    with pytest.raises(ContextLengthExceededError, match="512 tokens, but the prompt has 600"):
        llm.generate([[1], [2] * 600], use_tqdm=False)
    assert fakes.engine.submitted == []


def test_an_error_says_which_prompt_and_ends_the_others(
    fakes: Fakes, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(engine: FakeEngine, prompt_ids: list[int], *more: Any) -> FakeHandle:
        if prompt_ids == [3]:
            raise InvalidRequestError("more than the cache holds")
        return shipped(engine, prompt_ids, *more)

    shipped = FakeEngine.submit
    monkeypatch.setattr(FakeEngine, "submit", submit)
    fakes.engine.hold = frozenset({"decode"})
    with pytest.raises(InvalidRequestError, match="more than the cache holds") as raised:
        llm.generate([[1], [2], [3]], use_tqdm=False)
    assert raised.value.__notes__ == ["prompt number 2, counted from 0"]
    assert [handle.aborted.is_set() for handle in fakes.engine.submitted] == [True, True]


# --- sampling parameters ---

# vLLM's name, its default, another value, and where the engine sees it.
PARAMETERS: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "n": (1, 2, lambda params: params.index + 1),
    "max_tokens": (16, None, lambda params: params.max_tokens),
    "temperature": (1.0, 0.5, lambda params: params.sampling.temperature),
    "top_k": (0, 7, lambda params: params.sampling.top_k),
    "top_p": (1.0, 0.5, lambda params: params.sampling.top_p),
    "min_p": (0.0, 0.25, lambda params: params.sampling.min_p),
    "repetition_penalty": (1.0, 1.5, lambda params: params.sampling.repetition_penalty),
    "presence_penalty": (0.0, 0.5, lambda params: params.sampling.presence_penalty),
    "frequency_penalty": (0.0, 0.5, lambda params: params.sampling.frequency_penalty),
    "logit_bias": ({}, {5: 1.0}, lambda params: dict(params.sampling.logit_bias)),
    "min_tokens": (0, 2, lambda params: params.sampling.min_tokens),
    "stop_token_ids": ((), (3,), lambda params: params.stop_token_ids),
    "logprobs": (None, 2, lambda params: params.sampling.logprobs),
    "prompt_logprobs": (None, 2, lambda params: params.sampling.prompt_logprobs),
    "seed": (None, 3, lambda params: params.seed),
    "ignore_eos": (False, True, lambda params: params.ignore_eos),
}

TEXT_PARAMETERS = {"stop": (), "include_stop_str_in_output": False}  # seen in the text: test_stop_strings_end_the_text


def test_every_parameter_is_tested_and_known_to_requests() -> None:
    defaults = {name: default for name, (default, _, _) in PARAMETERS.items()} | TEXT_PARAMETERS
    assert msgspec.structs.asdict(SamplingParams()) == defaults
    assert set(defaults) <= set(CompletionRequest.__struct_fields__)


def test_every_parameter_reaches_the_engine(fakes: Fakes, llm: LLM) -> None:
    for name, (default, other, seen) in PARAMETERS.items():
        llm.generate("the cat")
        llm.generate("the cat", SamplingParams(**{name: other}))
        assert [seen(handle.params) for handle in fakes.engine.submitted[-2:]] == [default, other], name
    llm.generate("the cat", SamplingParams(top_k=-1))
    assert fakes.engine.submitted[-1].params.sampling.top_k == 0
    nothing = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)  # type: ignore[arg-type] - as vLLM's
    llm.generate("the cat", nothing)
    assert fakes.engine.submitted[-1].params == fakes.engine.submitted[0].params


def test_stop_strings_end_the_text(fakes: Fakes, llm: LLM) -> None:
    ids = fakes.codec.encode(ANSWER, add_special_tokens=False)
    fakes.engine.answer = lambda prompt: ids
    text, stop = ANSWER, ANSWER[3:6]
    (cut,) = llm.generate("the cat", SamplingParams(max_tokens=100, stop=stop))
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    (kept,) = llm.generate("the cat", SamplingParams(max_tokens=100, stop=[stop], include_stop_str_in_output=True))
    assert kept.outputs[0].text == text[: text.index(stop) + len(stop)]


def test_log_probabilities_come_by_token_id(fakes: Fakes, llm: LLM) -> None:
    (result,) = llm.generate("the cat", SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=1))
    (output,) = result.outputs
    assert output.logprobs is not None
    assert [next(iter(place)) for place in output.logprobs] == output.token_ids
    own = [place[token] for place, token in zip(output.logprobs, output.token_ids, strict=True)]
    assert all(found.rank >= 1 for found in own)
    assert output.cumulative_logprob == sum(found.logprob for found in own)
    assert [found.decoded_token for found in own] == [fakes.codec.token_text(token) for token in output.token_ids]
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert [next(iter(place or {})) for place in result.prompt_logprobs[1:]] == result.prompt_token_ids[1:]


def test_several_outputs_of_one_prompt(llm: LLM) -> None:
    (result,) = llm.generate("the cat", SamplingParams(n=3))
    assert [output.index for output in result.outputs] == [0, 1, 2]


def test_one_set_of_parameters_or_one_for_each(fakes: Fakes, llm: LLM) -> None:
    each = [SamplingParams(max_tokens=n) for n in (1, 2, 3)]
    outputs = llm.generate(["a", "b", "c"], each, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]
    with pytest.raises(InvalidRequestError, match="2 sampling_params for 3 prompts"):
        llm.generate(["a", "b", "c"], each[:2])


def test_priorities_order_the_prompts(fakes: Fakes) -> None:
    with LLM(max_running_requests=1, max_queued_requests=0, use_tqdm_on_load=False) as llm:  # one place: one by one
        outputs = llm.generate([[1], [2], [3]], priority=[5, 0, -1], use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == [[1], [2], [3]]
        with pytest.raises(InvalidRequestError, match="2 priority for 3 prompts"):
            llm.generate([[1], [2], [3]], priority=[0, 0])
    assert [(handle.prompt_ids, handle.params.priority) for handle in fakes.engine.submitted] == [
        ([3], -1), ([2], 0), ([1], 5)
    ]  # fmt: skip


@pytest.mark.parametrize("bad", [{"max_tokens": 0}, {"temperature": -1}, {"top_p": 0}, {"top_k": -2}, {"seed": "x"}])
def test_bad_parameters_are_refused_when_they_are_made(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        SamplingParams(**bad)
    assert raised.value.param == next(iter(bad))


# --- options ---


def test_options_are_the_flags_names(fakes: Fakes, tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("stages: 2\npage-size: 32\n")
    with LLM("/some/model", config=file, pipeline_parallel_size=3, chunked_prefill_size=64, use_tqdm_on_load=False):
        config = fakes.engine.config
    assert (config.model, config.stages, config.page_size, config.chunked_prefill_size) == ("/some/model", 3, 32, 64)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"stagess": 2}, "'stagess'"),
        ({"port": 80}, "serving"),
        ({"stages": 2, "pp_size": 2}, "again"),
        ({"stages": 0}, "stages"),
    ],
)
def test_bad_options(options: dict[str, Any], complaint: str, fakes: Fakes) -> None:
    with pytest.raises(ConfigError, match=complaint):
        LLM(**options)
    assert fakes.made == []


def test_more_prompts_than_the_engine_takes_wait(fakes: Fakes) -> None:
    fakes.more["capacity"] = 3
    with LLM(max_running_requests=2, max_queued_requests=1, use_tqdm_on_load=False) as llm:
        assert fakes.engine.config.max_queued_requests == 3 * MAX_OUTPUTS  # a prompt may ask for so many
        outputs = llm.generate([[number] for number in range(40)], use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[number] for number in range(40)]


# --- progress ---


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_told_on_stderr_when_asked(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    with LLM() as llm:
        assert "loading: 2 of 2 stages" in capsys.readouterr().err
        llm.generate("one prompt is soon done")
        llm.generate(["a", "b", "c"], use_tqdm=False)
        assert capsys.readouterr() == ("", "")
        llm.generate(["a", "b", "c"])
        assert capsys.readouterr() == ("", "".join(f"generating: {n} of 3 prompts\n" for n in (1, 2, 3)))


def test_progress_is_a_bar_on_a_terminal(fakes: Fakes, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    llm.generate(["a", "b", "c"])
    assert "generating" in terminal.getvalue()
    assert "3 of 3 prompts" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[?25h")  # the cursor is back


# --- threads, loops, ends ---


def test_ctrl_c_aborts_and_the_llm_goes_on(fakes: Fakes, llm: LLM) -> None:
    prompts = [[number] for number in range(400)]  # some run, some wait for a place
    fakes.engine.hold = frozenset({"decode"})
    with fakes.when("decode", interrupt), pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, use_tqdm=False)
    assert fakes.engine.running == set()
    assert all(handle.aborted.is_set() for handle in fakes.engine.submitted)
    fakes.engine.hold = frozenset()
    assert len(llm.generate(prompts, use_tqdm=False)) == 400


def test_ctrl_c_at_any_moment(fakes: Fakes, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between two instructions: a lock that an interrupted wait left taken would hang the engine's thread."""
    monkeypatch.setattr(fakes.engine, "hold", frozenset({"decode"}))

    def interrupted_after(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        llm.generate([1])

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for number in range(400):
            with pytest.raises(KeyboardInterrupt):
                interrupted_after(1e-5 + number * 5e-6)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert fakes.engine.running == set()


def test_ctrl_c_while_it_starts_leaves_nothing(fakes: Fakes) -> None:
    fakes.more["hold"] = frozenset({"startup"})
    with fakes.when("startup", interrupt), pytest.raises(KeyboardInterrupt):
        LLM(use_tqdm_on_load=False)


def test_what_the_start_raises_is_raised(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(engine: FakeEngine) -> FakeEngine:
        raise ModelNotFoundError("no such model")

    monkeypatch.setattr(FakeEngine, "__aenter__", fail)
    with pytest.raises(ModelNotFoundError):
        LLM()


def test_inside_a_running_loop(fakes: Fakes, llm: LLM) -> None:
    """As in a notebook: called as it stands it blocks the loop; in a thread, the loop goes on."""

    async def main() -> None:
        assert len(llm.generate("the cat")) == 1
        fakes.points["decode"].clear()
        fakes.engine.hold = frozenset({"decode"})
        waiting = asyncio.create_task(asyncio.to_thread(llm.generate, [[1], [2]], use_tqdm=False))
        assert await asyncio.to_thread(fakes.points["decode"].wait, PATIENCE)
        assert not waiting.done()
        llm._thread._loop.call_soon_threadsafe(fakes.engine.release)
        assert len(await waiting) == 2

    asyncio.run(main())


def test_calls_from_several_threads_at_once(fakes: Fakes, llm: LLM) -> None:
    found: dict[int, list[list[int]]] = {}

    def call(number: int) -> None:
        outputs = llm.generate([[number, n] for n in range(50)], use_tqdm=False)
        found[number] = [output.prompt_token_ids for output in outputs]

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [[number, n] for n in range(50)] for number in range(4)}


def test_close_aborts_what_is_under_way(fakes: Fakes, llm: LLM) -> None:
    fakes.engine.hold = frozenset({"decode"})
    with fakes.when("decode", llm.close), pytest.raises(AbortedError, match="closed"):
        llm.generate([[number] for number in range(400)], use_tqdm=False)
    assert fakes.engine.closed
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("the cat")


def test_what_is_left_open_ends_with_its_last_reference(fakes: Fakes) -> None:
    llm = LLM(use_tqdm_on_load=False)
    assert len(llm.generate("the cat")) == 1
    del llm
    gc.collect()
    assert fakes.engine.closed


def test_a_failed_engine_is_a_typed_error(fakes: Fakes, llm: LLM) -> None:
    fakes.engine.failure = StageFailedError("a stage died")
    with pytest.raises(StageFailedError, match="a stage died") as raised:
        llm.generate(["the cat", "the hat"], use_tqdm=False)
    assert not hasattr(raised.value, "__notes__")  # it is about no prompt of its own
