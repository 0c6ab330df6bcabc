"""What each scenario serves now, and which scenarios there are: a few rows that every process follows.

Knows: names, settings as opaque JSON, release ids, epochs. Does not know: what a release is or who loads it.
Calls are short and blocking; `version` costs some microseconds, so it can be asked every 50 ms.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from reef.core.errors import MissingError
from reef.core.failpoint import failpoint
from reef.core.nouns import Json, Serving
from reef.records import schema

_SHOWN = (
    "SELECT scenario, release_id, epoch FROM serving LEFT JOIN scenarios ON name = scenario WHERE archived_at IS NULL"
)


class Board:
    """Rows of the record store's own file. May be used from any thread. Raises StoreError like the store."""

    def __init__(self, path: Path, *, busy: float = 5.0) -> None:
        self._path = path
        self._lock = threading.Lock()
        schema.migrate(path)
        with self._troubles():
            self._db = schema.connect(path, busy=busy)
        self._turn = schema.Turn(path, busy)
        self._seen: tuple[int, int] | None = None  # (SQLite's data version, the board's version then)

    def get(self, scenario: str) -> Serving | None:
        """What a scenario serves; None when it is unknown or archived."""
        with self._troubles():
            row = self._db.execute(_SHOWN + " AND scenario = ?", (scenario,)).fetchone()
        return Serving(*row) if row else None

    def all(self) -> dict[str, Serving]:
        with self._troubles():
            return {row[0]: Serving(*row) for row in self._db.execute(_SHOWN).fetchall()}

    def flip(self, scenario: str, release_id: str) -> Serving:
        """Serve this release from now on. The epoch grows by one, unless it is served already."""
        with self._troubles(), self._write():
            row = self._db.execute("SELECT release_id, epoch FROM serving WHERE scenario = ?", (scenario,)).fetchone()
            before, epoch = row or (None, 0)
            if before != release_id:
                epoch += 1
                self._db.execute("INSERT OR REPLACE INTO serving VALUES (?, ?, ?)", (scenario, release_id, epoch))
                self._changed()
            failpoint("board.before_flip")
        failpoint("board.after_flip")
        return Serving(scenario, release_id, epoch)

    def version(self) -> int:
        """Grows when anything on the board changed, by whichever process; records do not count."""
        with self._troubles():
            (data,) = self._db.execute("PRAGMA data_version").fetchone()
            if self._seen is None or self._seen[0] != data:
                self._seen = (data, self._db.execute("SELECT version FROM board").fetchone()[0])
            return self._seen[1]

    def create_scenario(self, name: str, settings: Mapping[str, Json]) -> bool:
        """Whether it is new (or was archived and is back, with these settings). False: it is there already."""
        with self._troubles(), self._write():
            done = self._db.execute(
                "INSERT INTO scenarios VALUES (?, ?, ?, NULL) ON CONFLICT (name) DO UPDATE"
                " SET settings = excluded.settings, archived_at = NULL WHERE archived_at IS NOT NULL",
                (name, json.dumps(settings), time.time()),
            )
            if done.rowcount > 0:
                self._changed()
            return done.rowcount > 0

    def change_scenario(self, name: str, settings: Mapping[str, Json]) -> None:
        """Replace a scenario's settings. MissingError when there is none of that name."""
        sql = "UPDATE scenarios SET settings = ? WHERE name = ? AND archived_at IS NULL"
        self._update(sql, json.dumps(settings), name)

    def swap_scenario(self, name: str, was: Mapping[str, Json], settings: Mapping[str, Json]) -> bool:
        """Replace a scenario's settings if they still are `was`; they may be of a scenario that has no row yet."""
        with self._troubles(), self._write():
            row = self._db.execute("SELECT settings, archived_at FROM scenarios WHERE name = ?", (name,)).fetchone()
            if row is not None and (row[1] is not None or json.loads(row[0]) != dict(was)):
                return False
            self._db.execute(
                "INSERT INTO scenarios VALUES (?, ?, ?, NULL) ON CONFLICT (name) DO UPDATE"
                " SET settings = excluded.settings",
                (name, json.dumps(settings), time.time()),
            )
            self._changed()
            return True

    def names(self) -> list[str]:
        """Every scenario that ever served anything, the archived ones too."""
        with self._troubles():
            return [name for (name,) in self._db.execute("SELECT scenario FROM serving ORDER BY scenario").fetchall()]

    def archived(self, name: str) -> bool:
        """Whether there is a scenario of this name that was archived."""
        with self._troubles():
            row = self._db.execute("SELECT archived_at FROM scenarios WHERE name = ?", (name,)).fetchone()
        return row is not None and row[0] is not None

    def scenarios(self) -> dict[str, dict[str, Json]]:
        """Settings by name, in order of creation, without the archived ones."""
        query = "SELECT name, settings FROM scenarios WHERE archived_at IS NULL ORDER BY created_at, name"
        with self._troubles():
            return {name: json.loads(settings) for name, settings in self._db.execute(query).fetchall()}

    def archive(self, name: str) -> None:
        """Hide a scenario; its records and chain stay. MissingError when there is none of that name."""
        self._update("UPDATE scenarios SET archived_at = ? WHERE name = ? AND archived_at IS NULL", time.time(), name)

    def restore(self, name: str) -> None:
        """Show an archived scenario again, with its settings. MissingError when none of that name is archived."""
        with self._troubles(), self._write():
            sql = "UPDATE scenarios SET archived_at = NULL WHERE name = ? AND archived_at IS NOT NULL"
            if self._db.execute(sql, (name,)).rowcount == 0:
                raise MissingError(f"no scenario {name!r} is archived", param="scenario")
            self._changed()

    def probe(self) -> None:
        """Write and sync one unchanged row. StoreError when the store cannot be written now."""
        with self._troubles(), self._write():
            self._db.execute("UPDATE board SET version = version")

    @contextlib.contextmanager
    def look(self) -> Iterator[sqlite3.Connection]:
        """The connection, for a neighbour's table (tokens), to read."""
        with self._troubles():
            yield self._db

    @contextlib.contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """A transaction on a neighbour's table that everyone who follows the board notices."""
        with self._troubles(), self._write():
            yield self._db
            self._changed()

    def close(self) -> None:
        with self._lock:
            self._db.close()
            self._turn.close()

    def _update(self, sql: str, value: str | float, name: str) -> None:
        with self._troubles(), self._write():
            if self._db.execute(sql, (value, name)).rowcount == 0:
                raise MissingError(f"no scenario {name!r}; `reef scenarios` lists them")
            self._changed()

    def _changed(self) -> None:
        self._db.execute("UPDATE board SET version = version + 1")
        self._seen = None  # SQLite's data version does not move by our own writes

    @contextlib.contextmanager
    def _write(self) -> Iterator[None]:
        self._turn.begin(self._db)
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _troubles(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                raise schema.trouble(error, self._path) from error
