"""Releases the gateway has looked up, kept: a release never changes, so once is enough.

Knows: which scenario a release is of, its number, and what its harness part adds to a request.
Does not know: what is served (`scenario.Watch`), or weights.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from reef.core.nouns import Release
from reef.harness import tree
from reef.harness.apply import NOTHING, Applied
from reef.releases import ReleaseChain

KEPT = 1024


@dataclass(frozen=True, slots=True)
class Shelved:
    release: Release
    applied: Applied


class Shelf:
    def __init__(self, chain: ReleaseChain) -> None:
        self._chain = chain
        self._shelved: dict[str, Shelved] = {}

    def seen(self, release_id: str) -> Shelved | None:
        """For the hot path: what is here already."""
        return self._shelved.get(release_id)

    async def take(self, release_id: str, scenario: str | None = None) -> Shelved:
        """A release or candidate (of that scenario) by id or unique prefix. MissingError when there is none, ChainError
        when damaged."""
        found = self._shelved.get(release_id)
        if found is not None and scenario in (None, found.release.scenario):
            return found
        found = await asyncio.to_thread(self._read, release_id, scenario)
        if len(self._shelved) >= KEPT:
            self._shelved.clear()
        self._shelved[found.release.id] = found
        return found

    def _read(self, release_id: str, scenario: str | None) -> Shelved:
        release = self._chain.get(release_id, None if scenario is None else [scenario])
        applied = NOTHING
        if "harness" in release.parts:
            path: Path = self._chain.files(release.id, "harness")[tree.FILE]
            applied = Applied.of(tree.read(path.read_bytes()))
        return Shelved(release, applied)
