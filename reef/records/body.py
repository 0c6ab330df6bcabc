"""Where a request body can be cut so that equal parts of many bodies are stored once.

Knows: bytes, and enough JSON to find the exact slices of each message, tool schema and long string in a body.
Does not know: where the slices are kept. Cuts are only offsets, so joining the slices always gives the body again,
whatever the body is; a body that is not JSON, or not worth cutting, is one slice.
"""

from __future__ import annotations

import re

import msgspec

SMALL = 40  # a slice shorter than this costs less as literal bytes than as a reference
TEXT = 256  # other values and literal stretches from this size on are worth a slice of their own
LONG = 4096  # strings from this size on (images, files) get their own slice wherever they are
CROWDED = 100_000  # a body with more commas than this is not parsed: its elements are too small to share

Cut = tuple[int, int]

_string = re.compile(rb'"((?:[^"\\]|\\.){%d,})"' % LONG, re.DOTALL)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array = msgspec.json.Decoder(list[msgspec.Raw])


def cuts(body: bytes) -> list[Cut]:
    """Ascending, disjoint [start, end) slices of the body that are worth sharing; the rest is literal."""
    found: list[Cut] = []
    for start, end in _values(body):
        if end - start < LONG:
            found.append((start, end))
            continue
        for match in _string.finditer(body, start, end):
            if match.start(1) - start >= SMALL:
                found.append((start, match.start(1)))
                start = match.start(1)
            found.append((start, match.end(1)))
            start = match.end(1)
        if end - start >= SMALL:
            found.append((start, end))
    return _fill(body, found)


def _values(body: bytes) -> list[Cut]:
    """The slices of array elements and larger values of the top-level object."""
    try:
        if len(body) < SMALL or body.count(b",") > CROWDED:
            return []
        top = _object.decode(body)
        found: list[Cut] = []
        cursor = 0
        for value in top.values():
            raw = bytes(value)
            start = body.find(raw, cursor) if len(raw) >= SMALL else -1
            if start < 0:
                continue
            cursor = start + len(raw)
            if raw[:1] == b"[":
                found += [(start + a, start + b) for a, b in _elements(raw)]
            elif len(raw) >= TEXT:
                found.append((start, cursor))
        return found
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []


def _elements(raw: bytes) -> list[Cut]:
    found: list[Cut] = []
    cursor = 1
    for value in _array.decode(raw):
        element = bytes(value)
        start = raw.find(element, cursor)
        if start < 0:
            continue
        cursor = start + len(element)
        if len(element) >= SMALL:
            found.append((start, cursor))
    return found


def _fill(body: bytes, found: list[Cut]) -> list[Cut]:
    """Make slices of the long stretches that no slice covers, so that no template holds much text."""
    whole: list[Cut] = []
    cursor = 0
    for start, end in [*found, (len(body), len(body))]:
        if start - cursor >= TEXT:
            whole.append((cursor, start))
        if end > start:
            whole.append((start, end))
        cursor = end
    return whole
