"""``actorpp bench``: latency of one batch, throughput of many prompts, and a sweep over grids of both.

Named and shaped after vLLM's ``vllm bench``. Every run also says how well the pipeline did against the flow-shop bound
of its own step times.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actorpp.cli import options as o

if TYPE_CHECKING:
    from actorpp.cli.display import Output
    from actorpp.cli.figures import Summary
    from actorpp.cli.workload import Iteration, Workload
    from actorpp.config import EngineConfig

bench = typer.Typer(help="Measure latency and throughput of the pipeline.", add_completion=False)

WORK = "Workload"
DEFAULT_SEED = 0  # of the prompts, and so of the figures: runs can be compared

OneLength = Annotated[
    int, typer.Option("--input-len", help="Prompt tokens, drawn at random.", min=1, metavar="N", rich_help_panel=WORK)
]
OneOutput = Annotated[
    int, typer.Option("--output-len", help="Tokens to generate.", min=1, metavar="N", rich_help_panel=WORK)
]
BatchSize = Annotated[
    int, typer.Option("--batch-size", help="Prompts at once.", min=1, metavar="N", rich_help_panel=WORK)
]
NumPrompts = Annotated[
    int, typer.Option("--num-prompts", help="Prompts in all.", min=1, metavar="N", rich_help_panel=WORK)
]
MaxConcurrency = Annotated[
    int | None,
    typer.Option(
        "--max-concurrency",
        help=r"Prompts at once. \[default: all, up to --max-queued-requests]",
        min=1,
        metavar="N",
        rich_help_panel=WORK,
        show_default=False,
    ),
]
Warmup = Annotated[
    int, typer.Option("--num-iters-warmup", help="Passes that do not count.", min=0, metavar="N", rich_help_panel=WORK)
]
Iterations = Annotated[
    int, typer.Option("--num-iters", help="Passes that count.", min=1, metavar="N", rich_help_panel=WORK)
]
SaveResult = Annotated[
    Path | None,
    typer.Option(
        "--save-result", "--output-json", help="Write every figure as JSON.", metavar="FILE", rich_help_panel=o.OUTPUT
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", help="Write the trace of the last pass.", metavar="FILE", rich_help_panel=o.OUTPUT),
]


def _grid(flag: str, help: str) -> Any:
    return typer.Option(flag, help=help, metavar="N,N,...", rich_help_panel=WORK)


@bench.callback(invoke_without_command=True)
def group(context: typer.Context) -> None:
    """Measure latency and throughput of the pipeline."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@bench.command()
@o.with_engine_flags
def latency(
    input_len: OneLength = 1024,
    output_len: OneOutput = 16,
    batch_size: BatchSize = 1,
    num_iters_warmup: Warmup = 1,
    num_iters: Iterations = 5,
    save_result: SaveResult = None,
    trace: TraceFile = None,
    *,
    engine: dict[str, Any],
) -> None:
    """The time of one batch of prompts, submitted at once."""
    from actorpp.cli.workload import Workload

    config = _config(engine)
    work = Workload(input_len, output_len, batch_size, batch_size)
    _run("latency", config, [work], num_iters_warmup, num_iters, save_result, trace)


@bench.command()
@o.with_engine_flags
def throughput(
    input_len: OneLength = 1024,
    output_len: OneOutput = 16,
    num_prompts: NumPrompts = 16,
    max_concurrency: MaxConcurrency = None,
    num_iters_warmup: Warmup = 1,
    num_iters: Iterations = 3,
    save_result: SaveResult = None,
    trace: TraceFile = None,
    *,
    engine: dict[str, Any],
) -> None:
    """Tokens per second over many prompts that wait in the queue."""
    from actorpp.cli.workload import Workload

    config = _config(engine)
    at_once = max_concurrency or min(num_prompts, max(1, config.max_queued_requests))
    work = Workload(input_len, output_len, num_prompts, at_once)
    _run("throughput", config, [work], num_iters_warmup, num_iters, save_result, trace)


@bench.command()
@o.with_engine_flags
def sweep(
    input_len: Annotated[str, _grid("--input-len", "Prompt lengths.")] = "256,1024,4096",
    output_len: Annotated[str, _grid("--output-len", "Tokens to generate.")] = "16",
    max_concurrency: Annotated[str, _grid("--max-concurrency", "Prompts at once.")] = "1,4",
    num_prompts: Annotated[
        int | None,
        typer.Option(
            "--num-prompts",
            help=r"Prompts of each cell. \[default: as many as at once]",
            min=1,
            metavar="N",
            rich_help_panel=WORK,
            show_default=False,
        ),
    ] = None,
    num_iters_warmup: Warmup = 1,
    num_iters: Iterations = 3,
    save_result: SaveResult = None,
    *,
    engine: dict[str, Any],
) -> None:
    """Every combination of prompt length, output length and concurrency, on one engine."""
    from actorpp.cli.workload import Workload

    config = _config(engine)
    lengths, outputs, concurrencies = (
        comma_list(flag, value)
        for flag, value in (
            ("--input-len", input_len),
            ("--output-len", output_len),
            ("--max-concurrency", max_concurrency),
        )
    )
    works = [
        Workload(length, new, num_prompts or at_once, at_once)
        for length, new, at_once in product(lengths, outputs, concurrencies)
    ]
    _run("sweep", config, works, num_iters_warmup, num_iters, save_result, None)


