"""``python -m tests.faults.soak --minutes 60``: mixed load with faults for so long; what a process holds must not grow.

Every second a round begins: requests whose answers are known (``harness``), and beside them clients that wait, stream,
abort, are too late, talk rubbish or vanish (``clients``). When all have gone nothing may be in use. Every so many
seconds a round has a fault: one of the stages but the last is killed, the first of them in the first part of the time,
the next in the next. So driver and last stage live throughout, and go through every recovery; and every other stage has
a long life too, through the recoveries from another one's deaths. Of all stages every incarnation is watched.

Then come ``--idle-rounds``: a client asks for a ping, the statistics and a plan, which no stage hears of; then the
smallest request, of one token in and one out, takes the pipeline from empty to empty.

Resident memory is printed with its slope within the lives of processes (one straight line for each, all of one slope):
of the first half and of the second half of each life, without its first minutes, in which allocators and caches fill,
and without lives that are too short for it. What settles is steep in the first half and flat in the second; what leaks
is as steep in both. Driver means this process: engine, socket, and the clients too. It treats its memory as a server
does: it gives large blocks back, and Python's collector passes over what was there before the first round. Ctrl-C ends
it with the figures so far.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from array import array
from bisect import bisect_left, bisect_right
from contextlib import suppress
from statistics import fmean

import psutil

from actorpp.cli.memory import give_large_blocks_back, set_apart_what_stays
from actorpp.config import EngineConfig
from actorpp.logs import configure_logging
from tests.faults.clients import Clients, clients_of
from tests.faults.harness import Harness, opened
from tests.faults.trap import Strike

SAMPLES = 720  # about so many of each process, in the whole time: keeping them must not be what grows
SETTLED_S = 120.0
SETTLED_SHARE = 0.2
"""Of a process's life so many seconds, and at most this share of the whole run, are left out."""
LONG = 3
"""Lives count from so many times as long on."""

SAVE = """
import sys
from pathlib import Path
from tests.exactness.tiny import save_llama
save_llama(Path(sys.argv[1]), tied=True, eos_token_id=2)
"""  # in a process of its own: the driver is watched without torch

BESIDE = 8  # clients in a round, beside the requests whose answers are known


class Life:
    """One process over time, or over rounds."""

    def __init__(self) -> None:
        self.at = array("d")
        self.resident = array("q")
        self.descriptors = array("i")
        self.threads = array("i")
        self.recoveries = array("i")

    def sample(self, pid: int, at: float, recoveries: int) -> None:
        process = psutil.Process(pid)
        with process.oneshot():
            self.at.append(at)
            self.resident.append(process.memory_info().rss)
            self.descriptors.append(process.num_fds())
            self.threads.append(process.num_threads())
            self.recoveries.append(recoveries)

    @property
    def length(self) -> float:
        return self.at[-1] - self.at[0]

    def halves(self, settled: float) -> tuple[Life, Life] | None:
        """What follows upon its beginning, if that is enough."""
        since, until = self.at[0] + settled, self.at[-1]
        middle = (since + until) / 2
        halves = self._between(since, middle), self._between(middle, until)
        return halves if self.length >= LONG * settled and all(len(half.at) > 1 for half in halves) else None

    def _between(self, since: float, until: float) -> Life:
        seen = slice(bisect_left(self.at, since), bisect_right(self.at, until))
        part = Life()
        for name, values in vars(self).items():
            setattr(part, name, values[seen])
        return part


def common_slope(lives: list[Life]) -> float:
    """Of resident memory, by least squares: a level of its own for each life, one slope for all. Bytes by ``at``."""
    above = below = 0.0
    for life in lives:
        x, y = fmean(life.at), fmean(life.resident)
        above += sum((at - x) * (held - y) for at, held in zip(life.at, life.resident, strict=True))
        below += sum((at - x) ** 2 for at in life.at)
    return above / below if below else 0.0


def for_each_recovery(lives: list[Life]) -> float | None:
    """What they grew by at their common slope, for each recovery that they went through, in bytes."""
    recoveries = sum(life.recoveries[-1] - life.recoveries[0] for life in lives)
    return common_slope(lives) * sum(life.length for life in lives) / recoveries if recoveries else None


