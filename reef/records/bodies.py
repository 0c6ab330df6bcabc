"""Bodies joined again from their templates, where one begins as another did: what they share is looked up once.

Knows: templates as lists of literal bytes and steps between blob keys, and the bodies it joined last.
Does not know: which records they belong to. Memory is bounded, and emptied when blobs were removed: keys may come back.
"""

from __future__ import annotations

import sqlite3
from itertools import accumulate
from typing import NamedTuple

import msgspec

from reef.core.errors import StoreError
from reef.records import codec
from reef.records.alike import Alike, Mark, marks_of

MEMORY = 16 * 1024 * 1024  # bytes of bodies remembered in all
WORTH = 8  # parts; a shorter template is looked up as it is
BLOCKS = [32 * 2**n for n in range(16)]  # templates that begin with the same so many bytes are compared
ALIKE = 8  # of those that have no longer block in common
_HEADS = {0xDC: 3, 0xDD: 5}  # bytes before the first part of a template, by how their number is written

Part = bytes | int
_template = msgspec.msgpack.Decoder(list[bytes | int])


class Joined(NamedTuple):
    parts: list[Part]
    ends: list[int]  # where each part ends in the body
    keys: list[int]  # the last blob key up to each part
    body: bytes


class Bodies:
    """Used inside a read transaction, after `begin`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection
        self._generation: int | None = None
        self._known = Alike[Joined](lambda known: len(known.body), ALIKE)

    def begin(self) -> None:
        (generation,) = self._db.execute("SELECT generation FROM keeping").fetchone()
        if generation != self._generation:
            self._generation = generation
            self._known.clear()

    def join(self, template: bytes) -> bytes:
        raw = codec.unpack(template)
        parts = _template.decode(raw)
        if len(parts) < WORTH:
            return b"".join(self._rest(parts, 0)[0])
        marks = _marks(raw)
        number, best, most = self._best(parts, marks)
        start, key = (best.body[: best.ends[most - 1]], best.keys[most - 1]) if best is not None else (b"", 0)
        pieces, keys = self._rest(parts[most:], key)
        body = b"".join([start, *pieces])
        ends = list(accumulate(map(len, pieces), initial=len(start)))[1:]
        if best is not None:
            ends, keys = best.ends[:most] + ends, best.keys[:most] + keys
            if 2 * most > len(best.parts):
                self._known.drop(number)  # this one will do for most that it did
        self._known.keep(Joined(parts, ends, keys, body), marks, MEMORY)
        return body

    def _best(self, parts: list[Part], marks: list[Mark]) -> tuple[int, Joined | None, int]:
        """A body that begins with as many of these parts as any does, with its number, and how many they are."""
        best: Joined | None = None
        found = most = 0
        for number, known in self._known.near(marks):
            if (count := _shared(known.parts, parts, most)) > most:
                found, best, most = number, known, count
        return found, best, most

    def _rest(self, parts: list[Part], key: int) -> tuple[list[bytes], list[int]]:
        found: list[bytes] = []
        keys: list[int] = []
        for part in parts:
            if isinstance(part, int):
                key += part
                row = self._db.execute("SELECT data FROM blobs WHERE key = ?", (key,)).fetchone()
                if row is None:
                    raise StoreError(f"blob {key} is missing: the record store is damaged; restore a backup")
                found.append(codec.unpack(row[0]))
            else:
                found.append(part)
            keys.append(key)
        return found, keys


def _marks(raw: bytes) -> list[Mark]:
    return marks_of(None, memoryview(raw)[_HEADS.get(raw[0], 1) :], BLOCKS)


def _shared(known: list[Part], parts: list[Part], least: int) -> int:
    """How many parts two templates begin with in common; only where more than `least` are need it be right."""
    low, high = least, min(len(known), len(parts))
    if high <= least or known[:least] != parts[:least]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if known[low:middle] == parts[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
