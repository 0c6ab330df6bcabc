"""Sessions: records joined into trees, because one's request goes on from another's transcript.

Knows: how far the event log was read, where each record stands, and what a request says to the answer before it.
Does not know: what is learnt from it; the rules by which turns are joined are `tree`'s.

- Records are joined by the session that their client named, then by transcript. Only live records take part, and
  nothing crosses scenarios.
- The file can be deleted: it is made again from the log, and comes out the same. A page of the log and the place that
  was read up to are one transaction.
- It holds digests, names that clients gave and receipts. What was said is read from the record when it is wanted.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from reef.core import damage
from reef.core.errors import StoreError
from reef.core.failpoint import failpoint
from reef.core.nouns import Record
from reef.experience.next import words
from reef.experience.reader import Reader
from reef.experience.tree import Kind, Tree
from reef.records import RecordStore
from reef.records.present import present

PAGE: Final = 100
UNREAD: Final = "it could not be read: what is in it is not as it should be"
_AGENT = {True: "a sub-agent's turn", False: ""}
_LISTED = (
    "SELECT session, max(seq), count(*), min(begun), max(begun), max(given IS NOT NULL), count(DISTINCT branch),"
    " sum(kind = 'side'), sum(kind = 'retry') FROM turns WHERE scenario = ?"
)

log = logging.getLogger(__name__)


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
    note: str = ""  # a sentence: why it is no main turn, or does not simply go on from the one before


@dataclass(frozen=True, slots=True)
class Pair:
    """The message that answers an answer. `answer` and `request` are receipts; `late` seconds more than allowed are the
    caller's business."""

    answer: str
    request: str
    role: Literal["user", "tool"]
    text: str
    seconds: float  # from the end of the answer to the request
    choice: int = 0  # which of the answer's choices was gone on from


@dataclass(frozen=True, slots=True)
class Listed:
    """A session, for lists. `last` is the log's number of its newest record."""

    session: str
    last: int
    count: int
    first_at: float
    last_at: float
    named: bool  # by its client
    branches: int
    sides: int
    retries: int


def _listed(
    session: str, last: int, count: int, first: float, newest: float, named: int, branches: int, sides: int, again: int
) -> Listed:
    return Listed(session, last, count, first, newest, bool(named), branches, sides, again)


