"""The record store's file: how it is opened, its numbered migrations, and what its troubles mean for a person.

Knows: SQLite's settings (WAL, every commit synced), the tables, and which error of SQLite is whose fault.
Does not know: what is in a row. Migrations run once, under a file lock, so any number of processes may start at once
on an empty file. A migration is never edited after it shipped; add the next one.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from pathlib import Path

from reef.core.errors import StoreError
from reef.records import fill

APPLICATION = 0x52656566  # "Reef": marks the file as ours

MIGRATIONS = (
    """
    CREATE TABLE events (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,      -- taken inside the committing transaction, so commit order
        scenario TEXT NOT NULL,
        kind TEXT NOT NULL,
        ref TEXT NOT NULL
    );
    CREATE INDEX events_scenario ON events (scenario);
    CREATE TABLE records (
        seq INTEGER PRIMARY KEY,                    -- the record's first event
        id TEXT NOT NULL UNIQUE,
        scenario TEXT NOT NULL,
        status TEXT NOT NULL,
        purpose TEXT NOT NULL,
        release_id TEXT NOT NULL,
        session TEXT,
        owner TEXT,
        closed INTEGER,                             -- the closing event; null while open
        opening BLOB,                               -- digest of what it was opened with; null: stored at once
        asked BLOB,                                 -- digest of scenario and request, only while open
        digest BLOB,                                -- digest of what it was closed with
        request BLOB NOT NULL,                      -- template of literal bytes and blob keys
        rendered BLOB,
        meta BLOB NOT NULL,
        tokens BLOB,
        parent INTEGER,                             -- the record whose tokens the prompt begins with
        shared INTEGER NOT NULL DEFAULT 0           -- how many of them
    );
    CREATE INDEX records_scenario ON records (scenario);
    CREATE INDEX records_session ON records (scenario, session) WHERE session IS NOT NULL;
    CREATE INDEX records_open ON records (owner) WHERE status = 'open';
    CREATE TABLE reports (
        seq INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        scenario TEXT NOT NULL,
        digest BLOB NOT NULL,
        body BLOB NOT NULL
    );
    CREATE INDEX reports_scenario ON reports (scenario);
    CREATE TABLE quotes (record INTEGER, report INTEGER, PRIMARY KEY (record, report)) WITHOUT ROWID;
    CREATE TABLE blobs (key INTEGER PRIMARY KEY, hash BLOB NOT NULL UNIQUE, data BLOB NOT NULL);
    CREATE TABLE serving (scenario TEXT PRIMARY KEY, release_id TEXT NOT NULL, epoch INTEGER NOT NULL);
    CREATE TABLE scenarios (name TEXT PRIMARY KEY, settings TEXT NOT NULL, created_at REAL NOT NULL, archived_at REAL);
    CREATE TABLE board (version INTEGER NOT NULL);
    INSERT INTO board VALUES (1);
    """,
    """
    ALTER TABLE records ADD COLUMN reply BLOB;          -- a template like request
    ALTER TABLE records ADD COLUMN answer_id TEXT;
    ALTER TABLE records ADD COLUMN received_at REAL;    -- unix seconds
    CREATE INDEX records_answer ON records (answer_id) WHERE answer_id IS NOT NULL;
    CREATE INDEX records_time ON records (scenario, received_at);
    DROP INDEX records_scenario;                        -- a scenario's records are walked by its events
    ALTER TABLE quotes ADD COLUMN score REAL;           -- what the report gives this record
    ALTER TABLE reports ADD COLUMN created_at REAL;
    ALTER TABLE reports ADD COLUMN score REAL;          -- the report's own
    CREATE TABLE tags (
        scenario TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, record INTEGER NOT NULL,
        PRIMARY KEY (scenario, name, value, record)
    ) WITHOUT ROWID;
    CREATE TABLE tokens (
        name TEXT PRIMARY KEY,
        digest BLOB NOT NULL UNIQUE,                    -- SHA-256 of the token's text, which is nowhere
        rights TEXT NOT NULL,                           -- names, joined by spaces
        scenarios TEXT,                                 -- a JSON list of patterns; null: every scenario
        limits TEXT NOT NULL DEFAULT '{}',              -- JSON: requests_per_minute, tokens_per_minute, concurrent
        release_id TEXT,                                -- an episode's token answers with this release only
        created_at REAL NOT NULL,
        expires_at REAL,
        revoked_at REAL
    );
    """,
    """
    CREATE INDEX records_parent ON records (parent) WHERE parent IS NOT NULL;
    CREATE TABLE erased (id TEXT PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID;  -- ids that must not come back
    CREATE TABLE keeping (
        generation INTEGER NOT NULL,    -- grows when rows or blobs were removed: what a writer remembers may be gone
        unswept INTEGER NOT NULL        -- records removed since blobs were last swept
    );
    INSERT INTO keeping VALUES (0, 0);
    """,
    """
    CREATE TABLE acts (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        scenario TEXT NOT NULL,
        kind TEXT NOT NULL,
        ref TEXT NOT NULL,
        actor TEXT NOT NULL,
        reason TEXT NOT NULL,
        at REAL NOT NULL,
        detail TEXT NOT NULL,
        mark TEXT UNIQUE                            -- the same mark is told once only; null: tell always
    );
    CREATE INDEX acts_scenario ON acts (scenario);
    CREATE INDEX acts_ref ON acts (ref);
    CREATE TABLE pins (
        scenario TEXT PRIMARY KEY,
        release_id TEXT NOT NULL,
        actor TEXT NOT NULL,
        reason TEXT NOT NULL,
        at REAL NOT NULL
    ) WITHOUT ROWID;
    """,
    """
    CREATE TABLE asks (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        scenario TEXT NOT NULL,
        part TEXT NOT NULL,
        kind TEXT NOT NULL,
        body TEXT NOT NULL,                         -- JSON
        actor TEXT NOT NULL,                        -- the token's name
        created_at REAL NOT NULL,
        state TEXT NOT NULL,
        said TEXT NOT NULL,
        candidate TEXT,
        release TEXT,
        changed_at REAL NOT NULL
    );
    CREATE INDEX asks_scenario ON asks (scenario);
    CREATE INDEX asks_open ON asks (scenario) WHERE state IN ('queued', 'taken');
    """,
)

FILLS = {1: fill.times_tags_and_scores}  # what a migration needs beside its script, by its place above


def connect(path: Path, *, busy: float = 5.0, reading: bool = False, create: bool = False) -> sqlite3.Connection:
    """A connection with the store's settings. `busy`: seconds to wait for another process's transaction.

    Without `create` a file that is missing stays missing: an empty one in its place would, once the folder is back,
    make SQLite throw away the log of the real one.
    """
    place = f"{path.absolute().as_uri()}?mode={'rwc' if create else 'rw'}"
    connection = sqlite3.connect(place, uri=True, timeout=busy, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA journal_size_limit = 67108864")
        connection.execute("PRAGMA cache_size = -8192")
        connection.execute("PRAGMA secure_delete = ON")  # what is removed or replaced is gone from the file's bytes
        if reading:
            connection.execute("PRAGMA query_only = ON")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


class Turn:
    """Write transactions, in turn with other processes: whoever waits is next, and within a millisecond or so.

    SQLite alone sleeps up to 100 ms between attempts and lets a busy writer pass again and again. Here the one who
    waits for the write lock holds the turn, so a writer that comes back stands behind it. `own`: the connection is
    used in turns only and never waits by itself, which spares two statements a transaction.
    """

    def __init__(self, path: Path, busy: float, *, own: bool = False) -> None:
        self._busy = busy
        self._own = own
        self._file = _lock_file(path)

    def begin(self, connection: sqlite3.Connection) -> None:
        """BEGIN IMMEDIATE, waiting at most `busy` seconds; then SQLite's own error."""
        deadline = time.monotonic() + self._busy
        if not self._own:
            connection.execute("PRAGMA busy_timeout = 0")
        try:
            pause = 0.0002
            while not self._take() and time.monotonic() < deadline:
                time.sleep(pause := min(1.5 * pause, 0.002))
            pause = 0.0002
            while not _begun(connection, last=time.monotonic() >= deadline):
                time.sleep(pause := min(1.5 * pause, 0.002))
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            if not self._own:
                connection.execute(f"PRAGMA busy_timeout = {round(1000 * self._busy)}")

    def close(self) -> None:
        os.close(self._file)

    def _take(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _begun(connection: sqlite3.Connection, *, last: bool) -> bool:
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if last or error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
            raise
        return False
    return True


def _lock_file(path: Path, *, create: bool = False) -> int:
    try:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path.with_name(path.name + "-lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        reason = f"{error.strerror}; check the folder's owner and rights"
        raise StoreError(f"cannot write in {path.parent}: {reason}") from None


def migrate(path: Path) -> None:
    """Bring the file to the newest schema, creating it when missing. Safe in many processes at once; StoreError."""
    lock = _lock_file(path, create=True)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = connect(path, create=True)
        try:
            _advance(connection, path)
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise trouble(error, path) from error
    finally:
        os.close(lock)


def _advance(connection: sqlite3.Connection, path: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if tables and application != APPLICATION:
        raise StoreError(f"{path} is another program's database; choose another state folder or move the file away")
    if version > len(MIGRATIONS):
        raise StoreError(f"{path} was written by a newer Reef (schema {version}); install that version or a newer one")
    if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        connection.execute("PRAGMA journal_mode = WAL")
    for number in range(version, len(MIGRATIONS)):
        script = f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {number + 1};"
        try:
            connection.executescript(f"BEGIN IMMEDIATE; {MIGRATIONS[number]} {script}")
            if (complete := FILLS.get(number)) is not None:
                complete(connection)
            connection.execute("COMMIT")
        except sqlite3.Error:
            if connection.in_transaction:
                connection.rollback()
            raise


_MESSAGES = {
    sqlite3.SQLITE_BUSY: "the record store {path} is locked by another process; retry, and if it stays locked, "
    "close the program that has it open",
    sqlite3.SQLITE_READONLY: "the record store {path} is read-only; give the server's user write access to it",
    sqlite3.SQLITE_CANTOPEN: "cannot open the record store {path}; check that its folder exists and is writable",
    sqlite3.SQLITE_FULL: "the disk of the record store {path} is full; free some space and retry: nothing was half "
    "stored",
    sqlite3.SQLITE_IOERR: "the disk of the record store {path} failed a read or write; check its space, the process's "
    "file size limit and the disk, then retry: nothing was half stored",
    sqlite3.SQLITE_NOTADB: "{path} is not a record store (the file is not a database); move it away or restore a "
    "backup",
    sqlite3.SQLITE_CORRUPT: "the record store {path} is damaged; stop the server and restore a backup, or salvage it "
    "with `sqlite3 {path} .recover`",
}
_SAME = {
    sqlite3.SQLITE_LOCKED: sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_PERM: sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_AUTH: sqlite3.SQLITE_CANTOPEN,
}


def environmental(error: sqlite3.Error) -> bool:
    """Whether the machine is at fault (lock, disk, rights), rather than the one entry being written."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return _SAME.get(code, code) in _MESSAGES


def trouble(error: sqlite3.Error, path: Path) -> StoreError:
    """SQLite's error as a sentence that says what to do."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    message = _MESSAGES.get(_SAME.get(code, code), "the record store {path} failed: {error}")
    return StoreError(message.format(path=path, error=error))
