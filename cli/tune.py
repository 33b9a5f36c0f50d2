"""``actorpp tune``: the chunking with the smallest time to first token, found by measuring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actorpp.cli import options as o
from actorpp.cli.bench import DEFAULT_SEED, WORK, Iterations, SaveResult, Warmup, comma_list, writable

if TYPE_CHECKING:
    from actorpp.analysis.spread import Spread
    from actorpp.analysis.tuning import Measured, Setting
    from actorpp.cli.display import Output
    from actorpp.config import EngineConfig
    from actorpp.coordinator.chunking.policy import ChunkPolicy
    from actorpp.coordinator.chunking.profile import Profile
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
    Takes and saves a profile, which dynamic chunking computes its sizes from, if there is none.
    """
    from actorpp.cli import loop
    from actorpp.cli.display import reserved_stdout
    from actorpp.config import LARGEST_CHUNK, flag_of
    from actorpp.errors import ConfigError
    from actorpp.logs import configure_logging

    config = o.load_config(engine, seed=DEFAULT_SEED)
    for name in CHOSEN_HERE:
        if name in config.model_fields_set:
            raise ConfigError(f"{flag_of(name)} is what tune chooses: leave it out", param=name)
    lengths, sizes = comma_list("--input-len", input_len), comma_list("--chunk-sizes", chunk_sizes)
    if config.max_num_batched_tokens is None:  # any chunk that is tried must have room in a step
        largest = max(*lengths, LARGEST_CHUNK[config.device_type])
        config = config.model_copy(update={"max_num_batched_tokens": largest + config.max_running_requests})
    writable("--save-result", save_result)
    configure_logging(config.log_level)
    with reserved_stdout() as output:
        code = loop.run(
            lambda: _tune(config, lengths, sizes, num_iters_warmup, num_iters, save_result, output),
            grace=config.shutdown_timeout + 1.5,
        )
    raise typer.Exit(code)


class Trials:
    """Times to first token on one engine, setting by setting, in turn.

    Attributes:
        steps: What was measured, by step. Times of different steps are not to be compared.
        chunks: The chunks of each setting's last prompt of each length.
    """

    def __init__(self, engine: Engine, lengths: Sequence[int], iterations: int, display: ProgressDisplay) -> None:
        self.steps: dict[str, dict[Setting, dict[int, Spread]]] = {}
        self.chunks: dict[Setting, dict[int, tuple[int, ...]]] = {}
        self._engine = engine
        self._lengths = lengths
        self._iterations = iterations
        self._display = display
        self._runs = 0

    def distinct(self, settings: Sequence[Setting]) -> list[Setting]:
        """Without those that cut every prompt as one before them does: only chance would tell them apart."""
        found: dict[tuple[tuple[int, ...], ...], Setting] = {}
        for setting in settings:
            policy = self._policy(setting)
            chunks = tuple(self._engine.planning.plan(policy, length).chunks for length in self._lengths)
            found.setdefault(chunks, setting)
        return list(found.values())

    async def run(self, settings: Sequence[Setting], step: str) -> Measured:
        """Measure these settings, each length of each once in every round, every other round in the opposite order."""
        from actorpp.analysis.spread import spread

        found: dict[tuple[Setting, int], list[float]] = {}
        total, done = len(settings) * len(self._lengths) * self._iterations, 0
        for number in range(self._iterations):
            for setting in reversed(settings) if number % 2 else settings:
                for length in self._lengths:
                    self._display.show(step, done, total, "runs")
                    found.setdefault((setting, length), []).append(await self.ttft(setting, length))
                    done += 1
        self._display.show(step, done, total, "runs")
        self.steps[step] = {s: {length: spread(found[s, length]) for length in self._lengths} for s in settings}
        return self.steps[step]

    async def ttft(self, setting: Setting, length: int) -> float:
        """Seconds of one prompt alone."""
        from actorpp.cli.workload import Workload, run_once

        engine = self._engine
        engine.scheduler.policy = self._policy(setting)
        self._runs += 1
        iteration, _ = await run_once(engine, Workload(length, 1, 1, 1), f"{engine.config.seed}/{self._runs}")
        metrics = iteration.requests[0]
        self.chunks.setdefault(setting, {})[length] = metrics.chunks
        return metrics.ttft_s or 0.0

    def _policy(self, setting: Setting) -> ChunkPolicy:
        return self._engine.planning.policy(
            setting.policy, chunk_size=setting.chunk_size, smooth_factor=setting.smooth_factor
        )


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
    from actorpp.errors import ConfigError
    from actorpp.progress import ProgressDisplay
    from actorpp.transport.sockets import close_context

    display = ProgressDisplay()
    said: list[str] = []
    try:
        async with Engine(config, on_startup=display.startup, trace=True) as engine:
            planning, longest = engine.planning, max(lengths)
            if longest >= engine.context_length:
                raise ConfigError(
                    f"--input-len {longest}: the context has {engine.context_length} tokens, one of them is new",
                    param="input_len",
                )
            largest = min(longest, planning.max_chunk)
            if max(sizes) > largest < longest:
                said.append(f"Sizes above {largest} were not tried: the limits of a step that were given forbid them")
            if planning.profile is None:
                await engine.take_profile()
            trials = Trials(engine, lengths, iterations, display)
            planned = Setting("planned")
            for _ in range(warmup):
                for length in lengths:
                    await trials.ttft(planned, length)
            sized = trials.distinct(fixed_settings(sizes, largest))
            fixed = best(await trials.run(sized, "fixed sizes"), "fixed")
            finalists = [planned, fixed]
            if (reason := _why_not_dynamic(planning.profile)) is not None:
                said.append(f"Dynamic chunking was not tried: {reason}")
            else:
                initial = initial_sizes(fixed.chunk_size or largest, max(config.page_size, 64), largest)
                size = best(await trials.run(trials.distinct(initial), "initial sizes"), "sglang").chunk_size
                smoothed = trials.distinct(smooth_factors(size or largest))
                finalists.append(best(await trials.run(smoothed, "smoothing"), "sglang"))
            said += verdict(await trials.run(finalists, "finalists"))
    finally:
        display.close()
        close_context()
    output.write(text_of(_table(trials.steps, lengths)) + "\n".join(said) + "\n")
    if save_result is not None:
        _save(save_result, config, trials, said)
    return 0


