"""Chunk plans in virtual time: ``planned`` beside the best fixed size and SGLang's dynamic chunking.

    python -m tests.support.plans

computes the whole grid and prints the table of docs/chunking.md; ``tests/unit/pipeline/test_chunk_plans.py`` holds
those of its cases that ``covering`` chooses, and the recurrence against the shipped coordinator.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import inf

from actorpp.coordinator.chunking.cost import CostModel, StageCost
from actorpp.coordinator.chunking.flowshop import in_window, makespan
from actorpp.coordinator.chunking.learner import CostLearner
from actorpp.coordinator.chunking.planned import PlannedChunks
from actorpp.coordinator.chunking.policy import ChunkPolicy, ChunkRequest, PolicyContext
from actorpp.coordinator.chunking.sglang import Quadratic, SglangChunks

TOKEN = 1e-4  # seconds of one token on one stage
KINDS = {  # a step's fixed cost in tokens, and the history at which attention costs as much as the linear layers
    "small": StageCost(c=64 * TOKEN, gamma=0.0, b=TOKEN, a=TOKEN / 3000),
    "large": StageCost(c=400 * TOKEN, gamma=0.02 * TOKEN, b=TOKEN, a=TOKEN / 30000),
}
SHAPES = ("equal", "slow first", "slow middle", "slow last", "mixed")
PUBLISHED = ((12288, 0.65), (18432, 0.8))  # initial size and smoothing factor
LARGEST = 1 << 15


@dataclass(frozen=True)
class Case:
    """One pipeline and its prompts, all of the same length and queued at once."""

    kind: str
    stages: int
    shape: str
    window: int
    tokens: int
    prompts: int = 1

    @property
    def costs(self) -> CostModel:
        speeds = [1.0] * self.stages
        slow = {"slow first": 0, "slow middle": self.stages // 2, "slow last": -1}.get(self.shape)
        if slow is not None:
            speeds[slow] = 1.4
        if self.shape == "mixed":
            speeds = [1.0 + 0.15 * (3 * stage % 5) for stage in range(self.stages)]
        return CostModel(tuple(KINDS[self.kind].scaled(speed) for speed in speeds))

    def seconds(self, plans: Sequence[Sequence[int]]) -> float:
        """Until the last prompt is computed, by the recurrence."""
        times = [row for chunks in plans for row in self.costs.chunk_times(chunks)]
        return makespan(times, in_window(len(times), self.window))

    def context(self) -> PolicyContext:
        return PolicyContext(
            stages=self.stages,
            window=self.window,
            page_size=16,
            context_length=1 << 40,
            max_chunk=LARGEST,
            chunk_size=LARGEST,
            smooth_factor=0.75,
            costs=CostLearner(self.costs),
        )

    def planned(self) -> float:
        policy, plans = PlannedChunks(self.context()), list[list[int]]()
        for rid in range(1, self.prompts + 1):
            ahead = sum(map(len, plans))
            plans.append(cut(policy, self.tokens, rid, self.prompts - rid, ahead=ahead, window=self.window))
        return self.seconds(plans)

    def fixed(self) -> tuple[float, int]:
        """Seconds with the best fixed size, and that: every multiple of 64, further apart as they grow."""
        sizes = [*range(64, 2048, 64), *range(2048, 8192, 256), *range(8192, LARGEST + 1, 1024)]
        bounds = sorted((self.at_least(size), size) for size in sizes if size < self.tokens + 64)
        best = inf, 0
        for bound, size in bounds:
            if bound >= best[0]:
                break
            best = min(best, (self.seconds([pieces(self.tokens, size)] * self.prompts), size))
        return best

    def at_least(self, size: int) -> float:
        """Seconds that chunks of one size take at least: a stage's own, and its first and last chunk's in others."""
        chunks = pieces(self.tokens, size)
        n, costs = len(chunks), self.costs
        first, last = costs.times(0, chunks[0]), costs.times(self.tokens - chunks[-1], chunks[-1])
        bounds = []
        for index, stage in enumerate(costs.stages):
            own = stage.time(0, self.tokens) + (n - 1) * stage.c + stage.gamma * size * n * (n - 1) / 2
            bounds.append(sum(first[:index]) + self.prompts * own + sum(last[index + 1 :]))
        return max(bounds)

    def sglang(self, size: int, factor: float) -> float:
        slowest = max(self.costs.stages, key=lambda stage: stage.b)
        policy = SglangChunks(size, Quadratic(slowest.a, slowest.b), factor, 16, 1 << 40, LARGEST)
        return self.seconds([cut(policy, self.tokens, 1, 0)] * self.prompts)


def cut(policy: ChunkPolicy, tokens: int, rid: int, queued: int, *, ahead: int = 0, window: int = 1) -> list[int]:
    chunks: list[int] = []
    done = 0
    while done < tokens:
        in_flight = min(window - 1, ahead + len(chunks))
        request = ChunkRequest(rid, tokens, queued, queued * tokens, steps_ahead=in_flight)
        chunks.append(policy.next_chunk(request, done, tokens - done, LARGEST))
        done += chunks[-1]
    return chunks


def pieces(total: int, size: int) -> list[int]:
    return [size] * (total // size) + ([total % size] if total % size else [])


def grid() -> Iterator[Case]:
    for kind, stages, tokens in product(KINDS, (2, 4, 8), (8192, 32768, 131072, 1 << 20)):
        for shape, window in product(SHAPES, (stages, stages + 2, 3 * stages)):
            for prompts in (1, 8):
                yield Case(kind, stages, shape, window, tokens, prompts)


def covering(cases: Iterable[Case], ways: int) -> list[Case]:
    """Some of these cases: any values of so many dimensions that meet in all of them meet in one that is chosen.

    Each is the one that adds most, the smallest of those.
    """
    covers = {}
    for case in cases:
        room = "3P" if case.window == 3 * case.stages else f"P + {case.window - case.stages}"
        values = (case.kind, case.stages, case.shape, room, case.tokens, case.prompts)
        covers[case] = set(combinations(enumerate(values), ways))
    missing = set().union(*covers.values())
    chosen: list[Case] = []
    while missing:
        best = max(covers, key=lambda case: (len(covers[case] & missing), -case.tokens * case.prompts * case.stages))
        missing -= covers[best]
        chosen.append(best)
    return chosen


@dataclass
class Row:
    """Ratios of ``planned``'s time to others', over the cases of one line of the table."""

    fixed: list[float]
    published: list[float]
    tuned: list[float]


def compare(case: Case) -> tuple[float, float, float]:
    """``planned``'s time over that of the best fixed size, of SGLang as published, and as its guide has it tuned."""
    planned = case.planned()
    fixed, size = case.fixed()
    published = min(case.sglang(size, factor) for size, factor in PUBLISHED)
    tuned = min(case.sglang(times * size, factor) for times in (2, 3) for factor in (0.6, 0.75, 0.85))
    return planned / fixed, planned / published, planned / tuned


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows: dict[tuple[int, int, int], Row] = {}
    for case in grid():
        row = rows.setdefault((case.stages, case.tokens, case.prompts), Row([], [], []))
        for values, ratio in zip((row.fixed, row.published, row.tuned), compare(case), strict=True):
            values.append(ratio)
        if row.fixed[-1] > 1.01:
            print(f"more than 1% worse: {row.fixed[-1]:.4f} {case}")
    print("| stages | prompt | prompts | / best fixed | / published | / tuned |")
    print("|---|---|---|---|---|---|")
    for (stages, tokens, prompts), row in sorted(rows.items()):
        cells = " | ".join(f"{min(v):.3f} to {max(v):.3f}" for v in (row.fixed, row.published, row.tuned))
        length = "1M" if tokens == 1 << 20 else f"{tokens >> 10}K"
        print(f"| {stages} | {length} | {prompts} | {cells} |")


if __name__ == "__main__":
    main()
