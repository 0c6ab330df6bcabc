"""The archive of what a search has found, and which of it is worth expanding next.

Source: the PUCT reuse of TTT-Discover, arXiv 2601.16175; predictor and bound after AlphaGo Zero's.
Knows: values, visits, ancestry, the choice of parents, a file that is whole or the one before.
Does not know: what a state means, who made its children, or when an expansion counts (`search` does).

    score(s) = Q(s) + c scale P(s) sqrt(1 + T) / (1 + n(s))
    Q = best child's value once expanded, else the state's own; P falls with the rank by value; scale is the spread of
    the values that were found

One expansion is one group of rollouts, failures included: T grows by 1, and so does n of the parent and of each of its
ancestors (the authors' code counts rollouts).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from reef.core.disk import create, sync
from reef.core.errors import InputError, StoreError
from reef.core.failpoint import failpoint

LARGEST: Final = 1000
CHILDREN: Final = 2  # kept of one expansion
FLOOR: Final = 1e-6  # of the scale


@dataclass(frozen=True, slots=True)
class Found:
    """A construction that a verifier called valid. `key` is the same for constructions that are the same."""

    state: str
    value: float
    key: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    id: int
    state: str
    value: float
    key: str
    note: str
    ancestors: tuple[int, ...]  # the parent last; empty for a seed
    visits: int = 0
    best: float | None = None  # of its direct children, also of those that were not kept

    @property
    def seed(self) -> bool:
        return not self.ancestors


class Archive:
    """Entries by id, in the order in which they came."""

    def __init__(
        self, entries: Iterable[Entry] = (), expansions: int = 0, *, after: int = 0, largest: int = LARGEST
    ) -> None:
        self.entries = {entry.id: entry for entry in entries}
        self.expansions = expansions
        self.largest = largest
        self._next = max(after, max(self.entries, default=-1) + 1)  # an id is never given twice

    def seed(self, found: Found) -> None:
        """Add an initial state; one that is there already is not added again."""
        self._add(found, ())

    def best(self) -> Entry:
        """The entry of the largest value, the oldest of equals. The archive must not be empty."""
        return min(self.entries.values(), key=_rank)

    def scores(self, c: float = 1.0) -> dict[int, float]:
        """The score of every entry."""
        ranked = sorted(self.entries.values(), key=_rank)
        total = len(ranked) * (len(ranked) + 1) / 2
        grown = [entry.value for entry in ranked if not entry.seed]
        scale = max(FLOOR, max(grown) - min(grown)) if grown else FLOOR
        bonus = c * scale * math.sqrt(1 + self.expansions) / total if ranked else 0.0
        return {
            entry.id: (entry.value if entry.best is None or not entry.visits else entry.best)
            + bonus * (len(ranked) - rank) / (1 + entry.visits)
            for rank, entry in enumerate(ranked)
        }

    def choose(self, count: int, c: float = 1.0) -> list[int]:
        """The ids of `count` parents, the best score first. A chosen one blocks its ancestors and descendants; where
        that leaves too few, the related ones come next, and then the same ones again."""
        scores = self.scores(c)
        order = sorted(scores, key=lambda one: (-scores[one], one))
        chosen: list[int] = []
        for name in order:
            if len(chosen) < count and not self._related(name, chosen):
                chosen.append(name)
        chosen += [name for name in order if name not in chosen][: count - len(chosen)]
        return [chosen[place % len(chosen)] for place in range(count)] if chosen else []

    def expand(self, parent: int, children: Sequence[Found]) -> None:
        """Count one expansion of `parent` and keep the best of its valid children that are new."""
        before = self.entries.get(parent)
        if before is None:
            raise StoreError(f"the archive has no entry {parent} to expand")
        self.expansions += 1
        tops = [child.value for child in children] + ([] if before.best is None else [before.best])
        self.entries[parent] = replace(before, best=max(tops, default=None))
        for name in (*before.ancestors, parent):
            if (entry := self.entries.get(name)) is not None:
                self.entries[name] = replace(entry, visits=entry.visits + 1)
        kept = 0
        for child in sorted(children, key=lambda child: -child.value):
            if kept < CHILDREN and self._add(child, (*before.ancestors, parent)):
                kept += 1
        self._trim()

    def document(self) -> dict[str, Any]:
        """The whole archive as JSON."""
        entries = [asdict(entry) for entry in self.entries.values()]
        return {"expansions": self.expansions, "after": self._next, "entries": entries}

    @classmethod
    def of(cls, document: Mapping[str, Any], *, largest: int = LARGEST) -> Archive:
        entries = [Entry(**(one | {"ancestors": tuple(one["ancestors"])})) for one in document["entries"]]
        return cls(entries, document["expansions"], after=document["after"], largest=largest)

    def _add(self, found: Found, ancestors: tuple[int, ...]) -> bool:
        if not math.isfinite(found.value):
            raise ValueError("a value must be a finite number; what is invalid never enters the archive")
        if any(entry.key == found.key for entry in self.entries.values()):
            return False
        self.entries[self._next] = Entry(self._next, found.state, found.value, found.key, found.note, ancestors)
        self._next += 1
        return True

    def _related(self, name: int, chosen: Collection[int]) -> bool:
        """Whether it is an ancestor or a descendant of one that was chosen."""
        mine = self.entries[name].ancestors
        return any(one in mine or name in self.entries[one].ancestors for one in chosen)

    def _trim(self) -> None:
        """Drop the entries of the smallest values beyond the largest size; seeds stay."""
        over = len(self.entries) - self.largest
        if over > 0:
            grown = sorted((entry for entry in self.entries.values() if not entry.seed), key=_rank)
            for entry in grown[-over:]:
                del self.entries[entry.id]


class File:
    """One JSON document on disk, replaced whole: after a crash it is the new one or the one before."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Two drivers of one search would each undo what the other wrote. InputError when there is one already."""
        beside = self.path.with_name(self.path.name + ".lock")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = beside.open("w")
        except OSError as error:
            raise StoreError(f"{beside} cannot be written: {error.strerror}") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(
                    f"another driver works on {self.path}; wait until it ends, or give another file with --keep and "
                    "another --scenario"
                ) from None
            yield

    def read(self) -> dict[str, Any] | None:
        """None: there is none yet. StoreError when it cannot be read."""
        try:
            document = json.loads(self.path.read_bytes(), parse_constant=_refuse)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise StoreError(f"{self.path} cannot be read ({error}); move it away to search from the start") from None
        if not isinstance(document, dict):
            raise StoreError(f"{self.path} holds no search; move it away to search from the start")
        return document

    def write(self, document: Mapping[str, Any]) -> None:
        """StoreError when the disk will not; the document before stays."""
        beside = self.path.with_name(self.path.name + ".new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with create(beside) as file:
                file.write(json.dumps(document, separators=(",", ":")).encode())
                file.flush()
                os.fsync(file.fileno())
            failpoint("tttd.before_rename")
            os.replace(beside, self.path)
            sync(self.path.parent)
            failpoint("tttd.after_rename")
        except OSError as error:
            raise StoreError(f"{self.path} cannot be written: {error.strerror}") from None


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is no number")


def _rank(entry: Entry) -> tuple[float, int]:
    return -entry.value, entry.id
