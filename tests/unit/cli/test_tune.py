"""``actorpp tune`` over the shipped engine with a tiny model, its stages in this process."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import typer

from actorpp.analysis.spread import spread
from actorpp.analysis.tuning import Setting
from actorpp.cli.app import app
from actorpp.cli.main import main
from actorpp.cli.options import engine_flags
from actorpp.cli.tune import Trials
from actorpp.config import LARGEST_CHUNK, flag_of
from actorpp.coordinator.chunking.policy import ChunkRequest
from actorpp.coordinator.chunking.profile import Profile
from actorpp.coordinator.chunking.sglang import Quadratic, SglangChunks
from actorpp.errors import ProfilingError
from actorpp.progress import ProgressDisplay
from tests.exactness.tiny import save_llama
from tests.unit.coordinator.chunking.support import model as costs
from tests.unit.coordinator.chunking.support import pieces, sample

CONTEXT = 8192
COSTS = costs(2)
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
    return save_llama(tmp_path_factory.mktemp("tune"), layers=4, max_position_embeddings=CONTEXT)


def run(*flags: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(flags))
    return int(str(ended.value.code))


async def taken(engine: Any, *, on_progress: Callable[[int, int], None]) -> Profile:
    """As ``measure_profile``, of a pipeline whose stages are as fast as ``COSTS`` says."""
    on_progress(1, 1)
    samples = [sample(COSTS, 0, 256 * n, samples=True) for n in range(1, 17)]
    samples += [sample(COSTS, history, tokens) for history in (1024, 4096) for tokens in (64, 512, 2048)]
    return Profile(engine.planning.key, tuple(samples))


def dynamic(size: int, factor: float) -> str:
    return f"--chunk-policy sglang --chunked-prefill-size {size} --dynamic-chunking-smooth-factor {factor}"


def distinct(tried: list[str], *lengths: int) -> list[str]:
    """The first of those that cut all prompts alike."""
    cuts = [[chunks_of(flags, length) for length in lengths] for flags in tried]
    return [flags for index, flags in enumerate(tried) if cuts[index] not in cuts[:index]]


def chunks_of(flags: str, length: int) -> list[int]:
    """What the flags mean for a prompt that is alone, computed apart from the engine."""
    _, policy, _, size, *factor = flags.split()
    if policy == "fixed":
        return pieces(length, int(size))
    quadratic = Quadratic(a=COSTS.stages[0].a, b=COSTS.stages[0].b)  # only their ratio counts
    cut = SglangChunks(int(size), quadratic, float(factor[1]), 16, CONTEXT, CONTEXT)
    chunks: list[int] = []
    while (history := sum(chunks)) < length:
        chunks.append(cut.next_chunk(ChunkRequest(1, length), history, length - history, CONTEXT))
    return chunks


def test_every_row_was_computed_with_the_sizes_that_it_names(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("actorpp.engine.measure_profile", taken)
    monkeypatch.setenv("COLUMNS", "200")  # a line for each row, however long the times are
    work = ["--input-len", "900,6000", "--chunk-sizes", "1024,4096,8192", "--num-iters", "1", "--num-iters-warmup", "0"]
    assert run("tune", "--model", str(model), "--kv-tokens", "8192", *work, "--save-result", "r.json", *SMALL) == 0
    out, err = capsys.readouterr()
    saved = json.loads(Path("r.json").read_text())
    rows = saved["results"]
    flags = {step: [row["flags"] for row in rows if row["step"] == step] for step in {row["step"] for row in rows}}

    # What is tried, step after step: no limit of the engine's own cuts a size, and 8192 is all of the longest prompt.
    assert flags["fixed sizes"] == [f"--chunk-policy fixed --chunked-prefill-size {n}" for n in (1024, 4096, 6000)]
    fixed = int(flags["finalists"][1].split()[-1])
    sizes = sorted({min(round(factor * fixed / 64) * 64, 6000) for factor in (2, 2.5, 3)})
    assert flags["initial sizes"] == distinct([dynamic(size, 0.75) for size in sizes], 900, 6000)
    size = int(flags["smoothing"][0].split()[3])
    assert f" {size} " in " ".join(flags["initial sizes"])
    factors = (0.75, 0.6, 0.65, 0.7, 0.8, 0.85)
    assert flags["smoothing"] == distinct([dynamic(size, factor) for factor in factors], 900, 6000)
    planned, of_fixed, of_dynamic = flags["finalists"]
    assert planned == "--chunk-policy planned"
    assert of_fixed in flags["fixed sizes"]
    assert of_dynamic in flags["smoothing"]

    # What the prompts got.
    for row in rows:
        assert set(row["ttft_s"]) == set(row["chunks"]) == {"900", "6000"}
        assert all(0 < ttft["lowest"] <= ttft["median"] <= ttft["highest"] for ttft in row["ttft_s"].values())
        for length in (900, 6000):
            chunks = row["chunks"][str(length)]
            if row["flags"] == planned:
                assert sum(chunks) == length
                assert max(chunks) <= LARGEST_CHUNK["cpu"]  # as without flags
            else:
                assert chunks == chunks_of(row["flags"], length), row["flags"]

    # What is said and kept.
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for step, tried in flags.items():
        start = lines.index(f"{step}:")
        for line, row in zip(lines[start + 1 :], tried, strict=False):
            _, policy, *numbers = row.split()
            assert line.startswith(" ".join([policy, *numbers[1:2]])), row
        assert f"{step}: {2 * len(tried)} of {2 * len(tried)} runs" in err
    assert out.splitlines()[-len(saved["verdict"]) :] == saved["verdict"]
    assert any(f"Use {flags}" in saved["verdict"][-1] for flags in flags["finalists"])
    assert "profiling: 1 of 1 tokens" in err
    (file,) = (Path("cache") / "profiles").rglob("*.json")
    assert msgspec.json.decode(file.read_bytes(), type=Profile).samples


def test_what_the_given_limits_or_the_profile_forbid_is_not_tried_and_that_is_said(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail(*args: Any, **options: Any) -> None:
        raise ProfilingError("a prompt failed")

    monkeypatch.setattr("actorpp.engine.measure_profile", fail)
    work = ["--input-len", "900", "--chunk-sizes", "64,512", "--num-iters", "1", "--max-num-batched-tokens", "256"]
    assert run("tune", "--model", str(model), "--kv-tokens", "2048", *work, "--save-result", "r.json", *SMALL) == 0
    saved = json.loads(Path("r.json").read_text())
    sizes = [row["flags"].split()[-1] for row in saved["results"] if row["step"] == "fixed sizes"]
    assert sizes == ["64", "256"]
    assert all(
        row["chunks"]["900"] == chunks_of(row["flags"], 900) for row in saved["results"] if "fixed" in row["flags"]
    )
    assert not any("sglang" in row["flags"] for row in saved["results"])
    assert "Sizes above 256 were not tried" in saved["verdict"][0]
    assert "Dynamic chunking was not tried" in saved["verdict"][1]
    assert "Dynamic" not in " ".join(saved["verdict"][2:])
    assert capsys.readouterr().out.splitlines()[-len(saved["verdict"]) :] == saved["verdict"]


def test_of_settings_that_cut_all_prompts_alike_the_first_is_tried() -> None:
    def plan(policy: int, length: int) -> Any:
        return SimpleNamespace(chunks=tuple(pieces(length, policy)))

    planning = SimpleNamespace(policy=lambda name, *, chunk_size, smooth_factor: chunk_size, plan=plan)
    trials = Trials(SimpleNamespace(planning=planning), [100, 300], 1, ProgressDisplay())  # type: ignore[arg-type]
    usual, other = Setting("sglang", 200, 0.75), Setting("sglang", 200, 0.6)
    assert trials.distinct([usual, other, Setting("sglang", 299, 0.75), Setting("sglang", 300, 0.75)]) == [
        usual, Setting("sglang", 299, 0.75), Setting("sglang", 300, 0.75)
    ]  # fmt: skip


def test_settings_are_measured_in_turn_and_the_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Setting("fixed", 64), Setting("fixed", 128)
    order: list[tuple[Setting, int]] = []

    async def ttft(trials: Trials, setting: Setting, length: int) -> float:
        order.append((setting, length))
        return float(len(order))

    monkeypatch.setattr(Trials, "ttft", ttft)
    trials = Trials(None, [10, 20], 3, ProgressDisplay())  # type: ignore[arg-type]
    measured = asyncio.run(trials.run([first, second], "finalists"))
    one = [(first, 10), (first, 20), (second, 10), (second, 20)]
    back = [(second, 10), (second, 20), (first, 10), (first, 20)]
    assert order == [*one, *back, *one]
    assert measured[first][10] == spread([1.0, 7.0, 9.0])
    assert measured[second][20] == spread([4.0, 6.0, 12.0])
    assert trials.steps == {"finalists": measured}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--chunk-policy", "fixed"], "--chunk-policy is what tune chooses"),
        (["--chunked-prefill-size", "64"], "--chunked-prefill-size is what tune chooses"),
        (["--enable-dynamic-chunking"], "--enable-dynamic-chunking is what tune chooses"),
        (["--input-len", "x"], "--input-len x: expected numbers"),
        (["--chunk-sizes", "0"], "--chunk-sizes 0: each must be at least 1"),
        (["--input-len", str(CONTEXT)], f"--input-len {CONTEXT}: the context has {CONTEXT} tokens"),
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
    assert {parameter.name for parameter in commands["tune"].params} - {"help"} == set(engine_flags()) | own
    for flag in own:
        assert f"`{flag_of(flag)}" in manual, flag
