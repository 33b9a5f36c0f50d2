"""Step plans for short prompts that share steps: what a covering array and the full product vary, and how one is run.

The order of steps is decided here, as the coordinator would; stages are chained by hand. ``slots`` stands for depth:
requests are dealt to that many slots, and steps take the slots in turn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import torch

from actorpp.stages.messages import FromOutput, Segment
from tests.exactness.chain import Chain, recorded_logits
from tests.exactness.families import SHORT_NEW_TOKENS, Held
from tests.exactness.policy import TINY, TokenTally, check_logits

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "partition": ((5,), (2, 3), (1, 3, 1), (1, 1, 1, 2), (2, 1, 1, 1)),
    "chunk": (1, 5, 16, 29, 64),
    "page_size": (4, 16, 64),
    "slots": (1, 2, 5),
    "requests": (1, 2, 4),
    "interleaved": (False, True),
}


@dataclass(frozen=True)
class Plan:
    """One combination.

    Attributes:
        partition: Layers of each stage.
        chunk: Tokens of a prefill chunk.
        page_size: Tokens of a page.
        slots: Slots that requests are dealt to.
        requests: How many of the short prompts run at once.
        interleaved: Whether the requests' pages lie in turn, last first, instead of one request after another.
    """

    partition: tuple[int, ...]
    chunk: int
    page_size: int
    slots: int
    requests: int
    interleaved: bool


def every_plan() -> Iterator[Plan]:
    """The full product."""
    return (Plan(*values) for values in product(*DIMENSIONS.values()))


def covering_plans(seed: int = 0) -> list[Plan]:
    """A seeded array in which each pair of values of two dimensions occurs at least once, built greedily."""
    rng = random.Random(seed)
    names = list(DIMENSIONS)
    missing = {
        frozenset({(a, x), (b, y)}) for a, b in combinations(names, 2) for x in DIMENSIONS[a] for y in DIMENSIONS[b]
    }
    plans = []
    while missing:
        pair = dict(min(missing, key=repr_of_pair))
        tries = [{name: pair.get(name, rng.choice(DIMENSIONS[name])) for name in names} for _ in range(60)]
        best = max(tries, key=lambda values: len(missing & pairs(values)))
        missing -= pairs(best)
        plans.append(Plan(**best))
    return plans


def pairs(values: dict[str, Any]) -> set[frozenset[tuple[str, Any]]]:
    """Every two of a plan's values, with their names."""
    return {frozenset(two) for two in combinations(values.items(), 2)}


def repr_of_pair(pair: frozenset[tuple[str, Any]]) -> list[str]:
    """An order of pairs that is the same in every process."""
    return sorted(map(repr, pair))


def place_pages(counts: list[int], *, interleaved: bool) -> list[list[int]]:
    """Page ids for requests of so many pages each; page 0 is nobody's."""
    if not interleaved:
        free = iter(range(1, 1 + sum(counts)))
        return [[next(free) for _ in range(count)] for count in counts]
    placed: list[list[int]] = [[] for _ in counts]
    free = iter(range(sum(counts), 0, -1))
    for turn in range(max(counts)):
        for pages, count in zip(placed, counts, strict=True):
            if turn < count:
                pages.append(next(free))
    return placed


def check_plan(chain: Chain, plan: Plan, held: Held, tally: TokenTally) -> None:
    """Run the plan and hold every sampled row and token to the oracle. Raises AssertionError."""
    asked = held.short[: plan.requests]
    lengths = [len(ids) for ids, _ in asked]
    counts = [-(-(length + SHORT_NEW_TOKENS) // plan.page_size) for length in lengths]
    chain.restart(plan.page_size, 1 + sum(counts))
    for rid, pages in enumerate(place_pages(counts, interleaved=plan.interleaved)):
        chain.admit(rid, asked[rid][0], pages)
    done, tokens = [0] * len(asked), [[] for _ in asked]  # type: ignore[var-annotated]
    source: dict[int, FromOutput] = {}
    where: list[tuple[int, int]] = []
    slots = [range(slot, len(asked), plan.slots) for slot in range(min(plan.slots, len(asked)))]
    with recorded_logits() as rows:
        while any(len(picked) < SHORT_NEW_TOKENS for picked in tokens):
            for slot in slots:
                segments = []
                for rid in slot:
                    left = lengths[rid] - done[rid]
                    if left > 0:
                        segments.append(Segment(rid, done[rid], min(plan.chunk, left), None, True))
                    elif len(tokens[rid]) < SHORT_NEW_TOKENS:
                        segments.append(Segment(rid, done[rid], 1, source[rid], True))
                if not segments:
                    continue
                output = chain.step(*segments)
                for index, segment in enumerate(segments):
                    rid = segment.rid
                    done[rid] += segment.length
                    where.append((rid, done[rid]))
                    if done[rid] >= lengths[rid]:
                        tokens[rid].append(output.ids[index])
                        source[rid] = FromOutput(chain.seq, index)
    theirs = []
    for rid, end in where:
        answer, beyond = asked[rid][1], end - lengths[rid]
        theirs.append(answer.at_positions[end - 1] if beyond < 0 else answer.logits[beyond])
    check_logits(torch.stack(rows), torch.stack(theirs), TINY)
    for rid, (_, answer) in enumerate(asked):
        tally.check(
            f"{held.name}, {plan}", tokens[rid], answer.tokens[:SHORT_NEW_TOKENS], answer.logits[:SHORT_NEW_TOKENS]
        )


class Chains:
    """The chains of one family by partition: models are loaded once and serve every plan."""

    def __init__(self, held: Held) -> None:
        self.held = held
        self._made: dict[tuple[int, ...], Chain] = {}

    def __getitem__(self, layers: tuple[int, ...]) -> Chain:
        if layers not in self._made:
            self._made[layers] = Chain(self.held.path, layers, context_length=self.held.family.context_length)
        return self._made[layers]
