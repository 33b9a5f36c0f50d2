"""actorpp beside transformers and vLLM on the same cores, in turn, round by round; only the ratios mean something.

    python -m tests.bench.peers --vllm-python /path/to/venv/bin/python

Every contestant is a process of its own that stands still (SIGSTOP) while another one works. Beside it runs the
control, on every core: small matrix products, 2% of the time. A round measures each contestant once. A measurement
counts when the control took no more than 5% longer meanwhile than is usual; another is made again as long as
``--patience`` lasts. A round in which it took more than 5% longer than the median is left out if five others remain;
else the machine was not the same all the time, and the call is void (exit code 3). ``--only`` and ``--peers`` choose
what is measured, so that a call takes minutes; starts are measured last, in rounds of their own, when the other
contestants have left their memory. vLLM is installed in an environment of its own: docs/performance.md says how.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from actorpp.cli.machine import machine
from actorpp.stages.checkpoint import resolve
from tests.bench.contestant import Contestant, ContestantFailed, first_output
from tests.bench.steady import MAX_DRIFT, Control, Steady

HERE = Path(__file__).parent / "contestants"
PROMPT = "The capital of France is"
FIXED_SIZES = (256, 512, 1024, 2048)
PLANNED_LENGTHS = (1000, 4000, 8000)
MIN_ROUNDS = 5  # that medians are of
CHOICES = 3  # runs of each fixed size to choose one by

OURS, OURS_ONE = "actorpp, 2 stages", "actorpp, 1 stage of 1 thread"
TRANSFORMERS, VLLM_PP, VLLM_ONE = "transformers", "vLLM, 2 stages", "vLLM, one process"
PEERS = {"transformers": TRANSFORMERS, "vllm-pp": VLLM_PP, "vllm": VLLM_ONE}


@dataclass(frozen=True)
class Job:
    """``count`` prompts of ``isl`` random tokens at once, ``osl`` new tokens each; ``fixed`` is a chunk size."""

    isl: int
    osl: int = 1
    count: int = 1
    fixed: int | None = None

    def message(self, seed: str) -> dict[str, Any]:
        known = {"isl": self.isl, "osl": self.osl, "count": self.count, "seed": seed}
        return known if self.fixed is None else known | {"fixed": self.fixed}


LONG, DECODE, QUEUE = Job(8000), Job(64, osl=64, count=16), Job(4000, count=8)
START = Job(5)  # PROMPT, from the command on

Pair = tuple[str, Job]
Answers = dict[Pair, list[dict[str, Any]]]


@dataclass
class Runs:
    """What was measured: answers by contestant and job, round by round; and how steady the machine was meanwhile."""

    answers: Answers = field(default_factory=dict)
    best_fixed: dict[int, int] = field(default_factory=dict)
    steady: dict[str, Steady] = field(default_factory=dict)

    def values(self, who: str, job: Job, key: str) -> list[float]:
        """One for each round, or none."""
        return [answer[key] for answer in self.answers.get((who, job), []) if answer.get(key) is not None]

    def several(self, who: str) -> list[str]:
        """Contestants whose name begins so: one vLLM for each chunk size."""
        return sorted({name for name, _ in self.answers if name.startswith(who)})


@dataclass(frozen=True)
class Row:
    """A line of the table: values of each round, and the target that their median shall reach."""

    name: str
    values: list[float]
    target: float
    beyond: float
    at_most: bool = True
    percent: bool = False
    note: str = ""


# --- what is measured for each figure, and how it is worked out -------------------------------------------------------


def _ratios(above: list[float], below: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=False)]


def _best(runs: Runs, who: str, job: Job, key: str, pick: Callable[..., str]) -> tuple[str, list[float]]:
    """The contestant of that name with the best median, and its values."""
    names = [name for name in runs.several(who) if runs.values(name, job, key)]
    if not names:
        return who, []
    best = pick(names, key=lambda name: statistics.median(runs.values(name, job, key)))
    return best, runs.values(best, job, key)


def ttft(runs: Runs) -> list[Row]:
    ours = runs.values(OURS, LONG, "ttft")
    rows = []
    for who, target, beyond in ((TRANSFORMERS, 0.47, 0.42), (VLLM_PP, 0.82, 0.75), (VLLM_ONE, 1.0, 0.92)):
        name, theirs = _best(runs, who, LONG, "ttft", min)
        note = f"{_median(ours)} s / {_median(theirs)} s"
        rows.append(Row(f"TTFT at ISL 8000 / {name}", _ratios(ours, theirs), target, beyond, note=note))
    return rows


def efficiency(runs: Runs) -> list[Row]:
    alone, ours = runs.values(OURS_ONE, LONG, "ttft"), runs.values(OURS, LONG, "ttft")
    note = f"T(1)/(P T(P)) = {_median([one / (2 * two) for one, two in zip(alone, ours, strict=False)])}"
    busy = runs.values(OURS, LONG, "efficiency")
    over = runs.values(OURS, LONG, "over_bound")
    return [
        Row("efficiency at ISL 8000", busy, 0.92, 0.96, at_most=False, note=note),
        Row("makespan / flow-shop bound", over, 1.05, 1.02),
    ]


def queue(runs: Runs) -> list[Row]:
    after_fill = runs.values(OURS, QUEUE, "bubble_after_fill")
    return [Row("8 prompts of 4000: bubbles after the fill", after_fill, 0.05, 0.02, percent=True)]


def decode(runs: Runs) -> list[Row]:
    ours = runs.values(OURS, DECODE, "tokens_s")
    rows = []
    for who, target, beyond in ((VLLM_PP, 1.0, 1.3), (VLLM_ONE, 0.75, 1.0)):
        name, theirs = _best(runs, who, DECODE, "tokens_s", max)
        note = f"{_median(ours)} / {_median(theirs)} tok/s"
        row = Row(f"decode, 16 of 64 + 64 / {name}", _ratios(ours, theirs), target, beyond, at_most=False, note=note)
        rows.append(row)
    return rows


def start(runs: Runs) -> list[Row]:
    ours, theirs = (runs.values(who, START, "seconds") for who in (OURS, VLLM_PP))
    note = f"{_median(ours)} s / {_median(theirs)} s"
    return [Row("start to first token / vLLM", _ratios(ours, theirs), 0.3, 0.15, note=note)]


def driver(runs: Runs) -> list[Row]:
    return [Row("driver CPU / wall, ISL 8000", runs.values(OURS, LONG, "driver_cpu"), 0.02, 0.01, percent=True)]


def planned(runs: Runs) -> list[Row]:
    rows = []
    for isl in PLANNED_LENGTHS:
        size = runs.best_fixed.get(isl)
        fixed = [] if size is None else runs.values(OURS, Job(isl, fixed=size), "ttft")
        ours = runs.values(OURS, Job(isl), "ttft")
        name = f"planned / best fixed ({size}), TTFT at ISL {isl}"
        note = f"{_median(ours)} s / {_median(fixed)} s"
        rows.append(Row(name, _ratios(ours, fixed), 1.02, 0.97, note=note))
    return rows


def predicted(runs: Runs) -> list[Row]:
    rows = []
    for isl in (4000, 8000):
        answers = [a for a in runs.answers.get((OURS, Job(isl)), []) if a["predicted"] is not None]
        off = [abs(answer["predicted"] / answer["makespan"] - 1) for answer in answers]
        note = f"predicted {_median([a['predicted'] for a in answers])} s"
        rows.append(Row(f"predicted / measured makespan off by, ISL {isl}", off, 0.05, 0.02, percent=True, note=note))
    return rows


def _median(values: list[float]) -> str:
    return f"{statistics.median(values):.3g}" if values else "-"


FIGURES: dict[str, tuple[Callable[[Runs], list[Row]], list[Pair]]] = {
    "ttft": (ttft, [(who, LONG) for who in (OURS, TRANSFORMERS, VLLM_PP, VLLM_ONE)]),
    "efficiency": (efficiency, [(OURS, LONG), (OURS_ONE, LONG)]),
    "queue": (queue, [(OURS, QUEUE)]),
    "decode": (decode, [(who, DECODE) for who in (OURS, VLLM_PP, VLLM_ONE)]),
    "start": (start, []),
    "driver": (driver, [(OURS, LONG)]),
    "planned": (planned, [(OURS, Job(isl)) for isl in PLANNED_LENGTHS]),
    "predicted": (predicted, [(OURS, Job(4000)), (OURS, Job(8000))]),
}

# --- the run ----------------------------------------------------------------------------------------------------------


def commands(options: argparse.Namespace, model: str) -> dict[str, list[str]]:
    """How each contestant that there is an environment for is started."""
    cores = ",".join(map(str, options.cores))
    ours = [sys.executable, "-m", "tests.bench.contestants.ours", model]
    found = {
        OURS: [*ours, "2", options.dtype, cores],
        OURS_ONE: [*ours, "1", options.dtype, cores],
        TRANSFORMERS: [options.transformers_python, str(HERE / "peer_transformers.py"), model, options.dtype, cores],
    }
    if options.vllm_python:
        vllm = [options.vllm_python, str(HERE / "peer_vllm.py"), model, options.dtype, cores]
        found[VLLM_PP] = [*vllm, "2", str(options.vllm_pp_chunk)]
        for chunk in options.vllm_chunks:
            found[f"{VLLM_ONE}, chunk {chunk}"] = [*vllm, "1", str(chunk)]
    left_out = [name for key, name in PEERS.items() if key not in options.peers]
    return {name: command for name, command in found.items() if not name.startswith(tuple(left_out))}


class CoreControls:
    """How fast the slower of the cores is: stages, and threads of one product, wait for it."""

    def __init__(self, of_cores: list[Contestant]) -> None:
        self._of_cores = of_cores

    def seconds(self) -> float:
        return max(float(child.ask({})["seconds"]) for child in self._of_cores)


@contextlib.contextmanager
def control(options: argparse.Namespace) -> Iterator[Control]:
    """What says how fast the machine is, for as long as it runs."""
    with contextlib.ExitStack() as stack:
        children = []
        for core in options.cores:
            command = [sys.executable, str(HERE / "control.py"), str(core)]
            children.append(stack.enter_context(_contestant(f"control of core {core}", command)))
        for child in children:
            child.go_on()
        yield CoreControls(children)


@contextlib.contextmanager
def _contestant(name: str, command: list[str]) -> Iterator[Contestant]:
    with Contestant(name, command) as child:
        child.ready()
        print(f"{name}: ready", file=sys.stderr)
        yield child


def measure(options: argparse.Namespace, model: str, machine_speed: Control, runs: Runs) -> None:
    """Add to ``runs`` every job of the figures asked for, once in each round. Raises ContestantFailed."""
    started = commands(options, model)
    wanted = dict.fromkeys(pair for name in options.only for pair in FIGURES[name][1])
    if pairs := [(name, job) for who, job in wanted for name in started if name.startswith(who)]:
        runs.steady["prompts"] = steady = Steady(machine_speed, options.patience)
        measure_prompts(options, started, pairs, steady, runs)
    if "start" in options.only:
        runs.steady["starts"] = steady = Steady(machine_speed, options.patience)
        starts = {(name, START): partial(_start, command) for name, command in _starts(options, model).items()}
        in_rounds(starts, options.rounds, steady, runs.answers)


def measure_prompts(
    options: argparse.Namespace,
    started: dict[str, list[str]],
    pairs: list[Pair],
    steady: Steady,
    runs: Runs,
) -> None:
    """Add the answers of these contestants to these jobs, once in each round. Raises ContestantFailed."""
    with contextlib.ExitStack() as stack:
        children = dict[str, Contestant]()
        for name, job in pairs:
            if name not in children:
                children[name] = stack.enter_context(_contestant(name, started[name]))
            for index in range(options.warmup):
                steady.watch(partial(children[name].run, job.message(f"warm-up/{index}")))
        if "planned" in options.only:
            runs.best_fixed = _best_fixed_sizes(children[OURS], steady)
            pairs = [*pairs, *((OURS, Job(isl, fixed=size)) for isl, size in runs.best_fixed.items())]
        measurements = {(name, job): partial(_run, children[name], job) for name, job in pairs}
        in_rounds(measurements, options.rounds, steady, runs.answers)


def in_rounds(
    measurements: Mapping[Pair, Callable[[str], dict[str, Any]]], rounds: int, steady: Steady, answers: Answers
) -> None:
    """Add what each gives, once in each round that counts. They are called with which round it is."""
    pairs = list(measurements)
    for index in range(rounds):
        print(f"round {index + 1} of {rounds}; {steady}", file=sys.stderr)
        for pair in pairs:
            answers.setdefault(pair, []).append(steady.run(partial(measurements[pair], f"{index}")))
    while (index := steady.outdated()) is not None:
        round_index, place = divmod(index, len(pairs))
        name, job = pair = pairs[place]
        print(f"round {round_index + 1} again: {name}, ISL {job.isl}; {steady}", file=sys.stderr)
        if (answer := steady.run_again(index, partial(measurements[pair], "again"))) is not None:
            answers[pair][round_index] = answer
    leave_out_slow_rounds([answers[pair] for pair in pairs], steady)


def leave_out_slow_rounds(answers: list[list[dict[str, Any]]], steady: Steady) -> None:
    """Rounds with a measurement that would make the call void do not count, if there are enough others."""
    pairs = len(answers)
    while slow := {index // pairs for index in steady.slow()}:
        rounds = len(steady.control_s) // pairs
        if rounds - len(slow) < MIN_ROUNDS:
            return
        steady.leave_out({index for index in range(rounds * pairs) if index // pairs in slow})
        for several in answers:
            several[:] = [answer for index, answer in enumerate(several) if index not in slow]


def _run(contestant: Contestant, job: Job, seed: str) -> dict[str, Any]:
    return contestant.run(job.message(seed))


def _start(command: list[str], seed: str) -> dict[str, Any]:
    """The seconds from a command to its first token."""
    return {"seconds": first_output(command)}


def _best_fixed_sizes(ours: Contestant, steady: Steady) -> dict[int, int]:
    """For each length the fixed chunk size with the best of some runs, in turn, apart from the runs that count."""
    jobs = [Job(isl, fixed=size) for isl in PLANNED_LENGTHS for size in FIXED_SIZES if size < isl]
    ttfts = dict.fromkeys(jobs, float("inf"))
    for index in range(CHOICES):
        for job in jobs:
            answer = steady.watch(partial(ours.run, job.message(f"choose/{index}")))
            ttfts[job] = min(ttfts[job], answer["ttft"])
    found = {}
    for job in sorted(jobs, key=lambda job: ttfts[job], reverse=True):
        found[job.isl] = job.fixed or 0
    return found


def _starts(options: argparse.Namespace, model: str) -> dict[str, list[str]]:
    """Commands that end with their first token."""
    ours = ["--model", model, "--stages", "2", "--dtype", options.dtype, "--prompt", PROMPT, "--max-tokens", "1"]
    found = {OURS: [sys.executable, "-m", "actorpp.cli", "run", *ours]}
    if options.vllm_python and "vllm-pp" in options.peers:
        found[VLLM_PP] = [*commands(options, model)[VLLM_PP], PROMPT]
    return found


def lines(rows: list[Row]) -> list[str]:
    """The table: median, range, target, and whether it is met."""
    out = [f"{'figure':<52}{'median':>8}{'lowest':>8}{'highest':>8}{'target':>8}{'beyond':>8}  "]
    for row in rows:
        sign = "<=" if row.at_most else ">="
        goals = [f"{sign}{100 * goal:.0f}%" if row.percent else f"{sign}{goal:g}" for goal in (row.target, row.beyond)]
        if not row.values:
            out.append(f"{row.name:<52}{'not measured':>24}{goals[0]:>8}{goals[1]:>8}")
            continue
        middle = statistics.median(row.values)
        met = middle <= row.target if row.at_most else middle >= row.target
        shown = [
            f"{100 * value:.1f}%" if row.percent else f"{value:.3f}"
            for value in (middle, min(row.values), max(row.values))
        ]
        numbers = "".join(f"{value:>8}" for value in (*shown, *goals))
        out.append(f"{row.name:<52}{numbers}  {'met' if met else 'MISSED'}  {row.note}".rstrip())
    return out


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder (default: the embedded model)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default 5); more, and slow ones can be left out")
    parser.add_argument("--warmup", type=int, default=1, help="runs of each before them (default 1)")
    parser.add_argument("--patience", type=float, default=900, help="seconds to wait and repeat (default 900)")
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES), help="figures (default: all)")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="peers (default: all)")
    parser.add_argument("--cores", type=int, nargs=2, default=sorted(os.sched_getaffinity(0))[:2], metavar="N")
    parser.add_argument("--transformers-python", default=sys.executable, help="a Python with transformers (this one)")
    parser.add_argument("--vllm-python", help="a Python with vLLM for CPUs; without it vLLM is missing")
    parser.add_argument("--vllm-chunks", type=int, nargs="+", default=[1024, 2048], help="one process: best of these")
    parser.add_argument("--vllm-pp-chunk", type=int, default=1024, help="chunk of the two stages (default 1024)")
    parser.add_argument("--save-result", type=Path, help="write every answer as JSON")
    options = parser.parse_args(arguments)
    if options.warmup < 1:
        parser.error("--warmup must be at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table; 0, or 3 when the machine was not steady, or 1 when a contestant failed."""
    options = parse(arguments)
    for key in ("vllm-pp", "vllm"):
        if key in options.peers and not options.vllm_python:
            print(f"missing: {PEERS[key]} (give --vllm-python)", file=sys.stderr)
    before, runs, failed = machine(), Runs(), False
    model = options.model or str(asyncio.run(resolve()).path)
    with control(options) as machine_speed:
        try:
            measure(options, model, machine_speed, runs)
        except ContestantFailed as error:
            print(error, file=sys.stderr)
            failed = True
    rounds = max((len(answers) for answers in runs.answers.values()), default=0)
    print(f"{before['cpu']}, cores {options.cores}, load average before {before['load']:.1f}; {rounds} rounds")
    print("\n".join(lines([row for name in options.only for row in FIGURES[name][0](runs)])))
    print("\n".join(f"{name}: {steady}" for name, steady in runs.steady.items()))
    if options.save_result is not None:
        answers = [{"who": who, "job": vars(job), "answers": several} for (who, job), several in runs.answers.items()]
        control_s = {name: steady.control_s for name, steady in runs.steady.items()}
        saved = {"machine": before, "control_s": control_s, "answers": answers}
        options.save_result.write_text(json.dumps(saved, indent=1) + "\n")
    if failed:
        return 1
    return 3 if any(steady.drift > MAX_DRIFT for steady in runs.steady.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
