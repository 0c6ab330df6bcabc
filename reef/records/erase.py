"""Taking records out of the store: their rows, what hangs on them, and the blobs that nothing needs any more.

Knows: the tables, which rows lean on which, and how to work beside live writers in short transactions.
Does not know: why something goes (`keep`), or releases.

- A prompt that begins with a removed record's tokens is rewritten first, so every other record reads as before.
- A report goes with the last record it quotes; one that quotes others keeps those only.
- Every removal moves `keeping.generation`, at which writers forget which blobs and prompts they know (`Rows.begin`).
- Connections have `secure_delete` on: what is removed is zeros in the file, and `scrub` empties the log beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from reef.core.errors import StoreError
from reef.core.failpoint import failpoint
from reef.core.nouns import Report
from reef.records import codec, schema

BATCH = 100  # records a transaction removes
PAGE = 500  # rows read at once
SWEPT = 8 * 1024 * 1024  # bytes of blobs a transaction removes, about
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Removed:
    """What went, and the store's size after: `live` bytes are in use, the rest of the file is used again."""

    records: int = 0
    reports: int = 0
    blobs: int = 0
    live: int = 0
    file: int = 0

    def __add__(self, other: Removed) -> Removed:
        return Removed(
            self.records + other.records,
            self.reports + other.reports,
            self.blobs + other.blobs,
            other.live or self.live,
            other.file or self.file,
        )


class Halted(Exception):
    """Asked to stop between two steps; what was done is done, and the next run goes on."""


