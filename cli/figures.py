"""The figures of a benchmark: summed up, as tables in the layout that users of vLLM know, and as JSON.

Each figure is worked out for every iteration by itself; what is shown is its median and range over the iterations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median, pstdev
from typing import Any

import msgspec
import numpy as np

from actorpp.analysis.efficiency import PipelineFigures
from actorpp.analysis.spread import Spread, spread
from actorpp.cli.workload import Iteration, Workload

WIDTH = 78


class Summary(msgspec.Struct, frozen=True):
    """What the iterations of one workload had in common.

    Attributes:
        requests: Figures of ``request_figures``, by name.
        pipeline: Those of PipelineFigures, by name.
        busy_share: For each stage, the median share of the makespan in which it computed.
        chunks: Sizes of the prefill chunks of the last iteration's first request.
        ideal: How ideal_bubble_share is worked out, in the last iteration.
    """

    requests: dict[str, Spread]
    pipeline: dict[str, Spread]
    busy_share: tuple[float, ...]
    chunks: tuple[int, ...]
    ideal: str


def request_figures(workload: Workload, iteration: Iteration) -> dict[str, float]:
    """What the clients saw of one iteration, by the names and in the units of the results of ``vllm bench serve``.

    With one output token there is no ``tpot`` and no ``itl``.
    """
    requests, seconds = iteration.requests, iteration.duration_s
    inputs, outputs = workload.num_prompts * workload.input_len, workload.num_prompts * workload.output_len
    found: dict[str, float] = {
        "completed": len(requests),
        "duration": seconds,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(requests) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
    }
    latencies = {
        "ttft": [request.ttft_s for request in requests if request.ttft_s is not None],
        "tpot": [request.tpot_s for request in requests if request.tpot_s is not None],
        "itl": iteration.itls,
        "e2el": [request.e2e_s for request in requests],
    }
    for name, values in latencies.items():
        if values:
            found[f"mean_{name}_ms"] = 1e3 * fmean(values)
            found[f"median_{name}_ms"] = 1e3 * median(values)
            found[f"std_{name}_ms"] = 1e3 * pstdev(values)
            found[f"p99_{name}_ms"] = 1e3 * float(np.percentile(values, 99))
    return found


def summary(workload: Workload, iterations: Sequence[Iteration]) -> Summary:
    """Of at least one iteration."""
    pipelines = [iteration.pipeline for iteration in iterations]
    stages = range(len(pipelines[-1].busy_s))
    return Summary(
        requests=_spreads([request_figures(workload, iteration) for iteration in iterations]),
        pipeline=_spreads([_pipeline(pipeline) for pipeline in pipelines]),
        busy_share=tuple(median(p.busy_s[stage] / p.makespan_s for p in pipelines) for stage in stages),
        chunks=iterations[-1].requests[0].chunks,
        ideal=pipelines[-1].ideal,
    )


def _pipeline(figures: PipelineFigures) -> dict[str, float]:
    values = msgspec.structs.asdict(figures) | {"over_bound": figures.over_bound}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def _spreads(iterations: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Of what every one of them has."""
    names = [name for name in iterations[-1] if all(name in one for one in iterations)]
    return {name: spread(one[name] for one in iterations) for name in names}


COUNTS = (
    ("Successful requests", "completed", 0),
    ("Duration (s)", "duration", 3),
    ("Total input tokens", "total_input_tokens", 0),
    ("Total generated tokens", "total_output_tokens", 0),
    ("Request throughput (req/s)", "request_throughput", 2),
    ("Output token throughput (tok/s)", "output_throughput", 1),
    ("Total token throughput (tok/s)", "total_token_throughput", 1),
)
LATENCIES = (
    ("TTFT", "Time to first token", 2),
    ("TPOT", "Time per output token after the first", 3),
    ("ITL", "Time from one output token to the next", 3),
    ("E2EL", "Time to the end of a request", 2),
)


