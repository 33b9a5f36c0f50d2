"""Repeated measurements in four numbers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import msgspec


class Spread(msgspec.Struct, frozen=True):
    """Median, mean and range of some values."""

    median: float
    mean: float
    lowest: float
    highest: float


def spread(values: Iterable[float]) -> Spread:
    """Of at least one value. Raises ValueError of none."""
    several = list(values)
    if not several:
        raise ValueError("there are no values")
    return Spread(statistics.median(several), statistics.fmean(several), min(several), max(several))