def _config(engine: dict[str, Any]) -> EngineConfig:
    return o.load_config(engine, seed=DEFAULT_SEED)


def comma_list(flag: str, text: str) -> list[int]:
    """The numbers of ``256,1024``, each at least 1. Raises ConfigError."""
    from actorpp.errors import ConfigError

    try:
        numbers = [int(entry) for entry in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} {text}: expected numbers like 256,1024", param=flag) from None
    if min(numbers) < 1:
        raise ConfigError(f"{flag} {text}: each must be at least 1", param=flag)
    return numbers


def writable(flag: str, file: Path | None) -> None:
    """Known before anything is measured. Raises ConfigError when the file's folder does not exist."""
    from actorpp.errors import ConfigError

    if file is not None and not file.parent.is_dir():
        raise ConfigError(f"{flag} {file}: no such folder {file.parent}", param=flag)


def _run(
    kind: str,
    config: EngineConfig,
    works: Sequence[Workload],
    warmup: int,
    iterations: int,
    save_result: Path | None,
    trace: Path | None,
) -> None:
    from actorpp.cli import loop
    from actorpp.cli.display import reserved_stdout
    from actorpp.logs import configure_logging

    writable("--save-result", save_result)
    writable("--trace", trace)
    configure_logging(config.log_level)
    with reserved_stdout() as output:
        code = loop.run(
            lambda: _measure(kind, config, works, warmup, iterations, save_result, trace, output),
            grace=config.shutdown_timeout + 1.5,
        )
    raise typer.Exit(code)


async def _measure(
    kind: str,
    config: EngineConfig,
    works: Sequence[Workload],
    warmup: int,
    iterations: int,
    save_result: Path | None,
    trace_file: Path | None,
    output: Output,
) -> int:
    from actorpp.analysis.chrome import write_trace
    from actorpp.cli.figures import summary, sweep_table, table
    from actorpp.cli.machine import machine
    from actorpp.cli.workload import measure
    from actorpp.engine import Engine
    from actorpp.progress import ProgressDisplay
    from actorpp.transport.sockets import close_context

    before = machine()
    display = ProgressDisplay()
    found: list[tuple[Workload, list[Iteration], Summary]] = []
    try:
        engine = Engine(config, on_startup=display.startup, trace=True)
        await engine.locate()
        for work in works:
            work.check(engine.context_length)
        async with engine:
            facts = {
                "Model": config.model or engine.checkpoint.path.name,
                "Stages x threads": f"{config.stages} x {config.threads()}",
            }
            for number, work in enumerate(works):
                if kind == "sweep":
                    display.part(f"cell {number + 1}/{len(works)}: {work.name}", number, len(works), "cells")
                several, trace = await measure(engine, work, warmup=warmup, iterations=iterations, display=display)
                found.append((work, several, summary(work, several)))
            if kind == "sweep":
                display.part("sweep", len(works), len(works), "cells")
            if trace_file is not None:
                write_trace(trace, trace_file)
    finally:
        display.close()
        close_context()
    if kind == "sweep":
        output.write(sweep_table([(work, figures) for work, _, figures in found]))
    for work, several, figures in found if kind != "sweep" else ():
        shape = {
            "Prompts x (input + output tokens)": f"{work.num_prompts} x ({work.input_len} + {work.output_len})",
            "At once": work.concurrency,
            "Iterations (and to warm up)": f"{len(several)} ({warmup})",
        }
        output.write(table(f"{kind.capitalize()} benchmark", {**facts, **shape}, figures))
    if save_result is not None:
        _save(save_result, kind, config, before, warmup, found)
    return 0


def _save(
    file: Path,
    kind: str,
    config: EngineConfig,
    machine_before: dict[str, Any],
    warmup: int,
    found: Sequence[tuple[Workload, list[Iteration], Summary]],
) -> None:
    import dataclasses
    import json

    import msgspec

    from actorpp.cli.machine import machine
    from actorpp.errors import OutputError

    result = {
        "benchmark": kind,
        "machine": machine_before,
        "load_after": machine()["load"],
        "engine": config.model_dump(mode="json"),
        "num_iters_warmup": warmup,
        "results": [
            {
                "workload": dataclasses.asdict(work),
                **{name: values.median for name, values in figures.requests.items()},
                "summary": msgspec.to_builtins(figures),
                "iterations": msgspec.to_builtins(several),
            }
            for work, several, figures in found
        ],
    }
    try:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"--save-result {file}: {error.strerror}") from None
