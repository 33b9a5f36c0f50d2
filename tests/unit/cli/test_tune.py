"""``actorpp tune`` over the shipped engine with a tiny model, its stages in this process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer

from actorpp.cli.app import app
from actorpp.cli.main import main
from actorpp.cli.options import engine_flags
from actorpp.config import flag_of
from tests.exactness.tiny import save_llama

SMALL = ["--transport", "inproc", "--stages", "2", "--threads-per-stage", "1", "--dtype", "float32"]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("ACTORPP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ACTORPP_CACHE", str(tmp_path / "cache"))  # profiles are kept there
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("tune"), layers=4, max_position_embeddings=1024)


def run(*flags: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(flags))
    return int(str(ended.value.code))


def test_tune_tries_the_three_steps_and_planned_and_says_what_to_use(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ["--input-len", "150,600", "--chunk-sizes", "64,128,4096", "--num-iters", "1"]
    flags = ["--model", str(model), "--kv-tokens", "2048", *lengths, "--save-result", "r.json"]
    assert run("tune", *flags, *SMALL) == 0
    out, err = capsys.readouterr()
    saved = json.loads(Path("r.json").read_text())
    tried = [row["flags"] for row in saved["results"]]
    fixed = [flags for flags in tried if flags.startswith("--chunk-policy fixed")]
    assert fixed == [f"--chunk-policy fixed --chunked-prefill-size {size}" for size in (64, 128, 600)]
    factors = [flags.split()[-1] for flags in tried if flags.startswith("--chunk-policy sglang")]
    assert sorted(set(factors)) == ["0.6", "0.65", "0.7", "0.75", "0.8", "0.85"]
    assert tried[-1] == "--chunk-policy planned"
    for row in saved["results"]:
        assert set(row["ttft_s"]) == {"150", "600"}
        assert all(0 < ttft["lowest"] <= ttft["median"] <= ttft["highest"] for ttft in row["ttft_s"].values())
    lines = [" ".join(line.split()).removeprefix("* ") for line in out.splitlines()]
    for flags in tried:
        _, policy, *numbers = flags.split()
        assert any(line.startswith(" ".join([policy, *numbers[1:2]])) for line in lines), flags
    assert out.splitlines()[-4:] == saved["verdict"]
    assert saved["verdict"][-1].removeprefix("Best over these lengths: ") in tried
    for step in ("fixed sizes: 6 of 6 runs", "initial sizes", "smoothing: 10 of 10 runs", "finalists: 6 of 6 runs"):
        assert step in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--chunk-policy", "fixed"], "--chunk-policy is what tune chooses"),
        (["--chunked-prefill-size", "64"], "--chunked-prefill-size is what tune chooses"),
        (["--enable-dynamic-chunking"], "--enable-dynamic-chunking is what tune chooses"),
        (["--input-len", "x"], "--input-len x: expected numbers"),
        (["--chunk-sizes", "0"], "--chunk-sizes 0: each must be at least 1"),
        (["--input-len", "1024"], "--input-len 1024: the context has 1024 tokens"),
        (["--save-result", "none/r.json"], "--save-result none/r.json: no such folder"),
    ],
)
def test_what_cannot_work_is_one_line(
    model: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert run("tune", "--model", str(model), "--kv-tokens", "2048", *SMALL, *flags) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("loading:")]
    assert (out, len(lines)) == ("", 1)
    assert words in lines[0]


def test_every_flag_is_in_the_manual() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    manual = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    own = {"input_len", "chunk_sizes", "num_iters", "num_iters_warmup", "save_result"}
    for name, flags in (("tune", own), ("profile", set())):
        assert {parameter.name for parameter in commands[name].params} - {"help"} == set(engine_flags()) | flags
        for flag in flags:
            assert f"`{flag_of(flag)}" in manual, flag
