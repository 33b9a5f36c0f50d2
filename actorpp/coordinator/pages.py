"""The book of KV pages: which page ids are free. The same ids hold on every stage.

It keeps numbers only; the stages own the memory.
"""

from __future__ import annotations

from bisect import bisect_left


class PagePool:
    """Free page ids as sorted runs, so that a request gets few contiguous runs (stages read a run without copying).

    Best fit: the shortest run that holds the whole request, else the longest runs first.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free_pages = num_pages
        self._runs: list[tuple[int, int]] = [(0, num_pages)] if num_pages else []  # (first, length), by first

    @property
    def used_pages(self) -> int:
        return self.num_pages - self.free_pages

    def take(self, count: int) -> tuple[int, ...] | None:
        """``count`` page ids, or None when fewer are free."""
        if count > self.free_pages:
            return None
        taken: list[int] = []
        while len(taken) < count:
            missing = count - len(taken)
            fitting = [run for run in self._runs if run[1] >= missing]
            first, length = min(fitting, key=lambda run: run[1]) if fitting else max(self._runs, key=lambda run: run[1])
            used = min(length, missing)
            taken.extend(range(first, first + used))
            self._runs.remove((first, length))
            if used < length:
                self._insert(first + used, length - used)
        self.free_pages -= count
        return tuple(taken)

    def give_back(self, pages: tuple[int, ...]) -> None:
        """Return pages taken before.

        Raises:
            ValueError: A page that is free already or does not exist.
        """
        at = 0
        while at < len(pages):
            first, length = pages[at], 1
            while at + length < len(pages) and pages[at + length] == first + length:
                length += 1
            if first < 0 or first + length > self.num_pages:
                raise ValueError(f"pages {first} to {first + length - 1} do not all exist")
            self._insert(first, length)
            self.free_pages += length
            at += length

    def _insert(self, first: int, length: int) -> None:
        at = bisect_left(self._runs, (first, 0))
        if at < len(self._runs) and first + length > self._runs[at][0]:
            raise ValueError(f"page {self._runs[at][0]} is free already")
        if at and sum(self._runs[at - 1]) > first:
            raise ValueError(f"page {first} is free already")
        if at < len(self._runs) and first + length == self._runs[at][0]:
            length += self._runs.pop(at)[1]
        if at and sum(self._runs[at - 1]) == first:
            first, before = self._runs.pop(at - 1)
            length += before
            at -= 1
        self._runs.insert(at, (first, length))
