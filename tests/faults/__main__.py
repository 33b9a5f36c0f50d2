"""``python -m tests.faults --minutes 30``: the engine under faults for so long, and a table of what it saw.

The stages are processes of a tiny model; ``--model default`` takes the default model, ``--inproc`` stages on this loop,
of which many more can die in the same time. The seed is printed; with it the same schedule comes again.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

from actorpp.config import EngineConfig
from actorpp.logs import configure_logging
from tests.exactness.tiny import save_llama
from tests.faults.harness import opened, schedule


async def main(options: argparse.Namespace, model: str | None) -> int:
    config = EngineConfig(
        model=model,
        stages=options.stages,
        transport="inproc" if options.inproc else "process",
        dtype="float32",
        kv_tokens=8192,
        threads_per_stage=1,
        chunked_prefill_size=32,
        max_restarts=1_000_000,
        warm_spares=options.warm_spares,
        watchdog_timeout=options.watchdog,
    )
    generator = random.Random(options.seed)
    print(
        f"seed {options.seed}, {options.stages} stages, {'on the loop' if options.inproc else 'processes'}", flush=True
    )
    async with opened(config, options.seed, longest=100) as harness:
        number, end = 0, time.monotonic() + 60 * options.minutes
        while time.monotonic() < end and not harness.tally.failed:
            strikes = schedule(generator, options.stages, processes=not options.inproc)
            await harness.play(number, strikes)
            number += 1
            if number % 10 == 0:
                print(f"{number} rounds, {harness.tally.restarts} restarts", file=sys.stderr, flush=True)
    print(harness.tally.summary())
    if harness.tally.failed:
        print(f"FAILED with --seed {options.seed}")
    return int(harness.tally.failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--model", choices=["tiny", "default"], default="tiny")
    parser.add_argument("--warm-spares", type=int, default=0)
    parser.add_argument("--watchdog", type=float, default=20.0)
    parser.add_argument("--inproc", action="store_true")
    chosen = parser.parse_args()
    configure_logging("error")
    with tempfile.TemporaryDirectory() as folder:
        path = None if chosen.model == "default" else str(save_llama(Path(folder), tied=True, eos_token_id=2))
        sys.exit(asyncio.run(main(chosen, path)))
