"""``actorpp run`` with stage processes: the main job, and its errors."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support.cli import ROOT, Command, running

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"


def result_of(command: Command) -> dict[str, object]:
    code = command.finish()
    assert code == 0, command.stderr
    answer = json.loads(command.stdout)
    assert isinstance(answer, dict)
    return answer


def test_the_main_job_on_the_default_model(tmp_path: Path, environment: dict[str, str], default_model: Path) -> None:
    """Four stages, 8000 real tokens: the answer's form, and chunks of the one prompt on several stages at once."""
    ids = json.loads((Path(__file__).parents[1] / "data" / "prompt_3000.json").read_text())["ids"]
    tokens, trace = tmp_path / "tokens.json", tmp_path / "trace.json"
    tokens.write_text(json.dumps((ids * 3)[:8000]))
    flags = ["--stages", "4", "--prompt-tokens-file", str(tokens), "--max-tokens", "8", "--json", "--ignore-eos"]
    with running("run", *flags, "--trace", str(trace), environment=environment) as command:
        answer = result_of(command)
    assert set(answer) == {"text", "token_ids", "prompt_tokens", "finish_reason", "stop_reason", "metrics"}
    assert answer["prompt_tokens"] == 8000
    assert answer["finish_reason"] == "length"
    assert isinstance(answer["token_ids"], list)
    assert len(answer["token_ids"]) == 8
    assert answer["text"]
    metrics = answer["metrics"]
    assert isinstance(metrics, dict)
    chunks = metrics["chunks"]
    assert sum(chunks) == 8000
    assert len(chunks) >= 8  # how many more depends on what is measured meanwhile
    assert all(chunk % 64 == 0 for chunk in chunks[:-1])
    assert len(metrics["stage_busy"]) == 4
    assert all(0 < share <= 1 for share in metrics["stage_busy"])
    assert 0 < metrics["ttft_s"] < metrics["e2e_s"]
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"compute", "send", "receive", "wait", "sample"} == {e["cat"] for e in events if e["ph"] == "X"}
    assert most_chunks_at_once(events) >= 3
    assert overlapping_on_a_track(events) == []


def most_chunks_at_once(events: list[dict[str, object]]) -> int:
    """The largest number of stages that compute different steps at one moment."""
    computes = [e for e in events if e["ph"] == "X" and e["cat"] == "compute"]
    most = 0
    for moment in computes:
        at = float(str(moment["ts"])) + float(str(moment["dur"])) / 2
        running_now = {
            (e["pid"], e["args"]["seq"])  # type: ignore[index]
            for e in computes
            if float(str(e["ts"])) <= at < float(str(e["ts"])) + float(str(e["dur"]))
        }
        assert len({stage for stage, _ in running_now}) == len(running_now), "a stage computes two steps at once"
        most = max(most, len({seq for _, seq in running_now}))
    return most


def overlapping_on_a_track(events: list[dict[str, object]]) -> list[object]:
    tracks: dict[object, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            span = float(str(event["ts"])), float(str(event["ts"])) + float(str(event["dur"]))
            tracks.setdefault((event["pid"], event["tid"]), []).append(span)
    bad = []
    for track, spans in tracks.items():
        spans.sort()
        bad += [track for (_, end), (start, _) in pairwise(spans) if start < end - 0.5]
    return bad


def test_the_readmes_long_text_fits_the_default_models_context(tmp_path: Path, default_model: Path) -> None:
    subprocess.run([sys.executable, str(EXAMPLES / "long_text.py"), "LONG.txt"], cwd=tmp_path, check=True)
    text = (tmp_path / "LONG.txt").read_text(encoding="utf-8")
    assert 7000 < len(Tokenizer.from_file(str(default_model / "tokenizer.json")).encode(text)) <= 8192 - 64


def test_any_number_of_stages_gives_the_same_tokens(
    environment: dict[str, str], small_model: Path, some_tokens: Path
) -> None:
    flags = ["--model", str(small_model), "--load-format", "dummy", "--prompt-tokens-file", str(some_tokens)]
    flags += ["--max-tokens", "12", "--json", "--ignore-eos", "--threads-per-stage", "1"]
    flags += ["--temperature", "0.9", "--seed", "5", "--presence-penalty", "0.5", "--logit-bias", "7=1.5"]
    flags += ["--stop-token-ids", "511", "--min-tokens", "12", "--logprobs", "2", "--prompt-logprobs", "1"]
    answers = []
    for pipeline in (
        ["--stages", "1"],
        ["--stages", "3", "--async-depth", "0"],
        ["--stages", "3", "--layer-partition", "1,5,2", "--async-depth", "3"],
        ["--stages", "2", "--transport", "inproc"],
    ):
        with running("run", *flags, *pipeline, environment=environment) as command:
            answer = result_of(command)
            answers.append(answer["token_ids"])
            for rows, tokens, top in (("logprobs", 12, 2), ("prompt_logprobs", answer["prompt_tokens"], 1)):
                told = answer[rows]
                assert isinstance(told, list)
                assert len(told) == tokens
                assert all(len(row["top"]) == top for row in told if row is not None)
    assert all(answer == answers[0] for answer in answers), answers


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--model", "/no/such/model"], "no model"),
        (["--stages", "9"], "9 stages"),
        (["--layer-partition", "3,3"], "8"),
        (["--context-length", "7000"], "8000 tokens"),
        (["--context-length", "20000"], "16384"),
        (["--kv-tokens", "1000"], "holds"),
    ],
)
def test_bad_input_is_one_clear_line(
    flags: list[str], complaint: str, environment: dict[str, str], small_model: Path, long_tokens: Path
) -> None:
    common = ["--model", str(small_model), "--load-format", "dummy", "--prompt-tokens-file", str(long_tokens)]
    with running("run", *common, *flags, environment=environment) as command:
        code = command.finish()
    assert code in (1, 2)
    assert command.stdout == ""
    last = [line for line in command.stderr.splitlines() if not line.startswith(("loading", "prefill"))]
    assert len(last) == 1, command.stderr
    assert last[0].startswith("actorpp: ")
    assert complaint in last[0]


def test_a_taken_port_is_said_before_a_model_is_loaded(environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        with running("run", "--port", port, environment=environment) as command:
            code = command.finish()
    assert code == 2
    assert f"port {port}" in command.stderr
    assert "loading" not in command.stderr
