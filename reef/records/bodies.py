"""Bodies joined again from their templates, where one begins as another did: what they share is looked up once.

Knows: templates as lists of literal bytes and steps between blob keys, and the bodies it joined last.
Does not know: which records they belong to. Memory is bounded, and emptied when blobs were removed: keys may come back.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections import OrderedDict, deque
from itertools import accumulate
from typing import NamedTuple

import msgspec

from reef.core.errors import StoreError
from reef.records import codec

MEMORY = 16 * 1024 * 1024  # bytes of bodies remembered in all
WORTH = 8  # parts; a shorter template is looked up as it is
BLOCKS = [32 * 2**n for n in range(16)]  # templates that begin with the same so many bytes are compared
ALIKE = 8  # of those that have no longer block in common
_HEADS = {0xDC: 3, 0xDD: 5}  # bytes before the first part of a template, by how their number is written

Part = bytes | int
Mark = tuple[int, int]  # bytes of a template, their checksum
_template = msgspec.msgpack.Decoder(list[bytes | int])


class Joined(NamedTuple):
    parts: list[Part]
    ends: list[int]  # where each part ends in the body
    keys: list[int]  # the last blob key up to each part
    body: bytes
    marks: list[Mark]  # by which it is found


class Bodies:
    """Used inside a read transaction, after `begin`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection
        self._generation: int | None = None
        self._number = self._size = 0
        self._known: OrderedDict[int, Joined] = OrderedDict()
        self._alike: dict[Mark, deque[int]] = {}

    def begin(self) -> None:
        (generation,) = self._db.execute("SELECT generation FROM keeping").fetchone()
        if generation != self._generation:
            self._generation, self._size = generation, 0
            self._known.clear()
            self._alike.clear()

    def join(self, template: bytes) -> bytes:
        raw = codec.unpack(template)
        parts = _template.decode(raw)
        if len(parts) < WORTH:
            return b"".join(self._rest(parts, 0)[0])
        marks = _marks(raw)
        number, most = self._best(parts, marks)
        best = self._known.get(number)
        start, key = (best.body[: best.ends[most - 1]], best.keys[most - 1]) if best is not None else (b"", 0)
        pieces, keys = self._rest(parts[most:], key)
        body = b"".join([start, *pieces])
        ends = list(accumulate(map(len, pieces), initial=len(start)))[1:]
        if best is not None:
            ends, keys = best.ends[:most] + ends, best.keys[:most] + keys
            if 2 * most > len(best.parts):
                self._drop(number)  # this one will do for most that it did
        self._keep(Joined(parts, ends, keys, body, marks))
        return body

    def _best(self, parts: list[Part], marks: list[Mark]) -> tuple[int, int]:
        """A body that begins with as many of these parts as any does, and how many they are; 0 when none does."""
        alike = next((self._alike[mark] for mark in reversed(marks) if mark in self._alike), ())
        best, most = 0, 0
        for number in reversed(alike):
            if (count := _shared(self._known[number].parts, parts, most)) > most:
                best, most = number, count
        return best, most

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

    def _keep(self, made: Joined) -> None:
        self._number += 1
        self._known[self._number] = made
        self._size += len(made.body)
        for mark in made.marks:
            self._alike.setdefault(mark, deque(maxlen=ALIKE)).append(self._number)
        while self._size > MEMORY:
            self._drop(next(iter(self._known)))

    def _drop(self, number: int) -> None:
        known = self._known.pop(number)
        self._size -= len(known.body)
        for mark in known.marks:
            alike = self._alike[mark]
            if number in alike:
                alike.remove(number)
            if not alike:
                del self._alike[mark]


def _marks(raw: bytes) -> list[Mark]:
    found, total, whole = [], 0, memoryview(raw)[_HEADS.get(raw[0], 1) :]
    for start, end in zip([0, *BLOCKS], BLOCKS, strict=False):
        if end > len(whole):
            break
        total = zlib.crc32(whole[start:end], total)
        found.append((end, total))
    return found


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
