"""Releases the gateway has looked up, kept: a release never changes, so once is enough.

Knows: which scenario a release is of, its number, and what its harness part adds to a request under a wish.
Does not know: what is served (`scenario.Watch`), or weights.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from reef.core.nouns import Release
from reef.harness import tree
from reef.harness.apply import NOTHING, Applied, Wish
from reef.harness.tree import Entry
from reef.releases import ReleaseChain

KEPT = 1024
WISHES = 8  # of one release; a scenario's wish changes when a person changes it


@dataclass(frozen=True, slots=True)
class Shelved:
    release: Release
    entries: tuple[Entry, ...] = ()
    made: dict[Wish, Applied] = field(default_factory=dict, compare=False)

    def applied(self, wish: Wish) -> Applied:
        """What it adds to a request; made once for each wish."""
        if not self.entries:
            return NOTHING
        if (found := self.made.get(wish)) is None:
            if len(self.made) >= WISHES:
                self.made.clear()
            found = self.made[wish] = Applied.of(self.entries, wish)
        return found


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
        if "harness" not in release.parts:
            return Shelved(release)
        path: Path = self._chain.files(release.id, "harness")[tree.FILE]
        return Shelved(release, tree.read(path.read_bytes()))
