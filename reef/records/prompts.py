"""Which earlier record a prompt continues, so that a session's token ids are stored once.

Knows: the token sequences (prompt and first answer) of recently written records, by scenario and session.
Does not know: SQL. Memory is bounded by TOKENS; work is a few binary searches over byte strings a prompt.
"""

from __future__ import annotations

import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

WORTH = 16  # a shorter shared prefix costs as much as it saves
DEPTH = 32  # records walked to read one prompt, at most
TOKENS = 4_000_000  # remembered in all
RECENT = {True: 4, False: 12}  # records remembered per key: with a session, without

Key = tuple[str, str | None]


@dataclass(frozen=True, slots=True)
class Sequel:
    """A record's tokens as something a later prompt may begin with. `depth`: records its own prompt is spread over."""

    seq: int
    ids: bytes  # 8 bytes a token
    depth: int


def as_bytes(ids: Sequence[int]) -> bytes:
    return array.array("Q", ids).tobytes()


def shared(left: bytes, right: bytes) -> int:
    """How many tokens two sequences begin with in common."""
    low, high = 0, min(len(left), len(right)) // 8
    while low < high:
        middle = (low + high + 1) // 2
        if left[low * 8 : middle * 8] == right[low * 8 : middle * 8]:
            low = middle
        else:
            high = middle - 1
    return low


class Prompts:
    def __init__(self) -> None:
        self._known: OrderedDict[Key, deque[Sequel]] = OrderedDict()
        self._size = 0

    def known(self, key: Key) -> bool:
        return key in self._known

    def parent(self, key: Key, ids: bytes) -> tuple[Sequel, int] | None:
        """The remembered record with the longest prefix shared with this prompt, and its length in tokens."""
        best: tuple[Sequel, int] | None = None
        for candidate in self._known.get(key, ()):
            if best and candidate.ids[: best[1] * 8] != ids[: best[1] * 8]:
                continue
            length = shared(candidate.ids, ids)
            better = best is None or (length, -candidate.depth) > (best[1], -best[0].depth)
            if length >= WORTH and better:
                best = candidate, length
        if best and best[0].depth >= DEPTH:
            return None  # this prompt is stored whole and the next ones refer to it
        return best

    def remember(self, key: Key, sequel: Sequel) -> None:
        row = self._known.setdefault(key, deque())
        self._known.move_to_end(key)
        row.append(sequel)
        self._size += len(sequel.ids) // 8
        if len(row) > RECENT[key[1] is not None]:
            self._size -= len(row.popleft().ids) // 8
        while self._size > TOKENS and len(self._known) > 1:
            _, gone = self._known.popitem(last=False)
            self._size -= sum(len(each.ids) // 8 for each in gone)
