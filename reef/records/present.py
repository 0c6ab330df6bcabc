"""The entries of a store that are still there, where some may have been forgotten on request meanwhile.

Knows: that a store names one missing entry at a time. Does not know: what is read, or why.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from reef.core.errors import MissingError
from reef.core.nouns import Record, Report

Get = Callable[[Sequence[str]], Awaitable[list[Record | Report]]]
"""A store's `get`."""


async def present(get: Get, ids: Sequence[str]) -> list[Record | Report]:
    """The entries with these ids, in order; those that are gone are left out."""
    if not ids:
        return []
    try:
        return await get(ids)
    except MissingError:
        found: list[Record | Report] = []
        for name in ids:
            try:
                found += await get([name])
            except MissingError:
                continue
        return found