class Store:
    """A connection for removing, in turn with the writers. `pause`: seconds of rest for each second of work.

    `halt`: once it is set, the next step raises Halted.
    """

    def __init__(
        self, path: Path, *, busy: float = 30.0, pause: float = 1.0, halt: threading.Event | None = None
    ) -> None:
        schema.migrate(path)
        self.path = path
        self.pause = pause
        self.halt = halt or threading.Event()
        self.db = schema.connect(path, busy=busy)
        self._turn = schema.Turn(path, busy)

    def close(self) -> None:
        self.db.close()
        self._turn.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A write transaction; after it this thread rests, so that live writers come first."""
        self.check()
        with troubles(self.path):
            self._turn.begin(self.db)
            begun = time.monotonic()
            try:
                yield self.db
                self.db.execute("COMMIT")
            except BaseException:
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")
                raise
        if self.pause:
            self.halt.wait(min(1.0, self.pause * (time.monotonic() - begun)))

    def check(self) -> None:
        if self.halt.is_set():
            raise Halted

    def sizes(self) -> tuple[int, int]:
        """Bytes in use, and bytes of the file."""
        pages, free, size = (
            self.db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size, pages * size


@contextlib.contextmanager
def troubles(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise schema.trouble(error, path) from error


def remove(store: Store, ids: Sequence[str], *, forever: bool) -> Removed:
    """Remove closed records by id, in batches; unknown ids are passed over. `forever`: they can never come back.

    An open record is removed only with `forever`; its close is then answered as a duplicate.
    """
    done = Removed()
    for start in range(0, len(ids), BATCH):
        part = ids[start : start + BATCH]
        with store.writing() as db:
            done += _batch(db, part, forever)
            failpoint("keep.before_commit")
        failpoint("keep.after_commit")
    return done


def unreport(store: Store, ids: Sequence[str]) -> Removed:
    """Remove reports by id, for good; the records that they quote stay. Unknown ids are passed over."""
    done = 0
    for start in range(0, len(ids), BATCH):
        part = ids[start : start + BATCH]
        with store.writing() as db:
            for name in part:
                db.execute("INSERT OR IGNORE INTO erased VALUES (?, ?)", (name, time.time()))
                row = db.execute("SELECT seq, body FROM reports WHERE id = ?", (name,)).fetchone()
                if row is None:
                    continue
                for quoted in codec.decode(codec.unpack(row[1]), Report).references:
                    db.execute(
                        "DELETE FROM quotes WHERE report = ? AND record = (SELECT seq FROM records WHERE id = ?)",
                        (row[0], quoted),
                    )
                db.execute("DELETE FROM reports WHERE seq = ?", (row[0],))
                db.execute("DELETE FROM events WHERE seq = ?", (row[0],))
                done += 1
            failpoint("keep.before_commit")
        failpoint("keep.after_commit")
    return Removed(0, done)


def _batch(db: sqlite3.Connection, ids: Sequence[str], forever: bool) -> Removed:
    marks = ", ".join("?" * len(ids))
    if forever:
        now = time.time()
        db.executemany("INSERT OR IGNORE INTO erased VALUES (?, ?)", [(name, now) for name in ids])
    rows = db.execute(
        f"SELECT seq, scenario, closed, meta FROM records WHERE id IN ({marks})"  # noqa: S608
        + ("" if forever else " AND status != 'open'")
        + " ORDER BY seq DESC",
        list(ids),
    ).fetchall()
    touched: dict[int, None] = {}
    for seq, scenario, closed, meta in rows:
        _rebase(db, seq)
        tags = codec.unpack_meta(meta, "complete", "live").tags
        db.executemany(
            "DELETE FROM tags WHERE scenario = ? AND name = ? AND value = ? AND record = ?",
            [(scenario, name, value, seq) for name, value in tags.items()],
        )
        touched |= dict.fromkeys(row[0] for row in db.execute("SELECT report FROM quotes WHERE record = ?", (seq,)))
        db.execute("DELETE FROM quotes WHERE record = ?", (seq,))
        db.execute("DELETE FROM events WHERE seq IN (?, ?)", (seq, closed))
        db.execute("DELETE FROM records WHERE seq = ?", (seq,))
    reports = sum(_unquote(db, seq, forever) for seq in touched)
    if rows:
        db.execute("UPDATE keeping SET generation = generation + 1, unswept = unswept + ?", (len(rows),))
    return Removed(len(rows), reports)


def _rebase(db: sqlite3.Connection, seq: int) -> None:
    """Let the records whose prompts begin with this one's tokens lean on its parent instead, or stand alone."""
    children = db.execute("SELECT seq, tokens, shared FROM records WHERE parent = ?", (seq,)).fetchall()
    if not children:
        return
    row = db.execute("SELECT tokens, parent, shared FROM records WHERE seq = ?", (seq,)).fetchone()
    tokens, parent, shared = row  # read here: an earlier removal of this batch may have moved it
    suffix, answers = codec.unpack_tokens(tokens)
    own = suffix + (answers[0][0] if answers else ())
    for child, packed, length in children:
        if length <= shared:
            db.execute("UPDATE records SET parent = ? WHERE seq = ?", (parent, child))
            continue
        columns = msgspec.msgpack.decode(codec.unpack(packed), type=list[bytes])
        columns[0] = codec.pack_ids(own[: length - shared] + codec.unpack_tokens(packed)[0])
        moved = (codec.pack(msgspec.msgpack.encode(columns)), parent, shared, child)
        db.execute("UPDATE records SET tokens = ?, parent = ?, shared = ? WHERE seq = ?", moved)


def _unquote(db: sqlite3.Connection, seq: int, forever: bool) -> int:
    """A report after some of what it quotes is gone: without it (0), or gone itself (1). Its digest stays, so that a
    retry of the report as it was is still known."""
    row = db.execute("SELECT id, body FROM reports WHERE seq = ?", (seq,)).fetchone()
    if row is None:
        return 0
    report = codec.decode(codec.unpack(row[1]), Report)
    left = tuple(
        name for name in report.references if db.execute("SELECT 1 FROM records WHERE id = ?", (name,)).fetchone()
    )
    if left:
        scores = {name: value for name, value in report.per_receipt.items() if name in left}
        report = dataclasses.replace(report, references=left, per_receipt=scores)
        db.execute("UPDATE reports SET body = ? WHERE seq = ?", (codec.pack(codec.encode(report)), seq))
        return 0
    if forever:
        db.execute("INSERT OR IGNORE INTO erased VALUES (?, ?)", (row[0], time.time()))
    db.execute("DELETE FROM reports WHERE seq = ?", (seq,))
    db.execute("DELETE FROM events WHERE seq = ?", (seq,))
    return 1


