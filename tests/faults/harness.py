"""The real engine under a seeded schedule of faults, every answer held to that of the undisturbed engine.

One round: arm the faults, ask for several answers at once, wait until all are there and the pipeline is ready again,
and look: nothing lost, nothing doubled, nothing different, no page in use. The undisturbed answers are the same
engine's own, from before the first fault; tests/exactness holds those to transformers'.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from actorpp.config import EngineConfig
from actorpp.coordinator import ports
from actorpp.coordinator.lifecycle import CoordinatorLife
from actorpp.coordinator.ports import ProcessPorts
from actorpp.coordinator.scheduler import Scheduler
from actorpp.engine import Engine
from actorpp.errors import ActorppError
from actorpp.runtime import ActorSystem
from actorpp.serving.api import Finished, GenerationParams, Tokens
from actorpp.stages.messages import SamplingParams
from actorpp.transport.sockets import close_context
from tests.faults.trap import Strike, Trap, arm, armed
from tests.support.cli import ROOT

ROUND_S = 300.0
"""Ceiling of one round: an answer that has not come by then is lost."""

Answer = tuple[list[int], int]  # ids, and log-probabilities that came with them


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: tuple[int, ...]
    params: GenerationParams


@dataclass
class Tally:
    """What a run has seen.

    Attributes:
        recoveries: Seconds of each, by whether there was a ready spare for every stage that was started in it.
    """

    faults: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    restarts: int = 0
    recoveries: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})

    @property
    def failed(self) -> bool:
        return bool(self.lost or self.duplicated or self.differing or self.leaks)

    def summary(self) -> str:
        """A table in Markdown, and the figures behind it."""
        lines = ["| fault | count |", "|---|---|", *(f"| {name} | {n} |" for name, n in sorted(self.faults.items()))]
        lines.append(f"| all | {self.faults.total()} |\n")
        counts = f"lost {len(self.lost)}, duplicated {len(self.duplicated)}, differing {len(self.differing)}"
        lines.append(f"stages restarted {self.restarts}; requests {self.requests}: {counts}; leaks {len(self.leaks)}")
        for spared, seconds in self.recoveries.items():
            if seconds:
                median, longest = statistics.median(seconds), max(seconds)
                kind = "with a ready spare" if spared else "without"
                lines.append(f"recovery {kind}: {len(seconds)}, median {median:.2f} s, longest {longest:.2f} s")
        return "\n".join([*lines, *self.lost, *self.duplicated, *self.differing, *self.leaks])


def asks(generator: random.Random, count: int, vocab: int, longest: int) -> list[Ask]:
    """Requests of mixed lengths and sampling."""
    made = []
    for number in range(count):
        sampling = [
            SamplingParams(),
            SamplingParams(temperature=0.9, top_p=0.95),
            SamplingParams(frequency_penalty=0.5, repetition_penalty=1.2, min_tokens=4),
            SamplingParams(temperature=0.7, logprobs=1),
        ][number % 4]
        prompt = tuple(generator.randrange(5, vocab) for _ in range(generator.randint(1, longest)))
        params = GenerationParams(
            max_tokens=generator.randint(6, 14), sampling=sampling, seed=generator.getrandbits(40), ignore_eos=True
        )
        made.append(Ask(prompt, params))
    return made


def schedule(generator: random.Random, stages: int, *, processes: bool) -> list[Strike]:
    """The faults of one round: one, two at once, two in a row, or one and another in the recovery from it.

    Stages on the loop cannot stop or hang, and have no points in their transport.
    """
    victim, visit = generator.randrange(stages), generator.randint(1, 4)
    other = (victim + generator.randrange(1, stages)) % stages
    kinds = ["kill", "kill", "kill", "stop", "hang"] if processes else ["kill"]
    point = generator.choice(["prefill", "decode", *(("sending", "receiving") if processes else ())])
    if (point, victim) in (("sending", stages - 1), ("receiving", 0)):
        point = "prefill"
    if point in ("sending", "receiving") and "hang" in kinds:  # only the compute hangs
        kinds.remove("hang")
    first = Strike(victim, point, generator.choice(kinds), visit)
    match generator.choice(["alone", "alone", "alone", "at once", "loading", "loading", "joining", "again"]):
        case "at once":
            return [first, Strike(other, generator.choice(["prefill", "decode"]), "kill", visit)]
        case "loading":
            return [first, Strike(victim, "loading")]
        case "joining":
            return [first, Strike(other, "joining" if processes else "prefill")]
        case "again":
            return [first, Strike(victim, "prefill", "kill", generator.randint(1, 3))]
    return [first]


async def nothing() -> None:
    """Beside a round."""


class Harness:
    """One engine and what it must answer.

    Args:
        folder: Where faults are armed.
        rounds: Sets of requests, each with its undisturbed answers.
    """

    def __init__(self, engine: Engine, folder: Path, rounds: list[list[Ask]]) -> None:
        self.engine = engine
        self.folder = folder
        self.rounds = rounds
        self.expected: list[list[Answer]] = []
        self.tally = Tally()
        self.changed = asyncio.Event()  # what ``stats`` says
        self.spares: list[bool] = []  # for each stage that was started in this recovery: whether a spare was ready

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear of what happens inside the engine: of steps, recoveries, starts of stages, and the end."""

        def followed(function: Callable[..., Any], then: Callable[[Any], None]) -> Callable[..., Any]:
            def called(*args: Any) -> Any:
                result = function(*args)
                then(result)
                self.changed.set()
                return result

            return called

        with ExitStack() as stack:
            for owner, name, then in (
                (Scheduler, "on_output", lambda result: None),
                (CoordinatorLife, "give_up", lambda result: None),
                (CoordinatorLife, "resume", lambda result: self.recovered()),
                (ProcessPorts, "_turn_spare", lambda child: self.spares.append(child is not None)),
            ):
                stack.enter_context(patch.object(owner, name, followed(getattr(owner, name), then)))
            yield

    def recovered(self) -> None:
        seconds = self.engine.stats().recovery_s
        if seconds is not None:
            self.tally.recoveries[bool(self.spares) and all(self.spares)].append(seconds)
        self.spares.clear()

    async def learn(self) -> None:
        """The undisturbed answers, twice: an engine that contradicts itself cannot be an oracle."""
        for asked in self.rounds:
            first, second = [await self.ask_all(asked) for _ in range(2)]
            if first != second or not all(isinstance(answer, tuple) for answer in first):
                raise AssertionError(f"the undisturbed engine gave {first} and {second}")
            self.expected.append(first)  # type: ignore[arg-type]

    async def play(self, number: int, strikes: list[Strike], beside: Callable[[], Awaitable[None]] = nothing) -> None:
        """One round under these faults, and with what goes on ``beside`` it."""
        which = number % len(self.rounds)
        name, tally = f"round {number}, {strikes}", self.tally
        before = self.engine.stats()
        arm(self.folder, strikes)
        answers, _ = await asyncio.gather(self.ask_all(self.rounds[which]), beside())
        while armed(self.folder):  # a point that this round did not reach: another goes on until it does
            if await self.ask_all(self.rounds[which]) != self.expected[which]:
                tally.differing.append(f"{name}: in a repetition")
                break
        await self.settle()
        for ask, answer, expected in zip(self.rounds[which], answers, self.expected[which], strict=True):
            tally.requests += 1
            if isinstance(answer, Exception):
                tally.lost.append(f"{name}: {answer!r}")
            elif len(answer[0]) > ask.params.max_tokens:
                tally.duplicated.append(f"{name}: {answer} for {expected}")
            elif answer != expected:
                tally.differing.append(f"{name}: {answer} for {expected}")
        after = self.engine.stats()
        if after.pages_used or after.requests_running or after.requests_waiting:
            tally.leaks.append(f"{name}: {after}")
        tally.faults.update(f"{strike.kind} in {strike.point}" for strike in strikes)
        tally.restarts += sum(stage.restarts for stage in after.stages) - sum(s.restarts for s in before.stages)

    async def settle(self) -> None:
        """Until the pipeline is ready and empty."""
        with suppress(TimeoutError):  # what is left is a leak
            async with asyncio.timeout(ROUND_S):
                while not self.settled():
                    self.changed.clear()
                    await self.changed.wait()

    def settled(self) -> bool:
        stats = self.engine.stats()
        busy = stats.steps_in_flight or stats.requests_running or stats.requests_waiting
        return stats.state == "failed" or (stats.state == "ready" and not busy)

    async def ask_all(self, asked: list[Ask]) -> list[Answer | Exception]:
        return list(await asyncio.gather(*map(self.ask, asked)))

    async def ask(self, ask: Ask) -> Answer | Exception:
        ids: list[int] = []
        rows = 0
        try:
            async with asyncio.timeout(ROUND_S):
                async for event in self.engine.submit(ask.prompt, ask.params):
                    match event:
                        case Tokens(new, logprobs):
                            ids += new
                            rows += len(logprobs)
                        case Finished():
                            return ids, rows
        except (ActorppError, TimeoutError) as error:
            return error
        return AssertionError("no final event")


