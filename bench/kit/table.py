"""Figures over repeats: the median and the spread, and ratios taken round by round, shown as lines of text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

Spread = list[float]
"""Median, smallest, largest."""


def spread(values: Sequence[float]) -> Spread:
    return [round(value, 3) for value in (statistics.median(values), min(values), max(values))]


def ratios(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Each round's quotient: two lines of one round saw the same machine."""
    return spread([a / b for a, b in zip(over, under, strict=True)])


def differences(over: Sequence[float], under: Sequence[float]) -> Spread:
    return spread([a - b for a, b in zip(over, under, strict=True)])


def quantile(ascending: Sequence[float], part: float) -> float:
    return ascending[min(int(len(ascending) * part), len(ascending) - 1)]


def shown(values: Spread, width: int = 8, places: int = 0) -> str:
    """`median (smallest to largest)`, aligned."""
    middle, low, high = values
    return f"{middle:{width}.{places}f} ({low:.{places}f} to {high:.{places}f})".ljust(width + 20)
