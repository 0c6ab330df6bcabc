"""JSON that can always be written, whatever a client, a provider or an older version once put into it.

Knows: what orjson refuses (lone surrogates, integers over 64 bits, more than 254 levels) and how it is written instead.
Does not know: whose value it is. For a copy that reads back exactly see `records.raw`; here a lone surrogate becomes
U+FFFD, which every reader of JSON takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson

from reef.core.nouns import Json

_LONE = re.compile("[\ud800-\udfff]")


class Written(bytes):
    """JSON text inside a value: it is put in as it is."""


def dump(value: Any) -> bytes:
    """A value as JSON."""
    try:
        return orjson.dumps(value, default=_fragment)
    except TypeError:
        return b"".join(_parts(value))


def tidy(text: str) -> str:
    """The text with U+FFFD for what UTF-8 cannot say."""
    return text if text.isascii() else _LONE.sub("\ufffd", text)


def deeper(value: Json, most: int) -> bool:
    """Whether lists and objects are nested more than so many deep."""
    level = [value]
    for _ in range(most):
        level = [inner for item in level for inner in _inside(item)]
        if not level:
            return False
    return any(isinstance(item, (dict, list)) for item in level)


def _inside(item: Json) -> Any:
    return item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()


def _fragment(value: Any) -> Any:
    if isinstance(value, Written):
        return orjson.Fragment(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _parts(value: Any) -> Iterator[bytes]:
    """The same without a limit of depth, which is why it does not call itself."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, Written):
            yield item
        elif isinstance(item, dict):
            found: list[Any] = [Written(b"{")]
            for key, inner in item.items():
                found += [Written(_leaf(str(key)) + b":"), inner, _COMMA]
            left += reversed([*found[: -1 if item else None], Written(b"}")])
        elif isinstance(item, (list, tuple)):
            found = [Written(b"[")]
            for inner in item:
                found += [inner, _COMMA]
            left += reversed([*found[: -1 if item else None], Written(b"]")])
        else:
            yield _leaf(item)


_COMMA = Written(b",")


def _leaf(value: Any) -> bytes:
    if isinstance(value, str):
        return orjson.dumps(tidy(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value).encode()
    return orjson.dumps(value)
