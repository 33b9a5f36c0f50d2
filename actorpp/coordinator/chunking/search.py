"""Finds the chunks of a prompt with the smallest makespan, on a cost model.

For P equal stages the makespan is the sum of all chunk times plus P-1 times the longest one: for n chunks it is
smallest when all take equally long. More chunks fill the pipeline sooner and pay the step's fixed cost c more often;
with W = b S + a S^2 for a prompt of S tokens the best number is n* = sqrt((P-1) W / c), and with R prompts in a queue,
which fill the pipeline once between them, n* = sqrt((P-1) W / (R c)). Real stages differ, the window is finite, chunks
end on page borders: so the numbers near n* are tried with the flow-shop recurrence on the whole model.

Candidates for each n are chunks of equal time on the slowest stage, of equal size, and half-way between; and chunks of
one size but for the last. Those last ones matter where the window has no room to spare: chunks that end on page borders
take equally long but for a page, a step that waits for a longer one before it keeps all stages waiting, and behind a
longer history chunks of one size take ever longer. Then the first and the last chunk are cut or joined with their
neighbours as long as that helps: where one stage is slower than the others, it need not wait for more than a short
first chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import sqrt

from actorpp.coordinator.chunking.cost import CostModel, StageCost
from actorpp.coordinator.chunking.flowshop import in_window, makespan

MAX_CHUNKS = 1280  # with more hardly a thousandth is gained: that is what filling the pipeline takes by then
_BLENDS = (0.5, 0.0)  # from chunks of equal time (1) towards chunks of equal size (0)
_WIDE, _NARROW = (1.5, 1.12), (1.15, 1.05)  # factors to try around a first guess, and around a good one
_FINE = 128  # chunks up to which these are tried, and the ends refined: with more, single chunks matter little
_REFINEMENTS = 12
_RECURRENCE = 10240  # chunks x stages up to which the recurrence is computed in the search


def best_chunks(
    costs: CostModel,
    history: int,
    remaining: int,
    *,
    window: int,
    align: int,
    largest: int,
    queued: float = 0,
    ahead: Sequence[Sequence[float]] = (),
) -> tuple[int, ...]:
    """Sizes of the chunks that compute ``remaining`` tokens behind ``history`` soonest.

    All but the last are multiples of ``align``, and the last is not shorter than it, unless it is the only one or
    ``largest`` forces it.

    Args:
        window: Steps in flight at most.
        largest: Tokens of a chunk at most.
        queued: Work that waits, in multiples of this one's: the time until all has ended counts, not this one's end.
        ahead: Stage times of the steps that are in the pipeline already.
    """
    search = _Search(costs, history, remaining, window, align, largest, queued, ahead)
    best = search.blended(1.0)
    best = min(best, search.even(len(best)), key=search.cost)
    if len(best) <= _FINE:
        best = min((best, *(search.blended(blend, near=len(best)) for blend in _BLENDS)), key=search.cost)
        best = search.refine(best)
    return best


class _Search:
    def __init__(
        self,
        costs: CostModel,
        history: int,
        remaining: int,
        window: int,
        align: int,
        largest: int,
        queued: float,
        ahead: Sequence[Sequence[float]],
    ) -> None:
        self.costs, self.history, self.remaining = costs, history, remaining
        self.window, self.align, self.queued, self.ahead = window, align, queued, list(ahead)
        self.largest = max(largest - largest % align, 1) if largest >= align else largest
        whole = costs.times(history, remaining)
        self.slowest = costs.stages[whole.index(max(whole))]
        self.most = max(1, min(MAX_CHUNKS, remaining // align))
        self.known: dict[tuple[int, ...], float] = {}

    def blended(self, blend: float, near: int | None = None) -> tuple[int, ...]:
        """The best number of chunks for a blend, from the formula's on or from ``near``."""
        start, factors = (self._formula(), _WIDE) if near is None else (near, _NARROW)
        return self._climb(lambda n: self.chunks(n, blend), start, 1, self.most, factors)

    def even(self, near: int) -> tuple[int, ...]:
        """The best chunks of one size, from that of about ``near`` chunks on."""
        sizes = max(1, min(self.largest, self.remaining) // self.align)
        least = min(sizes, -(-self.remaining // (MAX_CHUNKS * self.align)))
        start = min(sizes, max(least, round(self.remaining / near / self.align)))
        return self._climb(lambda units: self._of_size(units * self.align), start, least, sizes, _WIDE)

    def _climb(
        self, make: Callable[[int], tuple[int, ...]], start: int, least: int, most: int, factors: Sequence[float]
    ) -> tuple[int, ...]:
        """The best that is made of ``least`` to ``most``, from ``start`` by ever smaller factors."""
        best, best_cost = start, self.cost(make(start))
        for factor in factors:
            for towards in (factor, 1 / factor):
                while True:
                    n = round(best * towards)
                    n = min(most, max(least, n if n != best else best + (1 if towards > 1 else -1)))
                    cost = self.cost(make(n)) if n != best else best_cost
                    if cost >= best_cost:
                        break
                    best, best_cost = n, cost
        return make(best)

    def _formula(self) -> int:
        stage, stages = self.slowest, len(self.costs.stages)
        work = stage.time(self.history, self.remaining) - stage.c
        fixed = (1 + self.queued) * (stage.c + stage.gamma * (self.history + self.remaining / 2))
        if fixed <= 0:
            return self.most
        return min(self.most, max(1, round(sqrt((stages - 1) * work / fixed))))

    def refine(self, best: tuple[int, ...]) -> tuple[int, ...]:
        """Cut or join chunks at both ends, one change at a time, as long as it helps."""
        for _ in range(_REFINEMENTS):
            better = min(self._changed(best), key=self.cost, default=best)
            if self.cost(better) >= self.cost(best):
                break
            best = better
        return best

    def _changed(self, chunks: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        for end in (0, len(chunks) - 1):
            half = chunks[end] // 2 // self.align * self.align
            if half:
                yield (*chunks[:end], half, chunks[end] - half, *chunks[end + 1 :])
        for start in {0, len(chunks) - 2}:
            if len(chunks) > 1 and chunks[start] + chunks[start + 1] <= self.largest:
                yield (*chunks[:start], chunks[start] + chunks[start + 1], *chunks[start + 2 :])

    def cost(self, chunks: tuple[int, ...]) -> float:
        """Seconds until the prompt is computed, and all that are queued, if they are like it."""
        if chunks not in self.known:
            times = self.costs.chunk_times(chunks, self.history)
            busiest = max(map(sum, zip(*times, strict=True)))
            if len(times) * len(self.costs.stages) <= _RECURRENCE:
                span = self._span((*self.ahead, *times))
                if self.queued:  # the first of them may still make up for a wait of those before it
                    span += self.queued * max(busiest, self._span((*self.ahead, *times, *times)) - span)
            else:  # what it is for proportional stages, and at least what it is for others
                span = busiest + sum(map(max, zip(*times, strict=True))) - max(map(max, times))
                span += self.queued * busiest
            self.known[chunks] = span
        return self.known[chunks]

    def _span(self, times: Sequence[Sequence[float]]) -> float:
        return makespan(times, in_window(len(times), self.window))

    def chunks(self, n: int, blend: float) -> tuple[int, ...]:
        """About ``n`` chunks: between borders of equal time (blend 1) and of equal size (blend 0)."""
        end, borders = self.history + self.remaining, [self.history]
        equal_time = _equal_time(self.slowest, self.history, end, n) if blend else iter(())
        for index in range(1, n):
            at = self.history + self.remaining * index / n
            if blend:
                at = blend * next(equal_time) + (1 - blend) * at
            border = self.history + round((at - self.history) / self.align) * self.align
            if borders[-1] + self.align <= border <= end - self.align:
                borders.append(border)
        borders.append(end)
        return tuple(self._sizes(borders))

    def _of_size(self, size: int) -> tuple[int, ...]:
        """Chunks of ``size``, and what is left; a tail shorter than ``align`` goes with the one before."""
        count, tail = divmod(self.remaining, min(size, self.largest))
        chunks = [min(size, self.largest)] * count
        if tail and tail < self.align and chunks and chunks[-1] + tail <= self.largest:
            chunks[-1] += tail
        elif tail:
            chunks.append(tail)
        return tuple(chunks)

    def _sizes(self, borders: Sequence[int]) -> Iterator[int]:
        for start, stop in pairwise(borders):
            while stop - start > self.largest:
                # In equal parts, so that no splinter is left.
                parts = -(-(stop - start) // self.largest)
                size = -(-(stop - start) // parts)
                size = min(self.largest, -(-size // self.align) * self.align)
                yield size
                start += size
            yield stop - start


def _equal_time(stage: StageCost, history: int, end: int, n: int) -> Iterator[float]:
    """The n - 1 borders inside (history, end) between which a stage's chunks take equally long."""
    a, b, gamma = stage.a, stage.b, stage.gamma

    def work(position: float) -> float:
        return (b + a * position) * position

    start, whole = work(history), work(end) - work(history)
    if whole <= 0:  # nothing but fixed costs is known: equal sizes
        yield from (history + (end - history) * index / n for index in range(1, n))
        return

    def border(done: float) -> float:
        value = start + done
        return value / b if not a else (sqrt(b * b + 4 * a * value) - b) / (2 * a)

    # With gamma = 0 each chunk has whole / n of the work. Else a chunk behind a longer history has less of it; how
    # much less depends on the borders, which barely move: they are computed once without gamma.
    shares = [whole / n] * n
    if gamma:
        reading = [gamma * history, *(gamma * border(whole * index / n) for index in range(1, n))]
        mean = sum(reading) / n
        shares = [max(0.0, whole / n + mean - cost) for cost in reading]
        rescale = whole / sum(shares)
        shares = [share * rescale for share in shares]
    done = 0.0
    for share in shares[:-1]:
        done += share
        yield border(min(done, whole))