def table(title: str, facts: dict[str, Any], found: Summary) -> str:
    """The figures of one workload, a line each: median, lowest, highest."""
    lines = [f" {title} ".center(WIDTH, "=")]
    lines += [f"{name + ':':<44}{value!s:>34}" for name, value in facts.items()]
    lines.append(f"{'':<44}{'median':>10}{'lowest':>12}{'highest':>12}")
    lines += [_line(name, found.requests[key], 1, digits) for name, key, digits in COUNTS]
    for short, name, digits in LATENCIES:
        keys = {kind: f"{kind.lower()}_{short.lower()}_ms" for kind in ("Mean", "Median", "P99")}
        if keys["Mean"] in found.requests:
            lines.append(_section(name))
            lines += [_line(f"{kind} {short} (ms)", found.requests[key], 1, digits) for kind, key in keys.items()]
    lines.append(_section("Pipeline"))
    rows = (
        ("Makespan (s)", "makespan_s", 1, 3),
        ("Flow-shop bound of its own step times (s)", "bound_s", 1, 3),
        ("Makespan / bound", "over_bound", 1, 3),
        ("Efficiency: busy / (stages x makespan) (%)", "efficiency", 100, 1),
        ("Bubble share (%)", "bubble_share", 100, 1),
        ("Bubble share after the first fill (%)", "bubble_share_after_fill", 100, 1),
        ("Bubble share of prefill (%)", "prefill_bubble_share", 100, 1),
        (f"{found.ideal}, of M equal steps (%)", "ideal_bubble_share", 100, 1),
        ("Steps of prefill, M", "num_prefill_steps", 1, 0),
        ("Bubble share of decode alone (%)", "decode_bubble_share", 100, 1),
    )
    lines += [_line(name, found.pipeline[key], by, digits) for name, key, by, digits in rows if key in found.pipeline]
    lines += [
        f"{'Busy share of each stage (%):':<44}{'  '.join(f'{100 * share:.1f}' for share in found.busy_share):>10}",
        f"Chunks of a prompt: {chunk_list(found.chunks)}",
        "=" * WIDTH,
    ]
    return "\n".join(lines) + "\n"


Cell = tuple[Workload, Summary]
SWEEP_REQUESTS = (
    ("TTFT ms", "median_ttft_ms", 1, 1), ("range", "median_ttft_ms", 1, 1), ("P99 TTFT", "p99_ttft_ms", 1, 1),
    ("TPOT ms", "median_tpot_ms", 1, 2), ("P99 ITL", "p99_itl_ms", 1, 2), ("out tok/s", "output_throughput", 1, 1),
    ("tot tok/s", "total_token_throughput", 1, 1), ("s", "duration", 1, 3), ("range", "duration", 1, 3),
)  # fmt: skip
SWEEP_PIPELINE = (
    ("makespan s", "makespan_s", 1, 3), ("bound s", "bound_s", 1, 3), ("/ bound", "over_bound", 1, 3),
    ("range", "over_bound", 1, 3), ("eff. %", "efficiency", 100, 1), ("range", "efficiency", 100, 1),
    ("bubble %", "bubble_share", 100, 1), ("prefill %", "prefill_bubble_share", 100, 1),
    ("ideal %", "ideal_bubble_share", 100, 1), ("decode %", "decode_bubble_share", 100, 1),
)  # fmt: skip


def sweep_table(cells: Sequence[Cell]) -> str:
    """What the requests saw, and what the pipeline did: for each workload a line of medians, and of some the range."""
    requests = [[*_shape(work), str(work.num_prompts), *_values(s.requests, SWEEP_REQUESTS)] for work, s in cells]
    pipeline = [[*_shape(work), str(len(s.chunks)), *_values(s.pipeline, SWEEP_PIPELINE)] for work, s in cells]
    return (
        "Requests\n"
        + _columns(["ISL", "OSL", "conc.", "prompts", *(column[0] for column in SWEEP_REQUESTS)], requests)
        + "\nPipeline, with the bubble shares of all, of prefill beside that of equal steps, and of decode alone\n"
        + _columns(["ISL", "OSL", "conc.", "chunks", *(column[0] for column in SWEEP_PIPELINE)], pipeline)
    )


def _shape(workload: Workload) -> tuple[str, str, str]:
    return str(workload.input_len), str(workload.output_len), str(workload.concurrency)


def _values(found: Mapping[str, Spread], columns: Sequence[tuple[str, str, float, int]]) -> list[str]:
    values = []
    for name, key, factor, digits in columns:
        if key not in found:
            values.append("-")
        elif name == "range":
            values.append(f"{factor * found[key].lowest:.{digits}f}-{factor * found[key].highest:.{digits}f}")
        else:
            values.append(f"{factor * found[key].median:.{digits}f}")
    return values


def _columns(names: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    lines = ["  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True)) for row in [names, *rows]]
    return "\n".join(lines) + "\n"


def chunk_list(chunks: Sequence[int]) -> str:
    """``512 x 15, 320``: equal neighbours are counted."""
    runs: list[tuple[int, int]] = []
    for chunk in chunks:
        if runs and runs[-1][0] == chunk:
            runs[-1] = (chunk, runs[-1][1] + 1)
        else:
            runs.append((chunk, 1))
    return ", ".join(f"{chunk} x {count}" if count > 1 else str(chunk) for chunk, count in runs)


def _section(name: str) -> str:
    return f" {name} ".center(WIDTH, "-")


def _line(name: str, values: Spread, factor: float, digits: int) -> str:
    median, lowest, highest = (factor * value for value in (values.median, values.lowest, values.highest))
    return f"{name + ':':<44}{median:>10.{digits}f}{lowest:>12.{digits}f}{highest:>12.{digits}f}"
