"""``actorpp profile``: what steps cost each stage, measured, fitted, printed, and kept for the engine's next start."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from actorpp.cli import options as o

if TYPE_CHECKING:
    from actorpp.cli.display import Output
    from actorpp.config import EngineConfig
    from actorpp.coordinator.chunking.fit import StageFit, StageSample

CHANGES_NOTHING = (
    "seed",
    "chunk_policy",
    "enable_dynamic_chunking",
    "dynamic_chunking_smooth_factor",
)
"""Here chunks are not cut by the engine's policy, and the numbers that are computed with do not matter."""


@partial(o.with_engine_flags, without=CHANGES_NOTHING)
def profile(*, engine: dict[str, Any]) -> None:
    """Measure what steps cost each stage, print the fit, and save it where the engine finds it at its next start."""
    from actorpp.cli import loop
    from actorpp.cli.display import reserved_stdout
    from actorpp.logs import configure_logging

    # Environment and file may name a policy; one that follows a profile would have it taken at the start already.
    no_policy = {"chunk_policy": "planned", "enable_dynamic_chunking": False, "dynamic_chunking_smooth_factor": None}
    config = o.load_config(engine).model_copy(update=no_policy)
    configure_logging(config.log_level)
    with reserved_stdout() as output:
        code = loop.run(lambda: _profile(config, output), grace=config.shutdown_timeout + 1.5)
    raise typer.Exit(code)


async def _profile(config: EngineConfig, output: Output) -> int:
    from actorpp.engine import Engine
    from actorpp.errors import OutputError, ProfilingError
    from actorpp.profiling import keep_profile, measure_profile
    from actorpp.progress import ProgressDisplay
    from actorpp.transport.sockets import close_context

    display = ProgressDisplay()
    try:
        async with Engine(config, on_startup=display.startup) as engine:
            found = await measure_profile(
                engine, on_progress=lambda done, total: display.show("profile", done, total, "tokens")
            )
    finally:
        display.close()
        close_context()
    output.write(profile_text(found.samples, found.fit()))
    try:
        file = keep_profile(engine, found)
    except OSError as error:
        raise OutputError(f"cannot save the profile: {error.strerror}") from None
    except ProfilingError as error:
        raise ProfilingError(f"the profile is not saved: {error}") from None
    output.write(f"saved to {file}\n")
    return 0


def profile_text(measured: Sequence[StageSample], fits: Sequence[StageFit]) -> str:
    """The fit of every stage and how far it is from each sample, as tables."""
    from actorpp.cli.tables import table, text_of

    costs = table(
        "t(L, x) = c + gamma L + b x + a (2 L x + x^2), and head where a token is sampled",
        "stage", "c, ms", "gamma, us", "b, us", "a, ns", "head, ms", "R^2", "largest residual",
    )  # fmt: skip
    for stage, fit in enumerate(fits):
        cost = fit.cost
        seconds = [sample.seconds[stage] for sample in measured]
        worst = max(abs(off) / took for off, took in zip(fit.residuals, seconds, strict=True))
        costs.add_row(
            str(stage),
            f"{1e3 * cost.c:.3f}",
            f"{1e6 * cost.gamma:.4f}",
            f"{1e6 * cost.b:.2f}",
            f"{1e9 * cost.a:.3f}",
            f"{1e3 * cost.head:.3f}",
            f"{fit.r2:.5f}",
            f"{worst:.1%}",
        )
    samples = table(
        "Measured, ms (and what the fit is off by)",
        "history L + chunk x",
        *(f"stage {stage}" for stage in range(len(fits))),
    )
    for index, sample in enumerate(measured):
        cells = [
            f"{1e3 * took:.1f} ({fit.residuals[index] / took:+.1%})"
            for took, fit in zip(sample.seconds, fits, strict=True)
        ]
        samples.add_row(f"{sample.history} + {sample.tokens}{' sampled' if sample.samples else ''}", *cells)
    return text_of(costs) + text_of(samples)
