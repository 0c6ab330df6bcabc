"""JSON of providers and models, read and written again, whatever they take for JSON.

Knows: what is not quite JSON (NaN, -Infinity, numbers of any size, halves of a character, bytes that are no UTF-8) and
how to write proper JSON of it. Does not know: any dialect's fields.

- A character beyond the first 65,536 may come as two escapes, and a stream may be cut between them. A half that never
  meets the other is written as U+FFFD; until then it waits (`ready`).
- What is written is always JSON in UTF-8: what JSON has no number for is null.
"""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import orjson

from reef.core.errors import InputError
from reef.core.nouns import Json

LOST = "\ufffd"
DEEP = 200  # levels of a value that every JSON writer writes
_DIGITS = 400  # of a number; one with more is beyond all numbers
_MOST = 2**53  # of anything that is counted


def load(data: bytes | str) -> Json:
    """JSON as a value; None for what is no JSON. Its text may hold halves of characters (`mend`)."""
    return read(data)[0]


def read(data: bytes | str) -> tuple[Json, bool]:
    """As `load`, and whether it is JSON that every reader reads."""
    try:
        return orjson.loads(data), True
    except orjson.JSONDecodeError:
        try:
            return msgspec.json.decode(data), True  # reads numbers that are too large for the other
        except (ValueError, RecursionError):
            pass
    words = data if isinstance(data, str) else bytes(data).decode("utf-8-sig", "replace")
    try:
        return json.loads(words, parse_int=_number), False
    except (ValueError, RecursionError):
        return None, False


def dump(value: Json) -> bytes:
    """JSON of whatever `load` read. What is nested too deeply for any writer is cut off."""
    try:
        return orjson.dumps(value)
    except TypeError:  # numbers, depths and halves of characters that it does not write
        pass
    try:
        return mend(_written(value)).encode()
    except RecursionError:
        return mend(_written(_cut(value, DEEP))).encode()


def write(made: Json, given: dict[str, Any]) -> bytes:
    """JSON of what was made of a request. InputError names the field of `given` that is nested too deeply for it."""
    try:
        return orjson.dumps(made)
    except TypeError:
        for name, value in given.items():
            if depth(value) > DEEP:
                raise InputError(
                    f"{name} is nested more than {DEEP} levels deep; make it flatter", param=name
                ) from None
    return dump(made)


def mend(words: str) -> str:
    """Text with the halves of each character put together, and U+FFFD for one that is alone."""
    if words.isascii():
        return words
    try:
        words.encode()
    except UnicodeEncodeError:
        return words.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return words


def clean(value: Json) -> Json:
    """A value whose every text is mended."""
    if isinstance(value, str):
        return mend(value)
    if isinstance(value, list):
        return [clean(each) for each in value]
    return {mend(name): clean(each) for name, each in value.items()} if isinstance(value, dict) else value


def split(words: str) -> tuple[str, str]:
    """Text, and the first half of a character that it ends with."""
    return (words[:-1], words[-1]) if "\ud800" <= words[-1:] <= "\udbff" else (words, "")


def ready(waiting: list[str], *, ended: bool = False) -> list[str]:
    """Takes the pieces of a text that can be written; half a character stays for the piece that is to come."""
    found, half = [], ""
    for piece in waiting:
        words, half = split(half + piece)
        if words:
            found.append(mend(words))
    waiting[:] = [] if ended or not half else [half]
    return [*found, LOST] if ended and half else found


def name_of(value: Json) -> str | None:
    """A mended text, when it is one: a name or an id."""
    return mend(value) if isinstance(value, str) else None


def say(value: Json) -> str:
    """What an error says, in words if it has any."""
    return mend(value) if isinstance(value, str) else dump(value).decode()


def count_of(value: Json) -> int | None:
    """A count that can be kept, when it is one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST else None


def depth(value: Json) -> int:
    level, found = [value], 0
    while level:
        found += 1
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return found


def _written(value: Json) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        plain = json.loads(json.dumps(value), parse_constant=lambda name: None)
        return json.dumps(plain, ensure_ascii=False, separators=(",", ":"))


def _cut(value: Json, levels: int) -> Json:
    if isinstance(value, dict):
        return {name: _cut(each, levels - 1) for name, each in value.items()} if levels else None
    if isinstance(value, list):
        return [_cut(each, levels - 1) for each in value] if levels else None
    return value


def _number(digits: str) -> int | float:
    return int(digits) if len(digits) <= _DIGITS else math.inf