def _why_not_dynamic(profile: Profile | None) -> str | None:
    """Why ``sglang`` would keep to its initial size; None: it would not."""
    from actorpp.coordinator.chunking.sglang import fit_first_chunks

    if profile is None:
        return "it needs a profile, and none could be taken"
    try:
        fit_first_chunks(profile.samples)
    except ValueError as error:
        return f"the profile does not do: {error}"
    return None


def _table(steps: Mapping[str, Measured], lengths: Sequence[int]) -> Any:
    from actorpp.analysis.tuning import relative
    from actorpp.cli.tables import table
    from actorpp.progress import PHASES

    made = table(
        "Time to first token, ms: median (lowest-highest)",
        "chunks",
        *(f"ISL {length}" for length in lengths),
        "to the step's best",
    )
    for step, measured in steps.items():
        made.add_section()
        made.add_row(f"{PHASES[step]}:")
        first = next(iter(measured))
        least = min(relative(measured, setting, first) for setting in measured)
        for setting, ttfts in measured.items():
            cells = [
                f"{1e3 * t.median:.0f} ({1e3 * t.lowest:.0f}-{1e3 * t.highest:.0f})"
                for t in (ttfts[length] for length in lengths)
            ]
            made.add_row(f"  {setting.name}", *cells, f"{relative(measured, setting, first) / least:.3f}")
    made.caption = "Settings of a step were measured in turn; the advice rests on the finalists alone"
    made.caption_justify = "left"
    return made


def _save(file: Path, config: EngineConfig, trials: Trials, said: Sequence[str]) -> None:
    import json

    import msgspec

    from actorpp.cli.machine import machine
    from actorpp.errors import OutputError

    results = [
        {
            "step": step,
            "flags": setting.flags,
            "ttft_s": {str(n): msgspec.to_builtins(t) for n, t in ttfts.items()},
            "chunks": {str(n): trials.chunks[setting][n] for n in ttfts},
        }
        for step, measured in trials.steps.items()
        for setting, ttfts in measured.items()
    ]
    result = {"machine": machine(), "engine": config.model_dump(mode="json"), "results": results, "verdict": said}
    try:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"--save-result {file}: {error.strerror}") from None
