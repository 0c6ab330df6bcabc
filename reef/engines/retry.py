"""One budget of further tries for a request, and how long to wait before each.

Knows: `retry-after` in seconds, as a date, with fractions, and as nonsense; growing waits with jitter.
Does not know: requests, or which failures are worth another try. Pure but for the clock and chance.

- A provider's `retry-after` is kept to exactly, or not at all: when it lies beyond the budget there is no other try.
- Without one (or with zero, the past, or nonsense) waits double from half a second, each shortened by up to a half.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

FIRST = 0.5  # seconds before the second try, unless the provider says


class Budget:
    """Begins at the first failure: `retries` more tries, whose waits all end within `seconds` of it."""

    def __init__(self, retries: int, seconds: float, first: float = FIRST) -> None:
        self.tries = 1
        self._retries = retries
        self._first = first
        self._end = time.monotonic() + seconds

    def wait(self, asked: float | None = None) -> float | None:
        """Seconds to wait before the next try; None when there is none. `asked`: what the provider wants."""
        if self.tries > self._retries:
            return None
        wait = asked
        if wait is None:
            wait = self._first * 2 ** (self.tries - 1) * (1 - random.random() / 2)
        if time.monotonic() + wait > self._end:
            return None
        self.tries += 1
        return wait


def retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds that a provider asks to wait; None when it does not say, or nothing that makes sense."""
    text = (headers.get("retry-after") or "").strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError, IndexError, OverflowError):
            return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None
