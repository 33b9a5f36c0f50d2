"""The comparison beside the peers: contestants that stand still, the table, and when a call is void."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.bench import peers
from tests.bench.contestant import Contestant, ContestantFailed, first_output
from tests.bench.peers import (
    DECODE,
    LONG,
    OURS,
    OURS_ONE,
    QUEUE,
    START,
    TRANSFORMERS,
    VLLM_ONE,
    VLLM_PP,
    CoreControls,
    Job,
    Row,
    Runs,
)
from tests.bench.steady import Steady

ECHO = """
import json, sys
print("noise", flush=True)
print("ANSWER", json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    if json.loads(line).get("fail"):
        sys.exit("no room")
    print("ANSWER", json.dumps({"echo": json.loads(line)}), flush=True)
"""


def test_a_contestant_answers_and_stands_still_between_its_turns() -> None:
    with Contestant("echo", [sys.executable, "-c", ECHO]) as child:
        child.ready()
        process = psutil.Process(child._child.pid)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # returns when it stands still, and only then
        assert child.run({"a": 1}) == {"echo": {"a": 1}}
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        with pytest.raises(ContestantFailed, match=r"(?s)echo ended with 1:.*no room"):
            child.run({"fail": True})
    assert not process.is_running()
    with Contestant("echo", [sys.executable, "-c", ECHO]) as child:
        child.ready()
        child._child.kill()
        child._child.wait()
        with pytest.raises(ContestantFailed, match="echo ended with -9"):
            child.run({"a": 1})


def test_first_output_waits_for_the_marked_line() -> None:
    script = "import sys; print('log', flush=True); sys.version.split(); print('ANSWER {}', flush=True)"
    assert first_output([sys.executable, "-c", script]) > 0
    assert first_output([sys.executable, "-c", "print('text')"]) > 0
    with pytest.raises(ContestantFailed, match="ended with 3"):
        first_output([sys.executable, "-c", "raise SystemExit(3)"])


def ours(**figures: float | None) -> dict[str, Any]:
    return {"ttft": 4.0, "efficiency": 0.95, "over_bound": 1.01, "driver_cpu": 0.03, "tokens_s": 500.0} | figures


class Still:
    """The control of a machine that is the same all the time."""

    def seconds(self) -> float:
        return 1.0


@pytest.fixture
def runs() -> Runs:
    answers = {
        (OURS, LONG): [ours(ttft=ttft, makespan=ttft, predicted=1.1 * ttft) for ttft in (4.0, 5.0, 6.0)],
        (OURS_ONE, LONG): [ours(ttft=8.0), ours(ttft=9.0), ours(ttft=9.6)],
        (TRANSFORMERS, LONG): [{"ttft": 10.0}] * 3,
        (VLLM_PP, LONG): [{"ttft": 5.0}] * 3,
        (f"{VLLM_ONE}, chunk 1024", LONG): [{"ttft": 8.0}] * 3,
        (f"{VLLM_ONE}, chunk 2048", LONG): [{"ttft": 6.25}] * 3,
        (OURS, QUEUE): [ours(bubble_after_fill=0.04)],
        (OURS, DECODE): [ours(tokens_s=500.0)],
        (VLLM_PP, DECODE): [{"tokens_s": 400.0}],
        (f"{VLLM_ONE}, chunk 1024", DECODE): [{"tokens_s": 625.0}],
        (f"{VLLM_ONE}, chunk 2048", DECODE): [{"tokens_s": 600.0}],
        (OURS, Job(1000)): [ours(ttft=1.0)],
        (OURS, Job(1000, fixed=256)): [ours(ttft=1.25)],
        (OURS, START): [{"seconds": 3.0}],
        (VLLM_PP, START): [{"seconds": 20.0}],
    }
    return Runs(answers, {1000: 256})


def test_the_table_is_worked_out_of_the_answers(runs: Runs) -> None:
    rows = peers.ttft(runs)
    assert [row.values for row in rows] == [
        pytest.approx([0.4, 0.5, 0.6]), pytest.approx([0.8, 1.0, 1.2]), pytest.approx([0.64, 0.8, 0.96])
    ]  # fmt: skip
    assert "chunk 2048" in rows[2].name  # its best chunk
    text = peers.lines(rows)
    assert text[1].split()[-6:] == ["MISSED", "5", "s", "/", "10", "s"]
    assert " met " in text[3]
    efficiency, bound = peers.efficiency(runs)
    assert efficiency.values == [0.95] * 3
    assert efficiency.note == "T(1)/(P T(P)) = 0.9"
    assert " met " in peers.lines([efficiency])[1]
    assert bound.values == [1.01] * 3
    assert peers.queue(runs)[0].values == [0.04]
    assert [row.values for row in peers.decode(runs)] == [[1.25], [0.8]]
    assert peers.start(runs)[0].values == [0.15]
    assert "MISSED" in peers.lines(peers.driver(runs))[1]
    assert [row.values for row in peers.planned(runs)] == [[0.8], [], []]
    assert peers.predicted(runs)[1].values == pytest.approx([0.1] * 3)
    assert "not measured" in peers.lines(peers.predicted(runs))[1]
    assert peers.lines([Row("x", [0.0123], 0.02, 0.01, percent=True)])[1].split()[1:4] == ["1.2%"] * 3


def test_figures_and_peers_can_be_chosen() -> None:
    options = peers.parse(["--only", "ttft", "--peers", "vllm", "--vllm-python", "py", "--vllm-chunks", "512"])
    started = peers.commands(options, "folder")
    assert list(started) == [OURS, OURS_ONE, f"{VLLM_ONE}, chunk 512"]
    assert started[f"{VLLM_ONE}, chunk 512"][-2:] == ["1", "512"]
    assert list(peers.commands(peers.parse([]), "folder")) == [OURS, OURS_ONE, TRANSFORMERS]
    with pytest.raises(SystemExit):
        peers.parse(["--warmup", "0"])


def test_what_is_missing_is_said_and_a_void_call_has_a_code_of_its_own(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(options: object, model: str, machine_speed: Still, measured: Runs) -> None:
        vars(measured).update(vars(runs))
        if failure is not None:
            raise failure

    monkeypatch.setattr(peers, "measure", measure)
    broken = ContestantFailed("vLLM, 2 stages ended with 1")
    for control, failure, code, word in (
        ([1.0, 1.01], None, 0, "steady"),
        ([1.0, 1.0, 2.0], None, 3, "VOID"),
        ([1.0, 1.01], broken, 1, "actorpp, 2 stages"),
    ):
        steady = Steady(Still(), 0.0)
        steady.control_s = control
        runs.steady = {"prompts": Steady(Still(), 0.0), "starts": steady}
        runs.steady["prompts"].control_s = [1.0]
        monkeypatch.setattr(peers, "control", lambda options: contextlib.nullcontext(Still()))
        save = tmp_path / "r.json"
        assert peers.main(["--model", "x", "--only", "ttft", "--save-result", str(save)]) == code
        out, err = capsys.readouterr()
        assert word in out + save.read_text()
        assert " met " in out
        assert ("ended with 1" in err) == (failure is not None)
        assert "missing: vLLM, 2 stages" in err
        assert "missing: vLLM, one process" in err
        assert json.loads(save.read_text())["control_s"] == {"prompts": [1.0], "starts": control}


def test_starts_are_measured_when_the_others_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, starts = [], []

    @contextlib.contextmanager
    def contestant(name: str, command: list[str]) -> Iterator[Any]:
        alive.append(name)
        yield SimpleNamespace(run=lambda job: {"ttft": 1.0})
        alive.remove(name)

    def first_output(command: list[str]) -> float:
        starts.append(list(alive))
        return 2.0

    monkeypatch.setattr(peers, "_contestant", contestant)
    monkeypatch.setattr(peers, "first_output", first_output)
    options, runs = peers.parse(["--only", "start", "--rounds", "2"]), Runs()
    peers.measure(options, "folder", Still(), runs)
    assert runs.answers == {(OURS, START): [{"seconds": 2.0}] * 2}
    options, runs = peers.parse(["--only", "ttft", "start", "--rounds", "2"]), Runs()
    peers.measure(options, "folder", Still(), runs)
    assert runs.values(TRANSFORMERS, LONG, "ttft") == [1.0, 1.0]
    assert runs.values(OURS, START, "seconds") == [2.0, 2.0]
    assert {name: len(steady.control_s) for name, steady in runs.steady.items()} == {"prompts": 4, "starts": 2}
    assert starts == [[]] * 4


def test_the_control_runs_beside_what_is_measured() -> None:
    core = min(os.sched_getaffinity(0))
    with peers.control(peers.parse(["--cores", str(core), str(core)])) as machine_speed:
        steady = Steady(machine_speed, 0.0)
        assert steady.run(lambda: "measured") == "measured"
        assert steady.run(lambda: "again") == "again"
    first, second = steady.control_s
    assert 0 < min(first, second) <= max(first, second) < 1.0


def test_the_slower_core_says_how_fast_the_machine_is() -> None:
    class Child:
        def __init__(self, seconds: float) -> None:
            self._seconds = seconds

        def ask(self, job: dict[str, Any]) -> dict[str, Any]:
            return {"seconds": self._seconds}

    cores: Any = [Child(0.14), Child(0.19)]
    assert CoreControls(cores).seconds() == 0.19


def test_the_best_fixed_size_is_the_one_with_the_best_of_several_runs() -> None:
    best, calls = {1000: 512, 4000: 256, 8000: 2048}, []

    def run(message: dict[str, Any]) -> dict[str, Any]:
        calls.append(message)
        isl, size = message["isl"], message["fixed"]
        lucky = message["seed"] == "choose/1"
        return {"ttft": 1.0 if lucky and size == best[isl] else 2.0}

    child: Any = SimpleNamespace(run=run)
    assert peers._best_fixed_sizes(child, Steady(Still(), 0.0)) == best
    assert len(calls) == peers.CHOICES * (2 + 4 + 4)


def test_what_was_measured_in_a_slower_time_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Faster:
        """A machine that is faster from the fifth measurement on: one of the warm-up, four that count."""

        def __init__(self) -> None:
            self.asked = 0

        def seconds(self) -> float:
            self.asked += 1
            return 1.0 if self.asked <= 4 else 0.9

    values = iter(range(100))

    @contextlib.contextmanager
    def contestant(name: str, command: list[str]) -> Iterator[Any]:
        yield SimpleNamespace(run=lambda job: {"ttft": next(values)})

    monkeypatch.setattr(peers, "_contestant", contestant)
    options, runs = peers.parse(["--only", "driver", "--rounds", "4", "--patience", "100"]), Runs()
    peers.measure(options, "folder", Faster(), runs)
    assert runs.values(OURS, LONG, "ttft") == [5, 2, 3, 4]
    assert runs.steady["prompts"].control_s == [0.9] * 4


def test_a_slow_round_is_left_out_when_enough_others_remain() -> None:
    def measured(*slow: int) -> tuple[Steady, list[list[dict[str, Any]]]]:
        """Of the measurements, two in each of six rounds, these are slow."""

        class Slow:
            def __init__(self) -> None:
                self.asked = 0

            def seconds(self) -> float:
                self.asked += 1
                return 1.1 if self.asked // 2 - 1 in slow else 1.0

        steady, answers = Steady(Slow(), 0.0), peers.Answers()
        measurements = dict.fromkeys([(OURS, START), (VLLM_PP, START)], lambda seed: {"round": seed})
        peers.in_rounds(measurements, 6, steady, answers)
        return steady, list(answers.values())

    steady, answers = measured(5)
    assert answers == [[{"round": str(index)} for index in (0, 1, 3, 4, 5)]] * 2
    assert steady.control_s == [1.0] * 10
    assert steady.left_out == 2
    steady, answers = measured(5, 6)
    assert [len(several) for several in answers] == [6, 6]
    assert "VOID" in str(steady)
