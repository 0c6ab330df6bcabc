"""Entries to rows, on one connection, inside a transaction that somebody else begins and commits.

Knows: the tables, the rules for duplicates and conflicts, how bodies are cut into blobs and prompts into suffixes.
Does not know: threads, queues, or when a commit happens; what it remembers of a transaction counts once `settle` ran.

- New records of a batch are inserted by a few statements of many rows: an id that is there already makes its statement
  undo itself, and only then are the entries of that statement looked at one by one.
- An entry that is refused leaves nothing behind in a shared transaction.
- A blob's or parent's row is never changed once it is there; templates and prompts only refer backwards.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sqlite3
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import zstandard

from reef.core.errors import ConflictError, InputError, MissingError, ReefError, StoreError
from reef.core.failpoint import failpoint
from reef.core.nouns import Record, Report
from reef.records import Stored, codec, columns
from reef.records.columns import CLOSED, EVENTS, LATE, META, OPENING, RECEIVED, RECORDS, SEQ, SIZES, Made
from reef.records.lookup import Lookup
from reef.records.prompts import Key, Prompts, Sequel, as_bytes
from reef.records.template import LITERAL, Templates

REMEMBERED = 50_000  # blob keys kept in memory
STREAMS = 4096  # records opened here and not closed yet, kept in memory
REQUESTS = 64 * 1024 * 1024  # bytes of their requests, at most

Result = Stored | ReefError
_TAG = "INSERT OR IGNORE INTO tags VALUES (?, ?, ?, ?)"
_LATER = "rendered = ?, reply = ?, answer_id = ?, meta = ?, tokens = ?, parent = ?, shared = ?"


class Opened(NamedTuple):
    seq: int
    record: Record


class Rows:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self.written = 0  # bytes of blobs, since this was made
        self._db = connection
        self._lookup = Lookup(connection)
        self._seq = 0
        self._version: int | None = None
        self._generation: int | None = None
        self._erased = False
        self._keys: OrderedDict[bytes, int] = OrderedDict()
        self._fresh: dict[bytes, int] = {}
        self._templates = Templates(self._blob)
        self._prompts = Prompts()
        self._sequels: list[tuple[Key, Sequel]] = []
        self._open: OrderedDict[str, Opened] = OrderedDict()
        self._held = 0  # bytes of requests in `_open`
        self._begun: list[Opened] = []
        self._untold: list[tuple[int, str, str, str]] = []  # events to insert before the commit

    def begin(self) -> None:
        """A transaction has begun, and with it nobody else writes: see where the log stands, if somebody else wrote."""
        (version,) = self._db.execute("PRAGMA data_version").fetchone()
        if version == self._version:
            return
        self._version = version
        query = (
            "SELECT generation, EXISTS (SELECT 1 FROM erased), (SELECT seq FROM sqlite_sequence WHERE name = 'events')"
            " FROM keeping"
        )
        generation, erased, seq = self._db.execute(query).fetchone()
        self._seq = seq or 0
        self._erased = bool(erased)
        if generation != self._generation:  # rows or blobs were removed: what was remembered may be gone
            self._generation = generation
            self._keys.clear()
            self._templates.clear()
            self._open.clear()
            self._held = 0
            self._prompts = Prompts()

    def settle(self) -> None:
        """The transaction was committed: what it taught about blobs and prompts counts from now on."""
        self._keys.update(self._fresh)
        while len(self._keys) > REMEMBERED:
            self._keys.popitem(last=False)
        for key, sequel in self._sequels:
            self._prompts.remember(key, sequel)
        for opened in self._begun:
            self._open[opened.record.id] = opened
            self._held += len(opened.record.request)
        while len(self._open) > STREAMS or self._held > REQUESTS:
            self._forget(next(iter(self._open)))
        self._templates.settle()
        self._fresh = {}
        self._sequels = []
        self._begun = []

    def put_each(self, entries: Sequence[tuple[Record | Report, Made | None]]) -> list[Result]:
        """Store each entry, or say why it is refused: ConflictError, MissingError and InputError leave no trace."""
        results: list[Any] = [None] * len(entries)
        pending: list[tuple[int, Record, Made]] = []
        for place, (entry, made) in enumerate(entries):
            try:
                if isinstance(entry, Report):
                    self._flush(pending, results)  # it may quote one of them
                    results[place] = self._report(entry)
                elif entry.id in self._open and (stored := self._end(entry, made)):
                    results[place] = stored
                elif made is None and len(entry.request) > LITERAL and self._knows(entry.id):
                    self._flush(pending, results)
                    results[place] = self._put(entry)
                else:
                    self._refuse_erased(entry.id)
                    pending.append((place, entry, made or self._make(entry)))
            except ReefError as error:
                results[place] = error
        self._flush(pending, results)
        self._tell()
        return results

    def put_all(self, entries: Sequence[Record | Report]) -> list[Stored]:
        """Store all of them or none; they close nothing that is open.

        The first error names its entry: `entry 3: …`, param `[3]` or `[3].references`.
        """
        self._db.execute("SAVEPOINT whole")
        seq, fresh, sequels, begun = self._seq, self._fresh.copy(), len(self._sequels), len(self._begun)
        stored: list[Stored] = []
        try:
            for entry in entries:
                stored.append(self._report(entry) if isinstance(entry, Report) else self._put(entry, close=False))
        except (ReefError, UnicodeEncodeError, OverflowError, TypeError) as error:
            self._db.execute("ROLLBACK TO whole")
            self._db.execute("RELEASE whole")
            self._seq, self._fresh = seq, fresh
            self._templates.undo()
            del self._sequels[sequels:]
            del self._begun[begun:]
            kind, where = (type(error), error.param) if isinstance(error, ReefError) else (InputError, None)
            place = f"[{len(stored)}]" + (f".{where}" if where else "")
            raise kind(f"entry {len(stored)}: {error}", param=place) from error
        self._db.execute("RELEASE whole")
        return stored

    # --- new records, many at once ------------------------------------------------------------------------------------

    def _flush(self, pending: list[tuple[int, Record, Made]], results: list[Any]) -> None:
        cursor = 0
        while cursor < len(pending):
            size = next(size for size in SIZES if size <= len(pending) - cursor)
            part = pending[cursor : cursor + size]
            cursor += size
            first = self._seq + 1
            try:
                self._insert([(record, made) for _, record, made in part])
                for number, (place, _, _) in enumerate(part):
                    results[place] = Stored(first + number, False)
            except sqlite3.IntegrityError:  # one of them is known
                for place, record, _ in part:
                    try:
                        results[place] = self._put(record)
                    except ReefError as error:
                        results[place] = error
        pending.clear()

    def _insert(self, part: Sequence[tuple[Record, Made]]) -> None:
        """Insert records that are new. IntegrityError: one of them is not, and none was inserted."""
        rows: list[Any] = []
        events: list[Any] = []
        seq = self._seq
        for record, made in part:
            seq += 1
            row = made.columns
            row[SEQ] = seq
            opened = row[OPENING] is not None
            if not opened:
                row[CLOSED] = seq
            rows += row
            events += (seq, record.scenario, "opened" if opened else "closed", record.id)
        self._db.execute(RECORDS[len(part)], rows)
        for _ in part:
            failpoint("records.half_stored")
        self._db.execute(EVENTS[len(part)], events)
        first, self._seq = self._seq + 1, seq
        tags: list[tuple[str, str, str, int]] = []
        for number, (record, made) in enumerate(part, first):
            if record.tags:
                tags += [(record.scenario, name, value, number) for name, value in record.tags.items()]
            if record.status == "open":
                self._begun.append(Opened(number, record))
            elif made.prompt is not None:
                self._remember(number, record, made)
        if tags:
            self._db.executemany(_TAG, tags)

    def _event(self, scenario: str, kind: str, ref: str) -> int:
        failpoint("records.half_stored")
        self._seq += 1
        self._db.execute(EVENTS[1], (self._seq, scenario, kind, ref))
        return self._seq

    # --- the end of open records --------------------------------------------------------------------------------------

    def _end(self, record: Record, made: Made | None) -> Stored | None:
        """Close a record that was opened here; None when it is not that simple."""
        opened = self._open[record.id]
        before = opened.record
        if record.status == "open" or record.scenario != before.scenario or record.request != before.request:
            return None
        made = made or self._make(record, again=True)
        if not self._update(opened.seq, before, record, made):
            return None
        self._forget(record.id)
        failpoint("records.half_stored")
        self._seq += 1
        self._untold.append((self._seq, record.scenario, "closed", record.id))
        return Stored(self._seq, False)

    def _forget(self, name: str) -> None:
        self._held -= len(self._open.pop(name).record.request)

    def _tell(self) -> None:
        """Insert the events of what was closed."""
        events, cursor = self._untold, 0
        while cursor < len(events):
            size = next(size for size in SIZES if size <= len(events) - cursor)
            self._db.execute(EVENTS[size], [value for event in events[cursor : cursor + size] for value in event])
            cursor += size
        events.clear()

    def _update(self, seq: int, before: Record, record: Record, made: Made) -> bool:
        """Turn an open row into a closed one; False when it is closed already. Only what changed touches an index."""
        row = made.columns
        late = [record.status, record.owner, self._seq + 1, *row[LATE:RECEIVED], *row[META:], seq]
        done = self._db.execute(
            f"UPDATE records SET status = ?, owner = ?, closed = ?, {_LATER} WHERE seq = ? AND status = 'open'",  # noqa: S608
            late,
        )
        if done.rowcount == 0:
            return False
        named = (record.purpose, record.release_id, record.session, record.timing.received_at)
        if named != (before.purpose, before.release_id, before.session, before.timing.received_at):
            self._db.execute(
                "UPDATE records SET purpose = ?, release_id = ?, session = ?, received_at = ? WHERE seq = ?",
                (*named, seq),
            )
        if record.tags != before.tags:
            gone = [(record.scenario, *pair, seq) for pair in before.tags.items()]
            self._db.executemany("DELETE FROM tags WHERE scenario = ? AND name = ? AND value = ? AND record = ?", gone)
            self._db.executemany(_TAG, [(record.scenario, *pair, seq) for pair in record.tags.items()])
        if made.prompt is not None:
            self._remember(seq, record, made)
        return True

    # --- one entry, whatever is there already -------------------------------------------------------------------------

    def _knows(self, name: str) -> bool:
        return self._db.execute("SELECT 1 FROM records WHERE id = ?", (name,)).fetchone() is not None

    def _refuse_erased(self, name: str) -> None:
        if self._erased and self._db.execute("SELECT 1 FROM erased WHERE id = ?", (name,)).fetchone():
            raise ConflictError(f"{name} was erased and cannot be stored again; use a fresh receipt")

    def _put(self, record: Record, *, close: bool = True) -> Stored:
        query = "SELECT seq, closed, opening FROM records WHERE id = ?"
        found = self._db.execute(query, (record.id,)).fetchone()
        if found is None:
            self._refuse_erased(record.id)
            self._insert([(record, self._make(record))])
            return Stored(self._seq, duplicate=False)
        seq, closed, opening = found
        if record.status == "open":
            if opening is None or opening != codec.opening(record, codec.pack_meta(record)):
                raise ConflictError(f"record {record.id} is already stored with other content; use a fresh receipt")
            return Stored(seq, duplicate=True)
        if closed is None and not close:
            text = "is still being answered, and only its answer ends it; send this again once it is finished"
            raise ConflictError(f"record {record.id} {text}")
        before = self._lookup.record(record.id)
        assert before is not None
        if closed is not None:
            if codec.content(before) != codec.content(record):
                raise ConflictError(f"record {record.id} is already closed with other content; use a fresh receipt")
            return Stored(closed, duplicate=True)
        if (before.scenario, before.request) != (record.scenario, record.request):
            raise ConflictError(f"record {record.id} was opened for another request; use a fresh receipt")
        self._update(seq, before, record, self._make(record, again=True))
        return Stored(self._event(record.scenario, "closed", record.id), duplicate=False)

    def _report(self, report: Report) -> Stored:
        digest = codec.content(report)
        found = self._db.execute("SELECT seq, digest, body FROM reports WHERE id = ?", (report.id,)).fetchone()
        if found is not None:
            if found[1] != digest and not _same_but_erased(report, found[1], found[2]):
                raise ConflictError(f"report {report.id} is already stored with other content; use a fresh id")
            return Stored(found[0], duplicate=True)
        self._refuse_erased(report.id)
        quoted = []
        for reference in report.references:
            row = self._db.execute("SELECT seq, scenario FROM records WHERE id = ?", (reference,)).fetchone()
            if row is None or row[1] != report.scenario:
                raise MissingError(f"no record {reference} in scenario {report.scenario}", param="references")
            quoted.append(row[0])
        whole = codec.pack(codec.encode(report))
        seq = self._event(report.scenario, "report", report.id)
        self._db.execute(
            "INSERT INTO reports (seq, id, scenario, digest, body, created_at, score) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (seq, report.id, report.scenario, digest, whole, report.created_at, report.score),
        )
        self._db.executemany(
            "INSERT OR IGNORE INTO quotes (record, report, score) VALUES (?, ?, ?)",
            [(record, seq, report.score_of(name)) for record, name in zip(quoted, report.references, strict=True)],
        )
        return Stored(seq, duplicate=False)

    # --- the parts of a row -------------------------------------------------------------------------------------------

    def _make(self, record: Record, *, again: bool = False) -> Made:
        """The row of any record; `again`: its request is stored already. What may be refused comes before any blob."""
        meta = codec.pack_meta(record)
        tokens, prompt, depth = self._tokens(record)
        request = None if again else self._templates.make(record.request)
        rendered = None if record.rendered is None else self._templates.make(record.rendered)
        reply = None if record.reply is None else self._templates.make(record.reply)
        return columns.make(record, meta, request, rendered, reply, tokens, prompt, depth)

    def _blob(self, data: bytes) -> int:
        name = hashlib.blake2b(data, digest_size=24).digest()
        key = self._keys.get(name) or self._fresh.get(name)
        if key is None:
            row = self._db.execute("SELECT key FROM blobs WHERE hash = ?", (name,)).fetchone()
            if row is None:
                packed = codec.pack(data)
                key = self._db.execute("INSERT INTO blobs (hash, data) VALUES (?, ?)", (name, packed)).lastrowid
                assert key is not None
                self.written += len(packed)
            else:
                key = int(row[0])
            self._fresh[name] = key
        return key

    def _tokens(self, record: Record) -> tuple[tuple[bytes | None, int | None, int], bytes | None, int]:
        """Token columns (tokens, parent, shared), the prompt, and how many records it is spread over."""
        sampled = any(choice.output_ids is not None or choice.logprobs is not None for choice in record.choices)
        if record.prompt_ids is None and not sampled:
            return (None, None, 0), None, 0
        try:
            ids = as_bytes(record.prompt_ids or ())
        except (OverflowError, TypeError):
            raise InputError("token ids are integers from 0 to 2**64 - 1") from None
        key = (record.scenario, record.session)
        if record.session is not None and not self._prompts.known(key):
            self._revive(key)
        parent, length = self._prompts.parent(key, ids) or (None, 0)
        tokens = codec.pack_tokens((record.prompt_ids or ())[length:], record.choices)
        return (tokens, parent.seq if parent else None, length), ids, parent.depth + 1 if parent else 0

    def _remember(self, seq: int, record: Record, made: Made) -> None:
        """Only a closed record may become a parent: its tokens never change again."""
        if made.prompt is not None:
            answer = record.choices[0].output_ids if record.choices else None
            sequel = Sequel(seq, made.prompt + as_bytes(answer or ()), made.depth)
            self._sequels.append(((record.scenario, record.session), sequel))

    def _revive(self, key: Key) -> None:
        """Learn the last record of a session that another process wrote, or this one before a restart."""
        query = (
            "SELECT seq FROM records WHERE scenario = ? AND session = ? AND tokens IS NOT NULL AND status != 'open'"
            " ORDER BY seq DESC LIMIT 1"
        )
        row = self._db.execute(query, key).fetchone()
        if row is None:
            return
        try:
            ids, depth = self._lookup.sequence(row[0])
        except (StoreError, zstandard.ZstdError, msgspec.DecodeError):  # damage behind us must not stop new records
            return
        self._prompts.remember(key, Sequel(row[0], as_bytes(ids), depth))


def _same_but_erased(report: Report, digest: bytes, body: bytes) -> bool:
    """Whether a stored report, of which some references were erased since, is this one as it was or as it is now.

    digest: of what was stored at first; body: what is left.
    """
    left = codec.decode(codec.unpack(body), Report)
    if (now := codec.content(left)) == digest:
        return False  # nothing was erased
    kept = tuple(name for name in report.references if name in left.references)
    scores = {name: value for name, value in report.per_receipt.items() if name in left.references}
    return codec.content(dataclasses.replace(report, references=kept, per_receipt=scores)) == now