# --- blobs ------------------------------------------------------------------------------------------------------------


def sweep(store: Store, say: Progress | None = None) -> Removed:
    """Remove the blobs that no record refers to. Memory: one bit for each blob.

    Every record is looked at once, without a lock; what writers store meanwhile is found again through the event log,
    the last of it inside each transaction that removes.
    """
    with troubles(store.path):
        (unswept,) = store.db.execute("SELECT unswept FROM keeping").fetchone()
        if not unswept:
            return Removed(0, 0, 0, *store.sizes())
        marks = _Marks(store.db)
        for done in marks.all():
            store.check()
            if say:
                say(f"looked at {done} records")
        gone = at = 0
        while True:
            found, at = marks.loose(at)
            if not found:
                break
            with store.writing() as db:
                marks.follow()
                free = [key for key in found if not marks.has(key)]
                db.executemany("DELETE FROM blobs WHERE key = ?", [(key,) for key in free])
                if free:
                    db.execute("UPDATE keeping SET generation = generation + 1")
                failpoint("keep.half_swept")
            gone += len(free)
            if say:
                say(f"removed {gone} blobs")
        with store.writing() as db:
            db.execute("UPDATE keeping SET unswept = max(0, unswept - ?)", (unswept,))
        return Removed(0, 0, gone, *store.sizes())


class _Marks:
    """Which blobs, of those there were at the start, are referred to."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        (self._event,) = db.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()
        (self._last,) = db.execute("SELECT coalesce(max(key), 0) FROM blobs").fetchone()
        self._bits = bytearray(self._last // 8 + 1)

    def has(self, key: int) -> bool:
        return bool(self._bits[key >> 3] & 1 << (key & 7))

    def all(self) -> Iterator[int]:
        """Look at every record; how many that were, now and then."""
        query = "SELECT seq, request, rendered, reply FROM records WHERE seq > ? ORDER BY seq LIMIT ?"
        at = done = 0
        while rows := self._db.execute(query, (at, PAGE)).fetchall():
            self._mark(rows)
            at = rows[-1][0]
            done += len(rows)
            yield done

    def follow(self) -> None:
        """What was stored since the last look."""
        query = (
            "SELECT events.seq, request, rendered, reply FROM events LEFT JOIN records ON records.id = events.ref"
            " WHERE events.seq > ? ORDER BY events.seq LIMIT ?"
        )
        while rows := self._db.execute(query, (self._event, PAGE)).fetchall():
            self._mark(rows)
            self._event = rows[-1][0]

    def loose(self, at: int) -> tuple[list[int], int]:
        """The next unmarked blobs after key `at`, and where to go on."""
        found: list[int] = []
        size = 0
        rows = self._db.execute(
            "SELECT key, length(data) FROM blobs WHERE key > ? AND key <= ? ORDER BY key", (at, self._last)
        )
        for key, length in rows:
            at = key
            if not self.has(key):
                found.append(key)
                size += length
                if len(found) >= PAGE or size >= SWEPT:
                    break
        rows.close()
        return found, at

    def _mark(self, rows: Iterable[Sequence[bytes | int | None]]) -> None:
        for _, *templates in rows:
            for template in templates:
                if not isinstance(template, bytes):
                    continue
                for key in keys(template):
                    if key <= self._last:
                        self._bits[key >> 3] |= 1 << (key & 7)


def keys(template: bytes) -> Iterator[int]:
    """The blobs a template refers to."""
    key = 0
    for part in msgspec.msgpack.decode(codec.unpack(template), type=list[bytes | int]):
        if isinstance(part, int):
            key += part
            yield key


def scrub(store: Store, *, patience: float = 10.0) -> bool:
    """Empty the write-ahead log, where removed bytes live on; False when a reader keeps it from being emptied."""
    until = time.monotonic() + patience
    while True:
        with troubles(store.path):
            (busy, _, _) = store.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if not busy:
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.05)


def check(path: Path) -> None:
    """StoreError when there is no store at this path."""
    if not path.is_file():
        raise StoreError(f"there is no record store {path}; name the state folder with --reef.state_dir FOLDER")