class Sessions(Tree):
    """Kept in a file of its own that can be made again from the records. Written by the learner, read by anybody.

    Used from one thread. `reading`: for another process, which only looks; StoreError when there is no file yet.
    """

    def __init__(self, path: Path, *, reading: bool = False) -> None:
        self._reader = Reader()
        self._turn = asyncio.Lock()
        super().__init__(path, reading=reading)

    @classmethod
    def open(cls, path: Path) -> Sessions:
        """For the process that writes it; a damaged file is moved away and made again."""
        damage.set_aside(path, "it is made again from the records")
        return cls(path)

    # --- from the log -------------------------------------------------------------------------------------------------

    async def read(self, scenario: str, store: RecordStore) -> None:
        """Take every new closed record of the scenario, in log order. An error leaves all before its page taken; one
        that is a record's own is said once, and the record has a place without a transcript."""
        async with self._turn:
            cursor = self.cursor(scenario)
            while events := await store.events(scenario, cursor, PAGE):
                closed = {event.ref: event.seq for event in events if event.kind == "closed"}
                records = await _records(store, list(closed))
                cursor = events[-1].seq
                with self._writing():
                    for record in records:
                        if record.purpose == "live" and record.status != "open":
                            self._take(closed[record.id], record)
                    failpoint("sessions.half_read")
                    place = "INSERT OR REPLACE INTO cursors VALUES (?, ?)"
                    self._base.execute(place, (scenario, cursor))
                failpoint("sessions.after_page")

    def _take(self, seq: int, record: Record) -> None:
        """Give one record its place. Whatever its client put into it, the next one is read."""
        try:
            self._kept(lambda: self.add(seq, record, self._reader.read(record)))
        except Exception as error:
            if not _own(error):
                raise
            log.exception("%s: the record %s has no place in a session", record.scenario, record.id)
            try:
                self._kept(lambda: self.alone(seq, record, UNREAD))
            except Exception as again:
                if not _own(again):
                    raise

    def _kept(self, change: Callable[[], None]) -> None:
        """Make a change inside the transaction; nothing of it when it fails."""
        self._base.execute("SAVEPOINT one")
        try:
            change()
        except BaseException:
            if self._base.in_transaction:
                self._base.execute("ROLLBACK TO one")
            raise
        self._base.execute("RELEASE one")

    def cursor(self, scenario: str) -> int:
        """The last event that was read."""
        rows = self._read("SELECT place FROM cursors WHERE scenario = ?", scenario)
        return rows[0][0] if rows else 0

    # --- where a record stands ----------------------------------------------------------------------------------------

    def place(self, receipt: str) -> Place | None:
        """None: not read yet, not live, or forgotten."""
        return self.places([receipt]).get(receipt)

    def places(self, receipts: Sequence[str]) -> Mapping[str, Place]:
        """Those of these records that have a place."""
        query = (
            "SELECT turns.record, turns.session, before.record, turns.kind, turns.segment, turns.branch, turns.turn,"
            " turns.note FROM turns LEFT JOIN turns AS before ON before.seq = turns.parent WHERE turns.record = ?"
        )
        rows = [row for name in receipts for row in self._read(query, name)]
        found = [Place(*row) for row in rows]
        return {place.record: replace(place, note=place.note or _AGENT[bool(place.branch)]) for place in found}

    async def pair(self, request: str, store: RecordStore) -> Pair | None:
        """What this record's request says to the answer it follows; None for a first turn, a side call, a retry, a
        sub-agent, and where the answer in its history is not the recorded one. Its text is read from the record again.
        """
        query = (
            "SELECT before.record, turns.begun - before.ended, turns.choice FROM turns JOIN turns AS before"
            " ON before.seq = turns.parent WHERE turns.record = ? AND turns.exact AND turns.branch = ''"
            " AND turns.kind = 'main' AND before.kind = 'main'"
        )
        rows = self._read(query, request)
        found = await _records(store, [request]) if rows else []
        try:
            said = words(found[0]) if found else None
        except RecursionError:
            said = None
        if said is None:
            return None
        answer, seconds, choice = rows[0]
        return Pair(answer, request, said[0], said[1], max(0.0, seconds), choice)

    def children(self, receipt: str) -> tuple[str, ...]:
        """The main turns of its branch that go on from this record's answer, oldest first."""
        query = (
            "SELECT turns.record FROM turns JOIN turns AS before ON before.seq = turns.parent"
            " WHERE before.record = ? AND turns.kind = 'main' AND turns.branch = before.branch ORDER BY turns.seq"
        )
        return tuple(row[0] for row in self._read(query, receipt))

    def path(self, receipts: Sequence[str]) -> bool:
        """Whether these records follow one another in one branch, in this order."""
        query = (
            "SELECT 1 FROM turns JOIN turns AS before ON before.seq = turns.parent WHERE turns.record = ?"
            " AND before.record = ? AND turns.exact AND turns.branch = before.branch AND turns.kind = 'main'"
        )
        steps = zip(receipts[1:], receipts[:-1], strict=True)
        known = bool(receipts) and self.place(receipts[0]) is not None
        return known and all(self._read(query, later, earlier) for later, earlier in steps)

    # --- sessions as a whole ------------------------------------------------------------------------------------------

    def listed(self, scenario: str, before: int | None, limit: int, *, unnamed: bool = False) -> list[Listed]:
        """Sessions by their newest record, the newest first; `before`: a `last` to page on. `unnamed`: only those that
        no client named. Looks at every turn of the scenario."""
        which = " AND max(given IS NOT NULL) = 0" if unnamed else ""
        query = f"{_LISTED} GROUP BY session HAVING max(seq) < ?{which} ORDER BY max(seq) DESC LIMIT ?"
        return [_listed(*row) for row in self._read(query, scenario, before or 2**63 - 1, limit)]

    def within(self, scenario: str, given: str) -> str | None:
        """The session that one which a client named was joined with: its own name, or that of a sub-agent's outer one.
        None: nothing of it was read."""
        rows = self._read("SELECT session FROM turns WHERE scenario = ? AND given = ? LIMIT 1", scenario, given)
        return rows[0][0] if rows else None

    def about(self, scenario: str, session: str) -> Listed | None:
        rows = self._read(f"{_LISTED} AND session = ? GROUP BY session", scenario, session)
        return _listed(*rows[0]) if rows else None

    def members(self, scenario: str, session: str, after: int, limit: int) -> list[tuple[int, str]]:
        """A page of those records of a session that do not name it themselves, the oldest first, by the log's number of
        their end."""
        query = (
            "SELECT seq, record FROM turns WHERE scenario = ? AND session = ? AND seq > ? AND given IS NOT session"
            " ORDER BY seq LIMIT ?"
        )
        return self._read(query, scenario, session, after, limit)

    # --- forgetting ---------------------------------------------------------------------------------------------------

    def forget(self, receipts: Sequence[str]) -> None:
        """Nothing of these records stays, but the receipt of one after which its session is named."""
        note = "what it follows was forgotten"
        with self._writing():
            for name in receipts:
                for (seq,) in self._read("SELECT seq FROM turns WHERE record = ?", name):
                    self._base.execute("DELETE FROM answers WHERE turn = ?", (seq,))
                    change = "UPDATE turns SET parent = NULL, exact = 0, note = ? WHERE parent = ?"
                    self._base.execute(change, (note, seq))
                    self._base.execute("DELETE FROM turns WHERE seq = ?", (seq,))
            left = "SELECT 1 FROM turns WHERE scenario = threads.scenario AND session = threads.session"
            self._base.execute(f"DELETE FROM threads WHERE NOT EXISTS ({left})")  # noqa: S608

    async def tidy(self, scenario: str, store: RecordStore) -> int:
        """Forget what the store no longer has of a scenario; how many records that was."""
        at, gone = 0, 0
        query = "SELECT seq, record FROM turns WHERE scenario = ? AND seq > ? ORDER BY seq LIMIT ?"
        while rows := self._read(query, scenario, at, PAGE):
            names = [name for _, name in rows]
            known = getattr(store, "known", None)  # a store need not have it
            there = set(await known(names)) if known else {record.id for record in await _records(store, names)}
            if lost := [name for name in names if name not in there]:
                self.forget(lost)
                gone += len(lost)
            at = rows[-1][0]
        return gone


def _own(error: Exception) -> bool:
    """Whether a failure is one record's own, and would come again with it for ever."""
    if isinstance(error, sqlite3.Error):
        return isinstance(error, sqlite3.IntegrityError | sqlite3.DataError)
    return not isinstance(error, StoreError | MemoryError)


async def _records(store: RecordStore, ids: list[str]) -> list[Record]:
    """The records with these ids; those that were forgotten are left out."""
    if (exchanges := getattr(store, "exchanges", None)) is not None:  # a store need not have it
        return list(await exchanges(ids)) if ids else []
    return [entry for entry in await present(store.get, ids) if isinstance(entry, Record)]
