"""Sessions: records joined into trees, because one's request goes on from another's transcript.

Seam (to be filled): see `Place`, `Pair`, `Sessions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from reef.records import RecordStore

Kind = Literal["main", "side", "retry"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record stands. `parent` is the record whose transcript its request extends; `kind` side: a title, a
    summary, a token count; retry: the same request again (of which the last answered counts)."""

    record: str
    session: str
    parent: str | None
    kind: Kind
    segment: int  # 0; one more after each compaction or edit of the history
    branch: str  # which agent of the session: empty for the main one
    turn: int  # 0 for the first of its branch
    note: str = ""  # a sentence: why it is no main turn


@dataclass(frozen=True, slots=True)
class Pair:
    """The message that answers an answer. `answer` and `request` are receipts; `late` seconds more than allowed are the
    caller's business."""

    answer: str
    request: str
    role: Literal["user", "tool"]
    text: str
    seconds: float  # from the end of the answer to the request


class Sessions:
    """Kept in a file of its own that can be made again from the records. Written by the learner, read by anybody."""

    def __init__(self, path: Path) -> None:
        raise NotImplementedError

    async def read(self, scenario: str, store: RecordStore) -> None:
        """Take every new closed record of the scenario, in log order."""
        raise NotImplementedError

    def place(self, receipt: str) -> Place | None:
        raise NotImplementedError

    def pair(self, request: str) -> Pair | None:
        """What this record's request says to the answer it follows; None for a first turn, a side call, a retry."""
        raise NotImplementedError

    def path(self, receipts: Sequence[str]) -> bool:
        """Whether these records follow one another in one branch, in this order."""
        raise NotImplementedError
