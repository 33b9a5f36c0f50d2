"""Type checkers infer an ask's reply and refuse a wrong tell."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.guide import MYPY

ROOT = Path(__file__).parents[3]

# "R: T" says what reveal_type must show on that line, "E" that the line must be refused; all other lines must pass.
SNIPPET = """
from __future__ import annotations

import msgspec

from actorpp.runtime import Actor, ActorRef, Address, Inbox, OneForOne, ActorSystem, Request, Terminated


class Stats(msgspec.Struct, frozen=True):
    count: int


class GetStats(Request[Stats], frozen=True, tag="get_stats"):
    pass


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    pass


class Score(msgspec.Struct, frozen=True):
    value: int


class Scorer(Actor):
    control = Inbox[GetStats | Reset](capacity=64, priority=0)
    inbox = Inbox[Score](capacity=256)
    steps = Inbox[Score](capacity=8, key=lambda score: score.value)
    deaths = Inbox[Terminated | Reset](capacity=8)

    @control.handler
    def on_control(self, message: GetStats | Reset) -> Stats | None:
        return None

    @inbox.handler
    async def on_score(self, message: Score) -> None:
        self.watch(self.ref, self.deaths.address)
        self.watch(self.ref, self.inbox.address)  # E
        self.after(1.0, self.inbox, Score(1))
        self.become(Scorer.inbox, self.on_score)
        self.become(Scorer.inbox, self.on_control)  # E

    @inbox.handler  # E
    async def on_wrong(self, message: Reset) -> None: ...

    async def run(self) -> None:
        reveal_type(await self.steps.take(3))  # R: Score
        reveal_type(await self.deaths.next())  # R: Terminated | Reset
        reveal_type(await self.offload(int, "3"))  # R: int
        await self.offload(int, [])  # E

    @deaths.handler
    async def on_death(self, message: Terminated | Reset) -> None: ...


async def talk(ref: ActorRef) -> int:
    reveal_type(Scorer.inbox)  # R: Inbox[Score]
    reveal_type(ref[Scorer.inbox])  # R: Address[Score]
    reveal_type(await ref[Scorer.control].ask(GetStats(), timeout=1.0))  # R: Stats
    await ref[Scorer.control].ask(Reset())  # E
    await ref[Scorer.control].tell(Reset())
    await ref[Scorer.control].tell(Score(1))  # E
    ref[Scorer.inbox].tell_nowait(Score(1))
    ref[Scorer.inbox].tell_nowait(GetStats())  # E
    narrow: Address[Reset] = ref[Scorer.control]
    wide: Address[Reset | Score] = ref[Scorer.inbox]  # E
    async with ActorSystem() as system:
        reveal_type(await system.spawn(Scorer, supervision=OneForOne()))  # R: ActorRef
        await system.spawn(lambda: 3)  # E
        return 1
"""


def expected() -> tuple[dict[int, str], set[int]]:
    """The types revealed and the lines refused, by line number."""
    revealed, refused = {}, set()
    for number, line in enumerate(SNIPPET.splitlines(), 1):
        if match := re.search(r"# R: (.+)$", line):
            revealed[number] = match[1]
        if line.endswith("# E"):
            refused.add(number)
    return revealed, refused


def check(command: list[str], tmp_path: Path, error: str, reveal: str) -> None:
    """Run a checker on the snippet and compare. The patterns' groups are the line, and for ``reveal`` the type."""
    (tmp_path / "snippet.py").write_text(SNIPPET)
    environment = {**os.environ, "MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)}
    output = subprocess.run(
        [*command, "snippet.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    ).stdout
    revealed, refused = expected()
    assert {int(line) for line in re.findall(error, output)} == refused, output
    assert {int(line): re.sub(r"\b(\w+\.)+", "", kind) for line, kind in re.findall(reveal, output)} == revealed, output


def test_mypy(tmp_path: Path) -> None:
    check(
        [sys.executable, *MYPY],
        tmp_path,
        r"snippet\.py:(\d+): error",
        r'snippet\.py:(\d+): note: Revealed type is "(.+)"',
    )


def test_pyright(tmp_path: Path) -> None:
    """Not in the test extra, because it downloads node; it runs where it is installed."""
    pyright = shutil.which("pyright", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    if pyright is None:
        pytest.skip("pyright is not installed")
    (tmp_path / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{ROOT}"], "typeCheckingMode": "standard"}}')
    command = [pyright, "--pythonpath", sys.executable]
    check(
        command,
        tmp_path,
        r"snippet\.py:(\d+):\d+ - error",
        r'snippet\.py:(\d+):\d+ - information: Type of .* is "(.+)"',
    )
