"""Where a request body can be cut so that equal parts of many bodies are stored once.

Knows: bytes, and enough JSON to find the exact slices of each message, tool schema and long string in a body.
Does not know: where the slices are kept. Cuts are only offsets, so joining the slices always gives the body again,
whatever the body is; a body that is not JSON, or not worth cutting, is one slice.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

SMALL = 40  # a slice shorter than this costs less as literal bytes than as a reference
TEXT = 256  # other values and literal stretches from this size on are worth a slice of their own
LONG = 1024  # strings from this size on (images, files, long results) get their own slice wherever they are
PROBE = 64  # bytes of a part looked for before all of it is compared
CROWDED = 100_000  # a body with more commas than this is not parsed: its elements are too small to share

Cut = tuple[int, int]
Piece = tuple[int, int, bool]

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array = msgspec.json.Decoder(list[msgspec.Raw])


def cuts(body: bytes) -> list[Cut]:
    """Ascending, disjoint [start, end) slices of the body that are worth sharing; the rest is literal."""
    return [(start, end) for start, end, _ in pieces(body) if end > start]


def pieces(body: bytes) -> list[Piece]:
    """The cuts, each with whether an element of a top-level array ends there; an empty piece only says that."""
    found: list[Piece] = []
    for start, end, element in _values(body):
        if end - start < LONG:
            found.append((start, end, element))
            continue
        for first, last in _strings(body, start, end):
            if first - start >= SMALL:
                found.append((start, first, False))
                start = first
            found.append((start, last, False))
            start = last
        if end - start >= SMALL:
            found.append((start, end, element))
        elif element:
            found.append((end, end, True))
    return _fill(body, found)


def _values(body: bytes) -> list[Piece]:
    """The slices of array elements and larger values of the top-level object."""
    try:
        if len(body) < SMALL or body.count(b",") > CROWDED:
            return []
        top = _object.decode(body)
        found: list[Piece] = []
        cursor = 0
        for value in top.values():
            raw = bytes(value)
            start = _place(body, raw, cursor) if len(raw) >= SMALL else -1
            if start < 0:
                continue
            cursor = start + len(raw)
            if raw[:1] == b"[":
                found += _elements(raw, start)
            elif len(raw) >= TEXT:
                found.append((start, cursor, False))
        return found
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []


def _elements(raw: bytes, offset: int) -> list[Piece]:
    found: list[Piece] = []
    cursor = 1
    for value in _array.decode(raw):
        element = bytes(value)
        start = _place(raw, element, cursor)
        if start < 0:
            continue
        cursor = start + len(element)
        if len(element) >= SMALL:
            found.append((offset + start, offset + cursor, True))
    return found


def _place(body: bytes, part: bytes, cursor: int) -> int:
    """Where the part is, from the cursor on. `find` alone prepares for a long part as if it were rare."""
    probe = part[:PROBE]
    at = body.find(probe, cursor)
    while at >= 0 and not body.startswith(part, at):
        at = body.find(probe, at + 1)
    return at


def _strings(body: bytes, start: int, end: int) -> Iterator[Cut]:
    """The insides of the long strings between two offsets of valid JSON."""
    opening = body.find(b'"', start, end)
    while opening >= 0:
        closing = body.find(b'"', opening + 1, end)
        while closing >= 0 and _escaped(body, closing):
            closing = body.find(b'"', closing + 1, end)
        if closing < 0:
            return
        if closing - opening > LONG:
            yield opening + 1, closing
        opening = body.find(b'"', closing + 1, end)


def _escaped(body: bytes, at: int) -> bool:
    """Whether an odd number of backslashes stands before this place."""
    before = at
    while body[before - 1] == 0x5C:
        before -= 1
    return (at - before) % 2 == 1


def _fill(body: bytes, found: list[Piece]) -> list[Piece]:
    """Make slices of the long stretches that no slice covers, so that no template holds much text."""
    whole: list[Piece] = []
    cursor = 0
    for start, end, element in [*found, (len(body), len(body), False)]:
        if start - cursor >= TEXT:
            whole.append((cursor, start, False))
        if end > start or element:
            whole.append((start, end, element))
        cursor = end
    return whole
