"""That a server answers with the weights that it was given: it is asked what it makes of a fixed text.

Knows: which answers show that weights were not loaded, came from an old cache, or are others than last time.
Does not know: files, HTTP, or what is done with a server that fails.

- Weights that differ from the base's by enough give other log-probs. The very same ones, to the last digit, show that
  nothing was loaded. A difference is no proof of the right weights; the same weights once more give the same again.
- Where weights change under a name (`fresh`), the next token of a text that is longer than a block of a prefix cache is
  drawn with the cache and rated without it: where the two disagree, the cache is of other weights. The draw leaves the
  text in the cache, for the next proof to find.
- Servers compute in bfloat16, and beside other requests otherwise than alone: limits are far above that noise.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from reef.core.errors import EngineError
from reef.engines.remote import Server

PLACES = (7, 13, 18, 24, 31)  # of the text, whose tokens are rated
TOKENS = 160  # more than a block of vLLM's cache on CPUs (128)
SAME = 1e-6  # log-probs no further apart are equal
AGAIN = 0.1  # mean distance at which the same weights are no longer the same, beside other requests
ALONE = 0.02  # and where the server had nothing else to do
CACHED = 0.25  # distance between a token as drawn and as rated
_STEP = 7919  # a prime: the text wanders through the vocabulary


def text(vocabulary: int, context: int | None) -> list[int]:
    """A fixed text of token ids that a model of this vocabulary has; the first few, often special, are left out."""
    length = TOKENS if context is None else max(3, min(TOKENS, context // 2))
    low = min(16, vocabulary // 2)
    return [low + (number * _STEP) % (vocabulary - low) for number in range(length)]


class Book:
    """What a server made of the text under each name, in a file that all processes share."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, list[float]]:
        try:
            found = json.loads(self.path.read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, key: str, print_: Sequence[float], kept: int = 64) -> None:
        """The caller holds the lock of the server. The oldest entries go, but for the base's."""
        found = self.read()
        found.pop(key, None)
        found[key] = list(print_)
        for old in [name for name in found if name != "base"][: max(0, len(found) - kept)]:
            del found[old]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temp = self.path.with_suffix(f".{os.getpid()}")
        temp.write_text(json.dumps(found))
        temp.rename(self.path)


async def prove(
    server: Server,
    name: str,
    key: str,
    tokens: Sequence[int],
    book: Book,
    moved: Callable[[str], bool],
    limit: float = AGAIN,
) -> None:
    """EngineError when what `name` answers with cannot be the weights `key`. `moved`: whether they differ from others
    of the book by enough to be seen (blocking)."""
    known = book.read()
    found = await print_of(server, name, tokens)
    for other in [each for each, print_ in known.items() if each != key and _apart(found, print_)[1] <= SAME]:
        if await asyncio.to_thread(moved, other):
            raise EngineError(
                f"{server.url} says that it loaded {_short(key)}, but answers exactly as with {_short(other)}: it did "
                "not; it is left out until it does. Look at its log, and whether it sees the same files (seen_as)"
            )
    if key in known and _apart(found, known[key])[0] > limit:
        raise EngineError(
            f"{server.url} answers with {_short(key)} otherwise than when it was loaded before: these are other "
            "weights, or the server was started with other settings; it is left out. Start it again"
        )
    book.write(key, found)


async def print_of(server: Server, name: str, tokens: Sequence[int]) -> list[float]:
    """What a name answers with, as a few numbers."""
    places = [place for place in PLACES if place < len(tokens)] or [len(tokens) - 1]
    rated = await server.rate(name, [tokens[: place + 1] for place in places], places)
    return [value for values in rated for value in values]


async def fresh(server: Server, name: str, tokens: Sequence[int], what: str) -> None:
    """EngineError when the server's answers come from a cache of other weights."""
    token, drawn = await server.draw(name, tokens)
    rated = (await server.rate(name, [[*tokens, token]], [len(tokens)]))[0][0]
    if abs(drawn - rated) > CACHED:
        raise EngineError(
            f"{server.url} answers with a cache of other weights than {_short(what)} (a token's log-prob is "
            f"{drawn:.3f} as drawn, {rated:.3f} anew); it is left out. Start it again, without a prefix cache if this "
            "returns"
        )


def alike(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two prints can be of the same weights."""
    return _apart(one, other)[0] <= AGAIN


def _apart(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """The mean and the largest distance; infinite for lists of two lengths."""
    if len(one) != len(other) or not one:
        return float("inf"), float("inf")
    apart = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return sum(apart) / len(apart), max(apart)


def _short(key: str) -> str:
    return "the base model" if key == "base" else f"{key[:12]}…" if len(key) > 13 else key
