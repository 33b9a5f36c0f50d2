"""``actorpp bench`` over the shipped engine with a tiny model, its stages in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from actorpp.analysis.chrome import read_trace
from actorpp.analysis.steps import traced_steps
from actorpp.cli.app import app
from actorpp.cli.figures import chunk_list
from actorpp.cli.main import main
from actorpp.cli.options import engine_flags
from actorpp.cli.workload import Workload
from actorpp.config import SERVER_FLAGS, EngineConfig, flag_of
from tests.exactness.tiny import save_llama

Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("bench"), layers=4, max_position_embeddings=256)


@pytest.fixture
def bench(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    for name in os.environ:
        if name.startswith("ACTORPP_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    small = ["--model", str(model), "--transport", "inproc", "--stages", "2", "--threads-per-stage", "1"]
    small += ["--dtype", "float32", "--kv-tokens", "2048", "--chunked-prefill-size", "32"]

    def run(*flags: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["bench", *flags, *small])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return int(str(ended.value.code)), out, err

    return run


def results(file: str = "r.json") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(Path(file).read_text())["results"]
    return found


def test_latency_prints_and_saves_what_it_measured(bench: Bench) -> None:
    shape = ["--input-len", "100", "--output-len", "5", "--batch-size", "2", "--num-iters", "3"]
    code, out, err = bench("latency", *shape, "--num-iters-warmup", "2", "--save-result", "r.json", "--trace", "t.json")
    assert code == 0
    (result,) = results()
    assert result["workload"] == {"input_len": 100, "output_len": 5, "num_prompts": 2, "concurrency": 2}
    assert len(result["iterations"]) == 3
    summary, requests = result["summary"], result["summary"]["requests"]
    assert sum(summary["chunks"]) == 100
    for iteration in result["iterations"]:
        assert len(iteration["requests"]) == 2
        assert all(0 < r["ttft_s"] <= r["e2e_s"] for r in iteration["requests"])
        assert len(iteration["itls"]) == 2 * 4
        assert sum(iteration["itls"]) == pytest.approx(sum(4 * r["tpot_s"] for r in iteration["requests"]))
        assert 0 < iteration["pipeline"]["bound_s"] <= iteration["pipeline"]["makespan_s"] <= iteration["duration_s"]
    durations = sorted(iteration["duration_s"] for iteration in result["iterations"])
    assert result["duration"] == durations[1]
    assert requests["output_throughput"]["highest"] == pytest.approx(2 * 5 / durations[0])
    assert requests["total_token_throughput"]["lowest"] == pytest.approx(2 * 105 / durations[2])
    lines = {line.partition(":")[0]: line for line in out.splitlines()}
    ttft = requests["p99_ttft_ms"]
    assert lines["P99 TTFT (ms)"].split()[-3:] == [f"{ttft[key]:.2f}" for key in ("median", "lowest", "highest")]
    assert lines["Makespan / bound"].split()[-3] == f"{summary['pipeline']['over_bound']['median']:.3f}"
    assert lines["Prompts x (input + output tokens)"].endswith("2 x (100 + 5)")
    assert "warming up: 2 of 2 iterations" in err
    assert "measuring: 3 of 3 iterations" in err
    trace = read_trace(Path("t.json"))
    steps = traced_steps(trace.stages)
    assert len(steps) == result["iterations"][-1]["pipeline"]["num_steps"]
    assert sum(step.num_tokens for step in steps) >= 2 * 104
    assert [request.prompt_tokens for request in trace.requests] == [100, 100]
    assert all(request.output_tokens == 5 for request in trace.requests)
    assert trace.about["layers"] == [[0, 2], [2, 4]]
    assert (trace.about["chunk_policy"], trace.about["chunk_size"]) == ("fixed", 32)
    for request in trace.requests:
        assert sum(chunk.tokens for chunk in request.chunks) == 100
        assert all(chunk.measured_s is not None and len(chunk.measured_s) == 2 for chunk in request.chunks)


def test_throughput_keeps_to_the_concurrency(bench: Bench) -> None:
    shape = ["--input-len", "40", "--output-len", "1", "--num-prompts", "5", "--num-iters", "1"]
    assert bench("throughput", *shape, "--num-iters-warmup", "0", "--output-json", "r.json")[0] == 0
    (result,) = results()
    assert result["workload"]["concurrency"] == 5
    assert "mean_ttft_ms" in result
    assert "mean_tpot_ms" not in result
    for flags, at_once in ((["--max-concurrency", "2"], 2), (["--max-queued-requests", "3"], 3)):
        assert bench("throughput", *shape, "--save-result", "r.json", "--trace", "t.json", *flags)[0] == 0
        assert results()[0]["workload"]["concurrency"] == at_once
        requests = read_trace(Path("t.json")).requests
        assert len(requests) == 5
        for one in requests:  # who was there when it came
            assert sum(r.submitted <= one.submitted and (r.ended or 0) > one.submitted for r in requests) <= at_once


def test_times_are_finer_than_the_loops_milliseconds(bench: Bench) -> None:
    shape = ["--input-len", "20", "--output-len", "4", "--batch-size", "3", "--num-iters", "2"]
    assert bench("latency", *shape, "--save-result", "r.json")[0] == 0
    iterations = results()[0]["iterations"]
    requests = [request for one in iterations for request in one["requests"]]
    for times in (
        [request["ttft_s"] for request in requests],
        [3 * request["tpot_s"] for request in requests],
        [request["e2e_s"] for request in requests],
        [gap for one in iterations for gap in one["itls"]],
        [one["duration_s"] for one in iterations],
    ):
        assert any(abs(1e3 * seconds - round(1e3 * seconds)) > 1e-3 for seconds in times)


def test_a_prompt_that_does_not_fit_is_refused_before_the_stages_load(bench: Bench) -> None:
    for command, lengths in (("latency", "250"), ("throughput", "250"), ("sweep", "20,250")):
        code, out, err = bench(command, "--input-len", lengths, "--output-len", "7")
        assert (code, out) == (2, "")
        assert err == ("actorpp: --input-len 250 and --output-len 7: together more than the context of 256 tokens\n")


def test_prompts_are_drawn_by_seed() -> None:
    work = Workload(input_len=30, output_len=1, num_prompts=2, concurrency=1)
    prompts = work.prompts(320, "0/1")
    assert [len(prompt) for prompt in prompts] == [30, 30]
    assert all(0 <= token < 320 for prompt in prompts for token in prompt)
    assert prompts[0] != prompts[1]
    assert work.prompts(320, "0/1") == prompts != work.prompts(320, "0/2")


def test_sweep_has_a_line_for_each_cell(bench: Bench) -> None:
    grid = ["--input-len", "20,70", "--output-len", "1,3", "--max-concurrency", "1,2", "--num-iters", "1"]
    code, out, err = bench("sweep", *grid, "--num-prompts", "2", "--save-result", "r.json")
    assert code == 0
    _, head, *lines = out.splitlines()
    assert head.split()[:4] == ["ISL", "OSL", "conc.", "prompts"]
    cells = [[isl, osl, at_once] for isl in ("20", "70") for osl in ("1", "3") for at_once in ("1", "2")]
    assert [line.split()[:4] for line in lines[:8]] == [[*cell, "2"] for cell in cells]
    chunks = {"20": "1", "70": "3"}
    assert lines[10].split()[:4] == ["ISL", "OSL", "conc.", "chunks"]
    assert [line.split()[:4] for line in lines[11:]] == [[*cell, chunks[cell[0]]] for cell in cells]
    for number, (isl, osl, at_once) in enumerate(cells, 1):
        said = f"cell {number}/8: ISL {isl}, OSL {osl}, conc. {at_once}: "
        assert f"{said}warming up: 1 of 1 iterations\n{said}measuring: 0 of 1 iterations" in err
    assert [result["workload"]["input_len"] for result in results()] == [20] * 4 + [70] * 4
    code, out, _ = bench(
        "sweep", "--input-len", "20", "--output-len", "1", "--max-concurrency", "3", "--num-iters", "1"
    )
    assert out.splitlines()[2].split()[:4] == ["20", "1", "3", "3"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["latency", "--input-len", "0"], ["--input-len", "equal to 1"]),
        (["latency", "--num-iters", "x"], ["--num-iters", "integer"]),
        (["sweep", "--input-len", "20,x"], ["--input-len", "20,x"]),
        (["sweep", "--max-concurrency", "0"], ["--max-concurrency", "at least 1"]),
        (["latency", "--save-result", "none/r.json"], ["--save-result", "none"]),
        (["latency", "--trace", "none/t.json"], ["--trace", "none"]),
        (["latency", "--lookahead", "0"], ["--lookahead", "0"]),
        (["latency", "--input-len", "250", "--output-len", "7"], ["256", "250", "7"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_bad_flags_end_in_one_line_and_code_2(bench: Bench, flags: list[str], words: list[str]) -> None:
    code, out, err = bench(*flags)
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if not line.startswith(("loading:", "warming up:"))]
    assert len(lines) == 1
    for word in words:
        assert word in lines[0]


def test_every_flag_of_the_engine_is_one_of_each_command() -> None:
    commands = typer.main.get_command(app).commands["bench"].commands  # type: ignore[attr-defined]
    fields = set(EngineConfig.model_fields) - set(SERVER_FLAGS) | {"config"}
    assert set(engine_flags()) == fields
    own = {"input_len", "output_len", "num_iters_warmup", "num_iters", "save_result"}
    more = {
        "latency": {"batch_size", "trace"},
        "throughput": {"num_prompts", "max_concurrency", "trace"},
        "sweep": {"num_prompts", "max_concurrency"},
    }
    manual = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    for name, command in commands.items():
        assert {parameter.name for parameter in command.params} - {"help"} == fields | own | more[name]
        for field in own | more[name]:
            assert f"`{flag_of(field)}" in manual, field


def test_equal_chunks_are_counted() -> None:
    assert chunk_list([512, 512, 320]) == "512 x 2, 320"
    assert chunk_list([7]) == "7"
