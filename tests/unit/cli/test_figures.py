"""The tables of ``actorpp bench``, line by line against what they were made of."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from actorpp.analysis.efficiency import PipelineFigures
from actorpp.cli.figures import summary, sweep_table, table
from actorpp.cli.tables import table as empty_table
from actorpp.cli.tables import text_of
from actorpp.cli.workload import Iteration, Workload
from actorpp.serving.api import RequestMetrics

WORK = Workload(input_len=1000, output_len=3, num_prompts=4, concurrency=2)


def iteration(scale: float) -> Iteration:
    """All of its figures differ from each other, and grow with ``scale``."""
    requests = tuple(
        RequestMetrics(
            ttft_s=scale * ttft, e2e_s=scale * (ttft + 0.5), prefill_tok_s=None, tpot_s=scale * ttft / 10,
            chunks=(600, 400), stage_busy=(0.5, 0.5),
        )
        for ttft in (0.1, 0.2, 0.4, 0.9)
    )  # fmt: skip
    pipeline = PipelineFigures(
        num_steps=19, num_prefill_steps=8, num_fills=2, busy_s=(0.6 * scale, 0.7 * scale),
        makespan_s=1.1 * scale, bound_s=0.9 * scale, efficiency=0.61 * scale, bubble_share=0.37 * scale,
        bubble_share_after_fill=0.31 * scale, prefill_bubble_share=0.21 * scale, decode_bubble_share=0.53 * scale,
        ideal_bubble_share=0.17 * scale,
    )  # fmt: skip
    gaps = (0.010, 0.020, 0.030, 0.040, 0.050, 0.060, 0.070, 0.300)
    return Iteration(1.2 * scale, requests, tuple(scale * gap for gap in gaps), pipeline)


ITERATIONS = [iteration(scale) for scale in (1.0, 1.2, 1.1)]


def triple(values: list[float], digits: int) -> list[str]:
    """Median, lowest, highest of three."""
    lowest, median, highest = sorted(values)
    return [f"{value:.{digits}f}" for value in (median, lowest, highest)]


def test_every_line_says_what_was_measured() -> None:
    text = table("T", {"Model": "m"}, summary(WORK, ITERATIONS))
    lines = {name: rest.split() for name, _, rest in (line.partition(":") for line in text.splitlines())}
    lines |= {line.partition(" (%)")[0]: line.split()[-3:] for line in text.splitlines() if " (%):" in line}
    seconds = [one.duration_s for one in ITERATIONS]
    assert lines["Successful requests"] == ["4"] * 3
    assert lines["Total input tokens"] == ["4000"] * 3
    assert lines["Total generated tokens"] == ["12"] * 3
    assert lines["Duration (s)"] == triple(seconds, 3)
    assert lines["Request throughput (req/s)"] == triple([4 / s for s in seconds], 2)
    assert lines["Output token throughput (tok/s)"] == triple([12 / s for s in seconds], 1)
    assert lines["Total token throughput (tok/s)"] == triple([4012 / s for s in seconds], 1)
    for name, values, digits in (
        ("TTFT", [[1e3 * r.ttft_s for r in one.requests if r.ttft_s] for one in ITERATIONS], 2),
        ("TPOT", [[1e3 * r.tpot_s for r in one.requests if r.tpot_s] for one in ITERATIONS], 3),
        ("ITL", [[1e3 * gap for gap in one.itls] for one in ITERATIONS], 3),
        ("E2EL", [[1e3 * r.e2e_s for r in one.requests] for one in ITERATIONS], 2),
    ):
        assert lines[f"Mean {name} (ms)"] == triple([float(np.mean(one)) for one in values], digits)
        assert lines[f"Median {name} (ms)"] == triple([float(np.median(one)) for one in values], digits)
        assert lines[f"P99 {name} (ms)"] == triple([float(np.percentile(one, 99)) for one in values], digits)
    pipelines = [one.pipeline for one in ITERATIONS]
    assert lines["Makespan (s)"] == triple([p.makespan_s for p in pipelines], 3)
    assert lines["Flow-shop bound of its own step times (s)"] == triple([p.bound_s for p in pipelines], 3)
    assert lines["Makespan / bound"] == triple([p.over_bound for p in pipelines], 3)
    for name, field in (
        ("Efficiency: busy / (stages x makespan)", "efficiency"),
        ("Bubble share", "bubble_share"),
        ("Bubble share after the first fill", "bubble_share_after_fill"),
        ("Bubble share of prefill", "prefill_bubble_share"),
        ("(2(P-1))/(2(P-1)+M), of M equal steps", "ideal_bubble_share"),
        ("Bubble share of decode alone", "decode_bubble_share"),
    ):
        assert lines[name] == triple([100 * getattr(p, field) for p in pipelines], 1), name
    assert lines["Steps of prefill, M"] == ["8"] * 3
    assert lines["Busy share of each stage (%)"] == ["54.5", "63.6"]
    assert lines["Chunks of a prompt"] == ["600,", "400"]


def test_every_column_of_a_sweep_says_what_was_measured() -> None:
    short = msgspec.structs.replace(
        ITERATIONS[0],
        requests=tuple(msgspec.structs.replace(r, tpot_s=None) for r in ITERATIONS[0].requests),
        itls=(),
        pipeline=msgspec.structs.replace(ITERATIONS[0].pipeline, decode_bubble_share=None),
    )
    found = [(WORK, summary(WORK, ITERATIONS)), (Workload(10, 1, 4, 2), summary(Workload(10, 1, 4, 2), [short]))]
    requests, pipeline = (part.splitlines()[1:] for part in sweep_table(found).split("\n\n"))
    assert " ".join(requests[0].split()) == (
        "ISL OSL conc. prompts TTFT ms range P99 TTFT TPOT ms P99 ITL out tok/s tot tok/s s range"
    )
    assert requests[1].split() == [
        "1000", "3", "2", "4", "330.0", "300.0-360.0", f"{1.1 * 885:.1f}", "33.00", f"{1.1 * 283.9:.2f}",
        f"{12 / 1.32:.1f}", f"{4012 / 1.32:.1f}", "1.320", "1.200-1.440",
    ]  # fmt: skip
    assert requests[2].split()[6:9] == ["885.0", "-", "-"]
    assert " ".join(pipeline[0].split()) == (
        "ISL OSL conc. chunks makespan s bound s / bound range eff. % range bubble % prefill % ideal % decode %"
    )
    assert pipeline[1].split() == [
        "1000", "3", "2", "2", "1.210", "0.990", "1.222", "1.222-1.222", "67.1", "61.0-73.2",
        "40.7", "23.1", "18.7", "58.3",
    ]  # fmt: skip
    assert pipeline[2].split()[-2:] == ["17.0", "-"]


def test_figures_have_the_names_of_vllms_results() -> None:
    names = {"completed", "duration", "total_input_tokens", "total_output_tokens"}
    names |= {"request_throughput", "output_throughput", "total_token_throughput"}
    kinds = ("mean", "median", "std", "p99")
    names |= {f"{kind}_{what}_ms" for kind in kinds for what in ("ttft", "tpot", "itl", "e2el")}
    found = summary(WORK, ITERATIONS).requests
    assert set(found) == names
    assert found["std_ttft_ms"].lowest == pytest.approx(float(np.std([100, 200, 400, 900])))


def test_on_a_narrow_terminal_numbers_are_folded_and_names_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    made = empty_table("T", "chunks", "ISL 1000", "ISL 4000", "ISL 8000")
    made.add_row("sglang 2560, 0.75", *["12345 (12000-13000)"] * 3)
    lines = [line.strip() for line in text_of(made).splitlines()]
    (name,) = [line for line in lines if line.startswith("sglang")]
    assert name.startswith("sglang 2560, 0.75 ")