class Series:
    """What lives under each name: one process after the other. ``unit`` is worth ``per_unit`` of what is counted."""

    def __init__(self, unit: str, per_unit: float) -> None:
        self._unit = unit
        self._per_unit = per_unit
        self._lives: dict[str, dict[int, Life]] = {}

    def sample(self, harness: Harness, at: float) -> None:
        """Of the driver and every stage."""
        recoveries = sum(map(len, harness.tally.recoveries.values()))
        alive = {"driver": os.getpid()}
        alive |= {f"stage {index}": stage.pid for index, stage in enumerate(harness.engine.stats().stages)}
        for name, pid in alive.items():
            with suppress(psutil.NoSuchProcess):  # it has just ended
                self._lives.setdefault(name, {}).setdefault(pid, Life()).sample(pid, at, recoveries)

    def table(self, settled: float) -> str:
        """In Markdown; ``settled`` of each life is left out."""
        names = ("process", "lives", "of these long enough", "resident: settled, half-way, last", "recoveries")
        names += (f"KiB/{self._unit}: first half, second half", "KiB for each recovery: first, second")
        rows = [(*names, "descriptors", "threads"), ("---",) * (len(names) + 2)]
        for name, by_pid in self._lives.items():
            halves = [each for life in by_pid.values() if (each := life.halves(settled)) is not None]
            row = (name, str(len(by_pid)), str(len(halves)))
            if not halves:
                rows.append((*row, *[""] * (len(rows[0]) - len(row))))
                continue
            first, second = ([life[half] for life in halves] for half in (0, 1))
            resident = (first[0].resident[0], second[-1].resident[0], second[-1].resident[-1])
            slopes = (f"{self._per_unit * common_slope(half) / 2**10:+.1f}" for half in (first, second))
            costs = (for_each_recovery(half) for half in (first, second))
            rows.append(
                (
                    *row,
                    ", ".join(f"{held / 2**20:.1f}" for held in resident) + " MiB",
                    str(sum(life.recoveries[-1] - life.recoveries[0] for life in first + second)),
                    ", ".join(slopes),
                    ", ".join("-" if cost is None else f"{cost / 2**10:+.1f}" for cost in costs),
                    spread([count for life in first + second for count in life.descriptors]),
                    spread([count for life in first + second for count in life.threads]),
                )
            )
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def spread(counts: list[int]) -> str:
    """First and last, and between which bounds all were."""
    return f"{counts[0]} → {counts[-1]} ({min(counts)}-{max(counts)})"


def victim(passed: float, stages: int) -> int:
    """The stage that is killed when so much of the time has passed, from 0 to below 1."""
    return int(passed * (stages - 1))


def tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


async def load(harness: Harness, clients: Clients, options: argparse.Namespace, series: Series) -> None:
    """Rounds until the time is over, a second each unless it takes longer."""
    generator = random.Random(options.seed)
    whole = 60 * options.minutes
    clock = time.monotonic
    began = struck_at = sampled_at = told_at = clock()
    number = 0
    while (now := clock()) < began + whole and not (harness.tally.failed or clients.wrong):
        strikes = []
        if options.kill_every and options.stages > 1 and now >= struck_at + options.kill_every:
            struck_at = now
            point = generator.choice(["prefill", "decode", "sending", "loading"])
            stage, visit = victim((now - began) / whole, options.stages), generator.randint(1, 4)
            strikes = [Strike(stage, "prefill", visit=visit), Strike(stage, point)]
            strikes = strikes if point == "loading" else [Strike(stage, point, visit=visit)]
        await harness.play(number, strikes, beside=lambda: clients.some(BESIDE))
        number += 1
        if clock() >= sampled_at + whole / SAMPLES:
            sampled_at = clock()
            series.sample(harness, sampled_at - began)
        if clock() >= told_at + 10:
            told_at = clock()
            tell(f"{told_at - began:.0f} s of {whole:.0f}: {number} rounds, {harness.tally.restarts} restarts")
        await asyncio.sleep(max(0.0, now + 1 - clock()))


async def idle(harness: Harness, clients: Clients, rounds: int, series: Series) -> None:
    """From empty to empty, with nothing in between."""
    for number in range(rounds):
        for op, body in (("ping", {}), ("stats", {}), ("plan", {"prompt_tokens": 100})):
            await clients.ask(op, **body)
        await clients.ask("generate", prompt_tokens=[5], max_tokens=1)
        if number % max(1, rounds // 100) == 0:
            series.sample(harness, number)
        if number % 1000 == 999:
            tell(f"{number + 1} idle rounds of {rounds}")


async def main(options: argparse.Namespace, model: str) -> int:
    config = EngineConfig(
        model=model,
        stages=options.stages,
        dtype="float32",
        kv_tokens=8192,
        threads_per_stage=1,
        chunked_prefill_size=32,
        max_restarts=1_000_000,
        watchdog_timeout=60.0,
    )
    tell(f"seed {options.seed}")
    over_time, over_rounds = Series("min", 60), Series("1000 rounds", 1000)
    async with (
        opened(config, options.seed, longest=100) as harness,
        clients_of(harness.engine, options.seed, longest=600) as clients,
    ):
        set_apart_what_stays()
        try:
            await load(harness, clients, options, over_time)
            if not (harness.tally.failed or clients.wrong):
                await idle(harness, clients, options.idle_rounds, over_rounds)
        finally:  # at Ctrl-C too
            print(f"mixed load\n\n{over_time.table(min(SETTLED_S, SETTLED_SHARE * 60 * options.minutes))}\n")
            print(f"idle rounds\n\n{over_rounds.table(SETTLED_SHARE * options.idle_rounds)}\n")
            print(f"{harness.tally.summary()}\n\n{clients.summary()}", flush=True)
    return int(harness.tally.failed or bool(clients.wrong))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--idle-rounds", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--kill-every", type=float, default=120.0, metavar="SECONDS", help="0 is never")
    chosen = parser.parse_args()
    configure_logging("error")
    give_large_blocks_back()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", SAVE, folder], check=True)
        try:
            sys.exit(asyncio.run(main(chosen, folder)))
        except KeyboardInterrupt:
            sys.exit(130)