@contextmanager
def trapped_processes(folder: Path) -> Iterator[None]:
    """Stage processes that engines start meanwhile have the points."""
    command = (sys.executable, "-m", "tests.faults.stage")
    environment = {"ACTORPP_FAULTS": str(folder), "PYTHONPATH": str(ROOT)}
    with patch.object(ports, "STAGE_COMMAND", command), patch.dict("os.environ", environment):
        yield


@contextmanager
def trapped_loop(folder: Path, system: ActorSystem) -> Iterator[None]:
    """Stages on this loop have the points; to be killed is all that can happen to their actors."""
    loop = asyncio.get_running_loop()
    killing: set[asyncio.Task[Any]] = set()

    def kill(stage: int) -> None:
        task = loop.create_task(system.kill(system.get(f"node-{stage}")))
        killing.add(task)
        task.add_done_callback(killing.discard)

    trap = Trap(folder, lambda stage, kind: loop.call_soon_threadsafe(kill, stage) and None)
    with ExitStack() as stack:
        trap.set(stack)
        yield


@asynccontextmanager
async def opened(config: EngineConfig, seed: int, *, longest: int, trace: bool = False) -> AsyncIterator[Harness]:
    """An engine with the points, and its undisturbed answers."""
    generator = random.Random(f"requests {seed}")
    with TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        async with ActorSystem("faults") as system:
            process = config.transport == "process"
            with trapped_processes(folder) if process else trapped_loop(folder, system):
                async with Engine(config, system=system, trace=trace) as engine:
                    rounds = [asks(generator, 4, engine.checkpoint.vocab_size, longest) for _ in range(2)]
                    harness = Harness(engine, folder, rounds)
                    with harness.listening():
                        await harness.learn()
                        yield harness
    close_context()
