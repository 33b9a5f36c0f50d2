"""The figures of a benchmark: summed up, as a table in the layout that users of vLLM know, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec

from actorpp.analysis.spread import Spread, spread
from actorpp.cli.workload import Iteration, Workload

WIDTH = 78


class Summary(msgspec.Struct, frozen=True):
    """What the iterations of one workload had in common.

    Attributes:
        duration_s, request_s, output_tok_s, total_tok_s: Over the iterations, as is what PipelineFigures says too.
        ttft_s, e2e_s, tpot_s: Over the requests of all iterations; tpot_s is None with one output token.
        num_steps, ideal_bubble_share: Of the last iteration.
        busy_share: For each stage, the median share of the makespan in which it computed.
        chunks: Sizes of the prefill chunks of the last iteration's first request.
    """

    duration_s: Spread
    request_s: Spread
    output_tok_s: Spread
    total_tok_s: Spread
    ttft_s: Spread
    e2e_s: Spread
    tpot_s: Spread | None
    makespan_s: Spread
    bound_s: Spread
    over_bound: Spread
    efficiency: Spread
    bubble_share: Spread
    bubble_share_after_fill: Spread
    ideal_bubble_share: float
    num_steps: int
    busy_share: tuple[float, ...]
    chunks: tuple[int, ...]


def summary(workload: Workload, iterations: Sequence[Iteration]) -> Summary:
    """Of at least one iteration."""
    requests = [request for iteration in iterations for request in iteration.requests]
    durations = [iteration.duration_s for iteration in iterations]
    pipelines = [iteration.pipeline for iteration in iterations]
    outputs = workload.num_prompts * workload.output_len
    total = outputs + workload.num_prompts * workload.input_len
    tpots = [request.tpot_s for request in requests if request.tpot_s is not None]
    return Summary(
        duration_s=spread(durations),
        request_s=spread(workload.num_prompts / seconds for seconds in durations),
        output_tok_s=spread(outputs / seconds for seconds in durations),
        total_tok_s=spread(total / seconds for seconds in durations),
        ttft_s=spread(request.ttft_s for request in requests if request.ttft_s is not None),
        e2e_s=spread(request.e2e_s for request in requests),
        tpot_s=spread(tpots) if tpots else None,
        makespan_s=spread(p.makespan_s for p in pipelines),
        bound_s=spread(p.bound_s for p in pipelines),
        over_bound=spread(p.over_bound for p in pipelines),
        efficiency=spread(p.efficiency for p in pipelines),
        bubble_share=spread(p.bubble_share for p in pipelines),
        bubble_share_after_fill=spread(p.bubble_share_after_fill for p in pipelines),
        ideal_bubble_share=pipelines[-1].ideal_bubble_share,
        num_steps=pipelines[-1].num_steps,
        busy_share=tuple(
            median(p.busy_s[stage] / p.makespan_s for p in pipelines) for stage in range(len(pipelines[-1].busy_s))
        ),
        chunks=iterations[-1].requests[0].chunks,
    )


def table(title: str, facts: dict[str, Any], found: Summary) -> str:
    """The figures of one workload, a line each: median, lowest, highest."""
    lines = [f" {title} ".center(WIDTH, "=")]
    lines += [f"{name + ':':<44}{value!s:>34}" for name, value in facts.items()]
    lines.append(f"{'':<44}{'median':>10}{'lowest':>12}{'highest':>12}")
    lines += [
        _line("Duration (s)", found.duration_s, 1, 3),
        _line("Request throughput (req/s)", found.request_s, 1, 2),
        _line("Output token throughput (tok/s)", found.output_tok_s, 1, 1),
        _line("Total token throughput (tok/s)", found.total_tok_s, 1, 1),
        _section("Latency of a request"),
        _line("Time to first token, TTFT (ms)", found.ttft_s, 1e3, 1),
    ]
    if found.tpot_s is not None:
        lines.append(_line("Time per output token after it, TPOT (ms)", found.tpot_s, 1e3, 2))
    lines += [
        _line("End to end (ms)", found.e2e_s, 1e3, 1),
        _section("Pipeline"),
        _line("Makespan (s)", found.makespan_s, 1, 3),
        _line("Flow-shop bound of its own step times (s)", found.bound_s, 1, 3),
        _line("Makespan / bound", found.over_bound, 1, 3),
        _line("Efficiency: busy / (stages x makespan) (%)", found.efficiency, 100, 1),
        _line("Bubble share (%)", found.bubble_share, 100, 1),
        _line("Bubble share after the first fill (%)", found.bubble_share_after_fill, 100, 1),
        f"{f'(P-1)/(P-1+M), M = {found.num_steps} equal steps (%):':<44}{100 * found.ideal_bubble_share:>10.1f}",
        f"{'Busy share of each stage (%):':<44}{'  '.join(f'{100 * share:.1f}' for share in found.busy_share):>10}",
        f"Chunks of a prompt: {chunk_list(found.chunks)}",
        "=" * WIDTH,
    ]
    return "\n".join(lines) + "\n"


SWEEP_COLUMNS = (
    ("ISL", 7), ("OSL", 6), ("conc.", 6), ("prompts", 8), ("chunks", 7), ("TTFT ms", 10), ("TPOT ms", 9),
    ("out tok/s", 10), ("tot tok/s", 10), ("s", 8), ("/ bound", 8), ("eff. %", 7), ("bubble %", 9), ("ideal %", 8),
)  # fmt: skip


def sweep_table(cells: Sequence[tuple[Workload, Summary]]) -> str:
    """A line for each workload, medians only."""
    lines = ["".join(f"{name:>{width}}" for name, width in SWEEP_COLUMNS)]
    for workload, found in cells:
        values = (
            str(workload.input_len),
            str(workload.output_len),
            str(workload.concurrency),
            str(workload.num_prompts),
            str(len(found.chunks)),
            f"{1e3 * found.ttft_s.median:.1f}",
            "-" if found.tpot_s is None else f"{1e3 * found.tpot_s.median:.2f}",
            f"{found.output_tok_s.median:.1f}",
            f"{found.total_tok_s.median:.1f}",
            f"{found.duration_s.median:.3f}",
            f"{found.over_bound.median:.3f}",
            f"{100 * found.efficiency.median:.1f}",
            f"{100 * found.bubble_share.median:.1f}",
            f"{100 * found.ideal_bubble_share:.1f}",
        )
        lines.append("".join(f"{value:>{width}}" for value, (_, width) in zip(values, SWEEP_COLUMNS, strict=True)))
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
