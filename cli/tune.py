"""``actorpp tune``: the chunking with the smallest time to first token, found by measuring."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actorpp.cli import options as o
from actorpp.cli.bench import DEFAULT_SEED, WORK, Iterations, SaveResult, Warmup, comma_list, writable

if TYPE_CHECKING:
    from actorpp.analysis.spread import Spread
    from actorpp.analysis.tuning import Setting
    from actorpp.cli.display import Output
    from actorpp.config import EngineConfig
    from actorpp.engine import Engine
    from actorpp.progress import ProgressDisplay

CHOSEN_HERE = ("chunk_policy", "chunked_prefill_size", "enable_dynamic_chunking", "dynamic_chunking_smooth_factor")


@o.with_engine_flags
def tune(
    input_len: Annotated[
        str, typer.Option("--input-len", help="Prompt lengths.", metavar="N,N,...", rich_help_panel=WORK)
    ] = "1000,4000,8000",
    chunk_sizes: Annotated[
        str, typer.Option("--chunk-sizes", help="Fixed sizes to try.", metavar="N,N,...", rich_help_panel=WORK)
    ] = "256,512,1024,2048,4096",
    num_iters_warmup: Warmup = 1,
    num_iters: Iterations = 5,
    save_result: SaveResult = None,
    *,
    engine: dict[str, Any],
) -> None:
    """Find the chunking with the smallest time to first token over some prompt lengths.

    Tries fixed sizes, then dynamic chunking as SGLang's guide tells to tune it (an initial size of two to three times
    the best fixed one, smoothing factors of 0.6 to 0.85), and at last the best of each and planned chunks in turn.
    """
    from actorpp.cli import loop
    from actorpp.cli.display import reserved_stdout
    from actorpp.config import flag_of
    from actorpp.errors import ConfigError
    from actorpp.logs import configure_logging

    config = o.load_config(engine, seed=DEFAULT_SEED)
    for name in CHOSEN_HERE:
        if name in config.model_fields_set:
            raise ConfigError(f"{flag_of(name)} is what tune chooses: leave it out", param=name)
    lengths, sizes = comma_list("--input-len", input_len), comma_list("--chunk-sizes", chunk_sizes)
    writable("--save-result", save_result)
    configure_logging(config.log_level)
    with reserved_stdout() as output:
        code = loop.run(
            lambda: _tune(config, lengths, sizes, num_iters_warmup, num_iters, save_result, output),
            grace=config.shutdown_timeout + 1.5,
        )
    raise typer.Exit(code)


class Trials:
    """Times to first token on one engine, setting by setting, in turn."""

    def __init__(self, engine: Engine, lengths: Sequence[int], iterations: int, display: ProgressDisplay) -> None:
        self.measured: dict[Setting, dict[int, Spread]] = {}
        self._engine = engine
        self._lengths = lengths
        self._iterations = iterations
        self._display = display
        self._runs = 0

    async def run(self, settings: Sequence[Setting], step: str) -> None:
        """Measure these settings, each length of each once in every round; earlier figures of theirs are replaced."""
        from actorpp.analysis.spread import spread

        found: dict[tuple[Setting, int], list[float]] = {}
        total, done = len(settings) * len(self._lengths) * self._iterations, 0
        for _ in range(self._iterations):
            for setting in settings:
                for length in self._lengths:
                    self._display.show(step, done, total, "runs")
                    found.setdefault((setting, length), []).append(await self.ttft(setting, length))
                    done += 1
        self._display.show(step, done, total, "runs")
        for setting in settings:
            self.measured[setting] = {length: spread(found[setting, length]) for length in self._lengths}

    async def ttft(self, setting: Setting, length: int) -> float:
        """Seconds of one prompt alone."""
        from actorpp.cli.workload import Workload, run_once

        engine = self._engine
        engine.scheduler.policy = engine.planning.policy(
            setting.policy, chunk_size=setting.chunk_size, smooth_factor=setting.smooth_factor
        )
        self._runs += 1
        iteration, _ = await run_once(engine, Workload(length, 1, 1, 1), f"{engine.config.seed}/{self._runs}")
        return iteration.requests[0].ttft_s or 0.0


async def _tune(
    config: EngineConfig,
    lengths: Sequence[int],
    sizes: Sequence[int],
    warmup: int,
    iterations: int,
    save_result: Path | None,
    output: Output,
) -> int:

    from actorpp.analysis.tuning import Setting, best, fixed_settings, initial_sizes, smooth_factors, verdict
    from actorpp.cli.tables import text_of
    from actorpp.engine import Engine
    from actorpp.errors import ConfigError, ProfilingError
    from actorpp.profiling import measure_profile
    from actorpp.progress import ProgressDisplay
    from actorpp.transport.sockets import close_context

    display = ProgressDisplay()
    planned = Setting("planned")
    try:
        async with Engine(config, on_startup=display.startup, trace=True) as engine:
            if max(lengths) >= engine.context_length:
                raise ConfigError(
                    f"--input-len {max(lengths)}: the context has {engine.context_length} tokens, one of them is new",
                    param="input_len",
                )
            without: list[str] = []
            if engine.planning.profile is None:  # dynamic chunking computes its sizes from one
                try:
                    engine.planning.profile = await measure_profile(
                        engine, on_progress=lambda done, total: display.show("profile", done, total, "tokens")
                    )
                except ProfilingError as error:
                    without.append(f"Dynamic chunking was not tried: {error}")
            trials = Trials(engine, lengths, iterations, display)
            for _ in range(warmup):
                for length in lengths:
                    await trials.ttft(planned, length)
            longest = min(max(lengths), engine.planning.max_chunk)
            await trials.run(fixed_settings(sizes, longest), "fixed sizes")
            fixed = best(trials.measured, "fixed")
            finalists = [fixed, planned]
            if not without:
                align = max(config.page_size, 64)
                initial = initial_sizes(fixed.chunk_size or align, align, longest)
                await trials.run(initial, "initial sizes")
                await trials.run(smooth_factors(best(trials.measured, "sglang").chunk_size or align), "smoothing")
                finalists.insert(1, best(trials.measured, "sglang"))
            await trials.run(finalists, "finalists")
    finally:
        display.close()
        close_context()
    said = without + verdict({setting: trials.measured[setting] for setting in finalists})
    output.write(text_of(_table(trials.measured, finalists, lengths)) + "\n".join(said) + "\n")
    if save_result is not None:
        _save(save_result, config, trials.measured, said)
    return 0


def _table(measured: dict[Setting, dict[int, Spread]], finalists: Sequence[Setting], lengths: Sequence[int]) -> Any:
    from actorpp.analysis.tuning import relative
    from actorpp.cli.tables import table

    made = table(
        "Time to first token, ms: median (lowest-highest)",
        "chunks",
        *(f"ISL {length}" for length in lengths),
        "to best fixed",
    )
    for setting, ttfts in measured.items():
        name = ("* " if setting in finalists else "  ") + setting.name
        cells = [
            f"{1e3 * t.median:.0f} ({1e3 * t.lowest:.0f}-{1e3 * t.highest:.0f})"
            for t in (ttfts[length] for length in lengths)
        ]
        made.add_row(name, *cells, f"{relative(measured, setting, finalists[0]):.3f}")
    made.caption = "* measured again, in turn; what is said below rests on these runs alone"
    made.caption_justify = "left"
    return made


def _save(file: Path, config: EngineConfig, measured: dict[Setting, dict[int, Spread]], said: Sequence[str]) -> None:
    import json

    import msgspec

    from actorpp.cli.machine import machine
    from actorpp.errors import OutputError

    results = [
        {"flags": setting.flags, "ttft_s": {str(n): msgspec.to_builtins(t) for n, t in ttfts.items()}}
        for setting, ttfts in measured.items()
    ]
    result = {"machine": machine(), "engine": config.model_dump(mode="json"), "results": results, "verdict": said}
    try:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"--save-result {file}: {error.strerror}") from None
