"""Every flag of ``actorpp run`` has its effect, under every spelling; bad ones end in one line and exit code 2."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

import actorpp.cli.run
from actorpp.cli.app import REQUEST_FLAGS, app
from actorpp.cli.main import main
from actorpp.config import ALIASES, SERVER_FLAGS, EngineConfig, flag_of
from actorpp.errors import (
    CheckpointError,
    ConfigError,
    ModelNotFoundError,
    StageFailedError,
    UnsupportedModelError,
)
from actorpp.serving.api import OnStartup
from tests.unit.serving.fakes import FakeCheckpoint, FakeEngine, make_tokenizer


class Command:
    """Runs the command line in this process over a fake engine, and keeps what came of it."""

    def __init__(self, tokenizer: Path | None, capsys: pytest.CaptureFixture[str]) -> None:
        self.tokenizer, self.capsys = tokenizer, capsys
        self.engines: list[FakeEngine] = []
        self.out = self.err = ""

    def engine(self, config: EngineConfig, *, on_startup: OnStartup | None = None, trace: bool = False) -> FakeEngine:
        self.engines.append(FakeEngine(config, on_startup, trace, checkpoint=FakeCheckpoint(self.tokenizer)))
        return self.engines[-1]

    def __call__(self, *flags: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["run", *flags])
        self.out, self.err = self.capsys.readouterr()
        assert "Traceback" not in self.err
        return int(str(ended.value.code))

    @property
    def config(self) -> EngineConfig:
        return self.engines[-1].config

    @property
    def request(self) -> Any:
        return self.engines[-1].submitted[-1]


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    for name in os.environ:
        if name.startswith("ACTORPP_"):
            monkeypatch.delenv(name)
    command = Command(make_tokenizer(tmp_path / "model"), capsys)
    monkeypatch.setattr(actorpp.cli.run, "Engine", command.engine)
    monkeypatch.chdir(tmp_path)
    return command


# Flag → (value on the command line, value in EngineConfig).
ENGINE_FLAGS: dict[str, tuple[str | None, Any]] = {
    "model": ("org/name", "org/name"),
    "load_format": ("dummy", "dummy"),
    "dtype": ("bfloat16", "bfloat16"),
    "device": ("cuda:1", "cuda:1"),
    "attention_backend": ("sdpa", "sdpa"),
    "context_length": ("4096", 4096),
    "stages": ("4", 4),
    "layer_partition": ("8,8,7,7", (8, 8, 7, 7)),
    "threads_per_stage": ("2", 2),
    "async_depth": ("0", 0),
    "lookahead": ("3", 3),
    "transport": ("inproc", "inproc"),
    "tensor_transport": ("gloo", "gloo"),
    "control_host": ("127.0.0.1", "127.0.0.1"),
    "chunk_policy": ("sglang", "sglang"),
    "chunked_prefill_size": ("-1", -1),
    "enable_dynamic_chunking": (None, True),
    "dynamic_chunking_smooth_factor": ("0.6", 0.6),
    "max_num_batched_tokens": ("900", 900),
    "max_prefill_tokens": ("800", 800),
    "max_running_requests": ("5", 5),
    "max_queued_requests": ("0", 0),
    "page_size": ("32", 32),
    "kv_tokens": ("10000", 10000),
    "mem_fraction_static": ("0.5", 0.5),
    "seed": ("11", 11),
    "log_level": ("error", "error"),
    "max_restarts": ("7", 7),
    "warm_spares": ("2", 2),
    "startup_timeout": ("1.5", 1.5),
    "watchdog_timeout": ("2.5", 2.5),
    "dist_timeout": ("3.5", 3.5),
    "shutdown_timeout": ("4.5", 4.5),
}
# Flag → (value, where it is seen on the submitted request).
REQUESTED: dict[str, tuple[str | None, Callable[[Any], Any], Any]] = {
    "max_tokens": ("2", lambda request: request.params.max_tokens, 2),
    "n": ("3", lambda request: len(request.engine.submitted), 3),
    "ignore_eos": (None, lambda request: request.params.ignore_eos, True),
    "min_tokens": ("1", lambda request: request.params.sampling.min_tokens, 1),
    "stop": ("xyz", lambda request: request.stop_text is not None, True),
    "stop_token_ids": ("8,11", lambda request: request.params.stop_token_ids, (8, 11)),
    "temperature": ("0.7", lambda request: request.params.sampling.temperature, 0.7),
    "top_k": ("9", lambda request: request.params.sampling.top_k, 9),
    "top_p": ("0.8", lambda request: request.params.sampling.top_p, 0.8),
    "min_p": ("0.05", lambda request: request.params.sampling.min_p, 0.05),
    "repetition_penalty": ("1.1", lambda request: request.params.sampling.repetition_penalty, 1.1),
    "presence_penalty": ("0.5", lambda request: request.params.sampling.presence_penalty, 0.5),
    "frequency_penalty": ("-0.5", lambda request: request.params.sampling.frequency_penalty, -0.5),
    "logit_bias": ("42=-1.5", lambda request: request.params.sampling.logit_bias, ((42, -1.5),)),
    "seed": ("11", lambda request: request.params.seed, 11),
    "logprobs": ("0", lambda request: request.params.sampling.logprobs, 0),
    "prompt_logprobs": ("3", lambda request: request.params.sampling.prompt_logprobs, 3),
}
SEEN_ELSEWHERE = {
    "prompt", "prompt_file", "prompt_tokens_file", "chat", "include_stop_str_in_output", "json", "trace", "config",
    *SERVER_FLAGS,
}  # fmt: skip


def spellings(field: str) -> list[str]:
    return [flag_of(name) for name in (field, *ALIASES.get(field, ()))]


@pytest.mark.parametrize("flag", [flag for field in ENGINE_FLAGS for flag in spellings(field)])
def test_an_engine_flag_lands_in_the_config(command: Command, flag: str) -> None:
    field = next(field for field in ENGINE_FLAGS if flag in spellings(field))
    value, expected = ENGINE_FLAGS[field]
    assert getattr(EngineConfig(), field) != expected  # so that landing shows
    needed = ["--enable-dynamic-chunking"] if field == "dynamic_chunking_smooth_factor" else []
    assert command("--prompt", "x", flag, *([] if value is None else [value]), *needed) == 0
    assert getattr(command.config, field) == expected


@pytest.mark.parametrize("field", REQUESTED)
def test_a_request_flag_lands_on_the_request(command: Command, field: str) -> None:
    value, seen, expected = REQUESTED[field]
    assert command("--prompt", "x") == 0
    assert seen(command.request) != expected
    more = ["--json"] if "logprobs" in field else ["--json", "--temperature", "1"] if field == "n" else []
    assert command("--prompt", "x", flag_of(field), *([] if value is None else [value]), *more) == 0
    assert seen(command.request) == expected


def test_no_flag_is_left_out_of_these_tests() -> None:
    run = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    names = {parameter.name for parameter in run.params} - {"help"}
    assert names == set(ENGINE_FLAGS) | set(REQUESTED) | SEEN_ELSEWHERE
    assert set(EngineConfig.model_fields) == set(ENGINE_FLAGS) | set(SERVER_FLAGS)
    assert set(REQUEST_FLAGS) == set(REQUESTED) - {"seed"} | {"chat", "include_stop_str_in_output"}


def test_prompt_sources(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the cat\r\n 世界\n"
    (tmp_path / "p.txt").write_bytes(text.encode())
    (tmp_path / "ids.json").write_text("[5, 6, 7]")
    assert command("--prompt", text) == 0
    expected = command.request.prompt_ids
    assert command("--prompt-file", "p.txt") == 0
    assert command.request.prompt_ids == expected
    with (tmp_path / "p.txt").open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert command("--prompt-file", "-") == 0
    assert command.request.prompt_ids == expected
    assert command("--prompt-tokens-file", "ids.json") == 0
    assert command.request.prompt_ids == [5, 6, 7]
    assert command("--prompt", text, "--chat") == 0
    assert len(command.request.prompt_ids) > len(expected)
    assert command.request.prompt_ids[-1] == expected[-1]  # the template ends in a newline too


def test_a_stop_string_is_in_the_output_only_when_asked(command: Command) -> None:
    assert command("--prompt", "x") == 0
    assert command.out == "#$%\n"
    assert command("--prompt", "x", "--stop", "%", "--stop", "$") == 0
    assert command.out == "#\n"
    assert command("--prompt", "x", "--stop", "$", "--include-stop-str-in-output") == 0
    assert command.out == "#$\n"


def test_an_empty_prompt_is_a_prompt(command: Command) -> None:
    assert command("--prompt", "", "--max-tokens", "1") == 0  # the tokenizer's own <s> is left
    assert command.request.prompt_ids == [1]


def test_the_order_is_flag_environment_file_default(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.yaml").write_text("stages: 2\nlookahead: 2\npp-async-batch-depth: 2\n")
    monkeypatch.setenv("ACTORPP_STAGES", "3")
    monkeypatch.setenv("ACTORPP_LOOKAHEAD", "3")
    assert command("--prompt", "x", "--config", "c.yaml", "--stages", "4") == 0
    config = command.config
    assert (config.stages, config.lookahead, config.async_depth, config.page_size) == (4, 3, 2, 16)


def test_trace_is_written(command: Command, tmp_path: Path) -> None:
    assert command("--prompt", "x", "--trace", "t.json") == 0
    assert json.loads((tmp_path / "t.json").read_text()) == []
    assert command.engines[-1].trace
    assert command("--prompt", "x") == 0
    assert not command.engines[-1].trace


BAD: list[tuple[list[str], list[str]]] = [
    (["--stages", "x"], ["--stages", "integer"]),
    (["--stages", "0"], ["--stages", "0", "greater than or equal to 1"]),
    (["--transport", "pigeon"], ["--transport", "process", "inproc", "pigeon"]),
    (["--transport", "inproc", "--control-host", "127.0.0.1"], ["--control-host", "--transport process"]),
    (["--layer-partition", "8,x"], ["--layer-partition", "'x'"]),
    (["--layer-partition", "8,8,8", "--stages", "2"], ["--layer-partition", "3 stages", "2"]),
    (["--stagez", "2"], ["--stagez"]),
    (["--enable-dynamic-chunking", "--chunk-policy", "fixed"], ["--chunk-policy sglang", "fixed"]),
    (["--dynamic-chunking-smooth-factor", "0.6"], ["--chunk-policy sglang", "planned"]),
    (["--top-p", "2"], ["top_p", "<= 1"]),
    (["--max-tokens", "0"], ["max_tokens", ">= 1"]),
    (["--min-tokens", "17"], ["min_tokens", "17", "16"]),
    (["--stop", ""], ["stop", "length >= 1"]),
    (["--stop-token-ids", "5,x"], ["--stop-token-ids", "'x'"]),
    (["--n", "2", "--temperature", "1"], ["--n", "--json"]),
    (["--n", "2", "--json"], ["n", "temperature"]),
    (["--logprobs", "5"], ["--logprobs", "--json"]),
    (["--prompt-logprobs", "5"], ["--prompt-logprobs", "--json"]),
    (["--json", "--logprobs", "21"], ["logprobs", "<= 20"]),
    (["--logit-bias", "5"], ["--logit-bias 5", "ID=BIAS"]),
    (["--logit-bias", "5=1", "--logit-bias", "6=101"], ["logit_bias", "<= 100"]),
    (["--prompt-file", "none.txt"], ["--prompt", "exclude"]),
    (["--port", "80"], ["--port", "without a prompt"]),
    (["--api-key", "k"], ["--api-key", "without a prompt"]),
    (["--config", "none.yaml"], ["none.yaml", "No such file"]),
    (["--trace", "none/t.json"], ["--trace", "none"]),
    (["--max-tokens", "511"], ["512", "511", "2 tokens"]),
]


@pytest.mark.parametrize(("flags", "words"), BAD, ids=lambda value: " ".join(value)[:40])
def test_bad_flags_end_in_one_line_and_code_2(command: Command, flags: list[str], words: list[str]) -> None:
    assert command("--prompt", "a", *flags) == 2
    lines = [line for line in command.err.splitlines() if not line.startswith("loading:")]
    assert len(lines) == 1
    assert lines[0].startswith("actorpp: ")
    for word in words:
        assert word in lines[0]
    assert command.out == ""


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-tokens", "5"], ["--max-tokens", "only with a prompt"]),
        (["--temperature", "0"], ["--temperature", "only with a prompt"]),
        (["--chat"], ["--chat", "only with a prompt"]),
        (["--prompt-file", "none.txt"], ["none.txt", "No such file"]),
        (["--prompt-file", "latin.txt"], ["latin.txt", "UTF-8 at byte 2"]),
        (["--prompt-tokens-file", "latin.txt"], ["latin.txt", "UTF-8"]),
        (["--prompt-tokens-file", "text.txt"], ["text.txt", "JSON"]),
        (["--prompt-tokens-file", "object.json"], ["object.json", "list"]),
        (["--prompt-tokens-file", "words.json"], ["prompt_tokens", "int"]),
        (["--prompt-tokens-file", "words.json", "--chat"], ["--chat", "needs text"]),
        (["--host", "0.0.0.0"], ["0.0.0.0", "other machines"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_bad_prompts_end_in_one_line_and_code_2(
    command: Command, tmp_path: Path, flags: list[str], words: list[str]
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"ab\xff")
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "object.json").write_text("{}")
    (tmp_path / "words.json").write_text('["a"]')
    assert command(*flags) == 2
    assert len(command.err.splitlines()) == 1
    for word in words:
        assert word in command.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelNotFoundError("no model 'x'"), 2),
        (UnsupportedModelError("gemma3n is refused"), 2),
        (ConfigError("5 stages for 4 layers"), 2),
        (CheckpointError("disk full\nwhile converting"), 1),
        (StageFailedError("stage 1 died"), 1),
    ],
)
@pytest.mark.parametrize("flags", [["--prompt", "x", "--json"], []], ids=["prompt", "serve"])
def test_an_engine_that_does_not_start_is_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, flags: list[str]
) -> None:
    async def refuse(self: FakeEngine) -> FakeEngine:
        raise error

    monkeypatch.setattr(FakeEngine, "__aenter__", refuse)
    assert command(*flags) == code
    assert command.err == "actorpp: " + " ".join(str(error).split()) + "\n"
    assert command.out == ""


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--prompt", "x " * 600], ["512 tokens", "the prompt has 1", "max_tokens is 16"]),
        (["--prompt", "x", "--max-tokens", "600"], ["512 tokens", "max_tokens is 600"]),
        (["--prompt", "x", "--stop-token-ids", "10000"], ["stop_token_ids", "0-9999"]),
        (["--prompt", "x", "--logit-bias", "10000=1"], ["logit_bias", "0-9999"]),
    ],
)
def test_what_the_model_cannot_complete_is_told_before_it_loads(
    command: Command, monkeypatch: pytest.MonkeyPatch, flags: list[str], complaint: list[str]
) -> None:
    async def load(self: FakeEngine) -> FakeEngine:
        raise AssertionError("the stages were started")

    monkeypatch.setattr(FakeEngine, "__aenter__", load)
    assert command(*flags) == 2
    for part in complaint:
        assert part in command.err
    assert command.engines[-1].located


@pytest.mark.parametrize("flags", [["--prompt", "x"], []], ids=["prompt", "serve"])
def test_an_engine_that_fails_later_is_one_line_and_code_1(
    command: Command, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    async def fail(self: FakeEngine, name: str, or_when: asyncio.Event | None = None) -> None:
        if name == "startup":
            asyncio.get_running_loop().call_soon(self.fail, StageFailedError("stage 1 died"))
        elif name == "prefill":
            await asyncio.Event().wait()  # the request itself would hang

    monkeypatch.setattr(FakeEngine, "at", fail)
    assert command(*flags) == 1
    assert command.err.splitlines()[-1] == "actorpp: stage 1 died"
    assert command.engines[-1].closed


def test_help_names_every_flag_and_is_grouped(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main(["run", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for field in {*ENGINE_FLAGS, *REQUESTED, *SEEN_ELSEWHERE}:
        for flag in spellings(field):
            assert flag in text, flag
    manual = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    for field in {*ENGINE_FLAGS, *REQUESTED, *SEEN_ELSEWHERE} - {"help"}:
        for flag in spellings(field):
            assert f"`{flag}" in manual, flag
    for panel in ("Prompt", "Sampling", "Model", "Pipeline", "Scheduling", "KV memory", "Server"):
        assert f" {panel} " in text


def test_the_help_says_what_a_value_means_not_its_type() -> None:
    commands = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    commands |= {f"bench {name}": command for name, command in commands.pop("bench").commands.items()}
    unnamed = [
        f"{name} {parameter.opts[0]}"
        for name, command in commands.items()
        for parameter in command.params
        if parameter.name != "help" and parameter.metavar is None
    ]
    assert unnamed == []
