"""Bodies that were read lately, found again by how they begin, so that what resends one costs only what is new in it.

Knows: checksums of beginnings, which bodies share one, and how much memory they may have in all.
Does not know: what is kept with a body, or what is done with one that is found.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

Mark = tuple[Hashable, int, int]  # what is only compared with its own kind; bytes from the beginning, their checksum

T = TypeVar("T")


class Alike(Generic[T]):
    """`size` tells the bytes that a kept thing counts for; `most` of those with the same longest mark are kept."""

    def __init__(self, size: Callable[[T], int], most: int) -> None:
        self._of, self._most = size, most
        self._number = 0
        self.size = 0
        self.kept: OrderedDict[int, tuple[T, Sequence[Mark]]] = OrderedDict()
        self.marked: dict[Mark, deque[int]] = {}

    def near(self, marks: Sequence[Mark]) -> Iterator[tuple[int, T]]:
        """Those that share the longest of these marks that any has, the newest first, with their numbers."""
        numbers = next((self.marked[mark] for mark in reversed(marks) if mark in self.marked), ())
        return ((number, self.kept[number][0]) for number in reversed(numbers))

    def keep(self, made: T, marks: Sequence[Mark], memory: int) -> None:
        """Remember one more; the oldest go while all together are larger than `memory`."""
        self._number += 1
        self.kept[self._number] = made, marks
        self.size += self._of(made)
        for mark in marks:
            self.marked.setdefault(mark, deque(maxlen=self._most)).append(self._number)
        while self.size > memory:
            self.drop(next(iter(self.kept)))

    def drop(self, number: int) -> None:
        gone, marks = self.kept.pop(number)
        self.size -= self._of(gone)
        for mark in marks:
            numbers = self.marked[mark]
            if number in numbers:
                numbers.remove(number)
            if not numbers:
                del self.marked[mark]

    def clear(self) -> None:
        self.size = 0
        self.kept.clear()
        self.marked.clear()


def marks_of(kind: Hashable, body: memoryview, blocks: Sequence[int]) -> list[Mark]:
    """By what a body is found: its first bytes, in blocks that grow. What is its own is in the longer ones."""
    found: list[Mark] = []
    total = 0
    for start, end in zip([0, *blocks], blocks, strict=False):
        if end > len(body):
            break
        total = zlib.crc32(body[start:end], total)
        found.append((kind, end, total))
    return found


def shared(before: bytes, offsets: Callable[[int], int], count: int, body: bytes) -> int:
    """How many of `count` places in an earlier body, at growing `offsets`, have the same bytes before them in both."""
    low, high, same = 0, count, 0  # places that are, that may be; bytes compared
    first = True
    while low < high:
        middle = high if first else (low + high + 1) // 2  # mostly all of them
        first = False
        offset = offsets(middle - 1)
        if body.startswith(before[same:offset], same):
            low, same = middle, offset
        else:
            high = middle - 1
    return low
