"""The fake network: late, out of order across links, in order on each, lossy by seed."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorpp.testing import FakeNetwork, run


def deliveries(
    seed: int, *, links: int = 3, count: int = 20, max_delay: float = 1.0, drop: float = 0.0
) -> list[tuple[int, int]]:
    """Send ``count`` numbers on each link at once, and return (link, number) as they arrive."""

    async def main() -> list[tuple[int, int]]:
        arrived: list[tuple[int, int]] = []
        network = FakeNetwork(seed, max_delay=max_delay, drop=drop)
        made = [network.link(f"link {n}", arrived.append) for n in range(links)]
        for number in range(count):
            for n, link in enumerate(made):
                link.send((n, number))
            await asyncio.sleep(0.01)
        await asyncio.sleep(10)
        assert all(link.in_flight == 0 and link.sent == count for link in made)
        assert sum(link.dropped for link in made) + len(arrived) == links * count
        return arrived

    return run(main)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.3]))
def test_one_link_never_reorders(seed: int, drop: float) -> None:
    arrived = deliveries(seed, drop=drop)
    for n in range(3):
        numbers = [number for link, number in arrived if link == n]
        assert numbers == sorted(numbers)


def test_links_reorder_among_each_other() -> None:
    arrived = deliveries(1)
    assert arrived != sorted(arrived, key=lambda item: item[1])


def test_the_seed_decides() -> None:
    assert deliveries(5, drop=0.3) == deliveries(5, drop=0.3)
    assert deliveries(5, drop=0.3) != deliveries(6, drop=0.3)
    assert 0 < len(deliveries(5, drop=0.3)) < 60


def test_a_link_does_not_depend_on_the_others() -> None:
    one = [number for link, number in deliveries(5, links=1, drop=0.5) if link == 0]
    many = [number for link, number in deliveries(5, links=4, drop=0.5) if link == 0]
    assert one == many


def test_without_delay_it_is_still_in_order() -> None:
    assert [number for _, number in deliveries(0, links=1, max_delay=0)] == list(range(20))


def test_a_cut_link_loses_everything() -> None:
    async def main() -> None:
        arrived: list[int] = []
        link = FakeNetwork().link("a", arrived.append)
        link.cut = True
        link.send(1)
        await asyncio.sleep(5)
        link.cut = False
        link.send(2)
        await asyncio.sleep(5)
        assert (arrived, link.dropped) == ([2], 1)

    run(main)


def test_wrong_numbers_and_names_are_refused() -> None:
    with pytest.raises(ValueError, match="probability"):
        FakeNetwork(drop=2)
    network = FakeNetwork()
    network.link("a", print)
    with pytest.raises(ValueError, match="already"):
        network.link("a", print)
