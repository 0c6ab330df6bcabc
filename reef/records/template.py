"""Bodies as templates: literal bytes and blob keys that join to the body again; what the last ones teach the next.

Knows: cuts, and recently made templates, so that a request that resends a transcript costs what is new in it.
Does not know: where blobs are, or transactions; what a template taught counts once `settle` ran.

Reuse is exact by construction: a part is only taken over from a body that begins with the very same bytes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from reef.records import body, codec
from reef.records.alike import shared

LITERAL = 1024  # a body this short is not cut
WORTH = 2048  # one shorter than this is not remembered
KEY = 256  # bodies that begin with the same so many bytes are compared
ALIKE = 8  # of them, remembered at most
MEMORY = 32 * 1024 * 1024  # bytes of bodies remembered in all

Part = bytes | int


_RESUMED = b'{"":[0'  # what stands for everything before: as if the array began here


class Stop(NamedTuple):
    """A place where an element of a top-level array ends."""

    offset: int
    parts: int  # how many parts of the template lie before it
    last: int  # the last blob key before it


class Known(NamedTuple):
    whole: bytes
    parts: list[Part]
    stops: list[Stop]  # never empty


class Templates:
    def __init__(self, blob: Callable[[bytes], int]) -> None:
        self._blob = blob
        self._known: OrderedDict[bytes, deque[Known]] = OrderedDict()
        self._fresh: list[Known] = []
        self._size = 0

    def make(self, whole: bytes) -> bytes:
        """The packed template of a body. Blob keys are written as steps from one to the next."""
        if len(whole) < codec.PLAIN:
            return codec.literal(whole)
        if len(whole) <= LITERAL:
            return codec.pack(msgspec.msgpack.encode([whole]))
        parts, stops, start, last = self._begin(whole)
        cursor = start
        for left, right, ends in _pieces(whole, start):
            if left > cursor:
                parts.append(whole[cursor:left])
            if right > left:
                key = self._blob(whole[left:right])
                parts.append(key - last)
                last = key
            cursor = right
            if ends:
                stops.append(Stop(cursor, len(parts), last))
        if cursor < len(whole):
            parts.append(whole[cursor:])
        if stops and WORTH <= len(whole) <= MEMORY // 2:
            self._fresh.append(Known(whole, parts, stops))
        return codec.pack(msgspec.msgpack.encode(parts))

    def settle(self) -> None:
        """The blobs of what was made are there to stay."""
        for known in self._fresh:
            key = known.whole[:KEY]
            alike = self._known.setdefault(key, deque())
            self._known.move_to_end(key)
            alike.append(known)
            self._size += len(known.whole)
            if len(alike) > ALIKE:
                self._size -= len(alike.popleft().whole)
        self._fresh = []
        while self._size > MEMORY:
            _, gone = self._known.popitem(last=False)
            self._size -= sum(len(each.whole) for each in gone)

    def undo(self) -> None:
        """What was made since `settle` is not there."""
        self._fresh = []

    def clear(self) -> None:
        self._fresh = []
        self._known.clear()
        self._size = 0

    def _begin(self, whole: bytes) -> tuple[list[Part], list[Stop], int, int]:
        """Parts and stops taken over from the body that shares most with this one; where they end; the last key."""
        best: Known | None = None
        most = 0  # stops
        offset = 0
        if len(whole) >= WORTH:
            for known in (*reversed(self._fresh), *reversed(self._known.get(whole[:KEY], ()))):
                if known.stops[-1].offset <= offset:
                    continue  # it could not share more
                count = _shared(known, whole)
                if count and known.stops[count - 1].offset > offset:
                    best, most, offset = known, count, known.stops[count - 1].offset
        if best is None:
            return [], [], 0, 0
        stop = best.stops[most - 1]
        return best.parts[: stop.parts], best.stops[:most], stop.offset, stop.last


def _pieces(whole: bytes, start: int) -> Iterator[body.Piece]:
    """The pieces from `start` on, which is 0 or where an element of a top-level array ends."""
    if start == 0:
        yield from body.pieces(whole)
        return
    shift = start - len(_RESUMED)
    for left, right, ends in body.pieces(_RESUMED + whole[start:]):
        if right + shift > start:
            yield max(left + shift, start), right + shift, ends


def _shared(known: Known, whole: bytes) -> int:
    """How many of its stops lie where both bodies are still the same."""
    return shared(known.whole, lambda place: known.stops[place].offset, len(known.stops), whole)
