"""The page book."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorpp.coordinator.pages import PagePool


def test_pages_are_contiguous_where_they_can_be() -> None:
    pool = PagePool(10)
    a, b, c = pool.take(3), pool.take(4), pool.take(3)
    assert (a, b, c) == ((0, 1, 2), (3, 4, 5, 6), (7, 8, 9))
    assert pool.take(1) is None
    assert b is not None
    assert a is not None
    pool.give_back(b)
    pool.give_back(a)
    assert pool.take(7) == (0, 1, 2, 3, 4, 5, 6)


def test_the_best_fit_keeps_long_runs_whole() -> None:
    pool = PagePool(10)
    a, hold, _ = pool.take(2), pool.take(1), pool.take(1)
    assert a is not None
    assert hold is not None
    pool.give_back(a)
    assert pool.take(2) == (0, 1)


def test_a_page_is_given_back_once() -> None:
    pool = PagePool(4)
    pages = pool.take(2)
    assert pages is not None
    pool.give_back(pages)
    with pytest.raises(ValueError, match="free already"):
        pool.give_back(pages)
    with pytest.raises(ValueError, match="exist"):
        pool.give_back((4,))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_no_page_is_lost_or_given_twice(events: list[tuple[bool, int]]) -> None:
    pool = PagePool(20)
    held: list[tuple[int, ...]] = []
    for take, n in events:
        if take:
            pages = pool.take(n)
            assert (pages is None) == (n > pool.free_pages + (len(pages) if pages else 0))
            if pages:
                assert len(pages) == n
                held.append(pages)
        elif held:
            pool.give_back(held.pop(n % len(held)))
        flat = [p for pages in held for p in pages]
        assert len(flat) == len(set(flat)) == pool.used_pages
