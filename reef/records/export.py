"""Reading the whole store in order, a page at a time, beside whatever else uses the file.

Knows: how to page through records and the reports on them by event sequence, with bounded memory and short reads.
Does not know: what is made of them (`cli/shapes.py`), or where they go.

- Order is that of the log: a report always comes after the records it quotes.
- No read lasts longer than a page, so a long export keeps no writer's log from being emptied.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from reef.core.nouns import Record, Report
from reef.records import Query, codec, erase, pages, schema
from reef.records.lookup import Lookup

PAGE = 200  # entries
SIZE = 4 * 1024 * 1024  # bytes of bodies in a page, about


@dataclass(slots=True)
class Tally:
    """What was written, and what was left out, by reason."""

    lines: int = 0
    read: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    def skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


class Reader:
    """One reading connection. StoreError when there is no store at the path."""

    def __init__(self, path: Path) -> None:
        erase.check(path)
        schema.migrate(path)
        self._path = path
        with erase.troubles(path):
            self._db = schema.connect(path, reading=True)
        self._lookup = Lookup(self._db)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def count(self, query: Query) -> int:
        """How many records a query matches."""
        sql, values = pages.select(replace(query, limit=-1), "seq")
        with erase.troubles(self._path):
            return int(self._db.execute(f"SELECT count(*) FROM ({sql})", values).fetchone()[0])  # noqa: S608

    def entries(self, query: Query, tally: Tally, *, reports: bool) -> Iterator[Record | Report]:
        """Every closed record that matches, oldest first; with `reports`, each report that quotes only such records."""
        at = 0
        while True:
            with erase.troubles(self._path):
                found, at = self._page(query, tally, at, reports)
            if at < 0:
                return
            yield from found

    def on(self, receipt: str) -> list[Report]:
        """The reports on a record, oldest first."""
        with erase.troubles(self._path):
            return self._lookup.reports_on(receipt)

    def record(self, receipt: str) -> Record | None:
        with erase.troubles(self._path):
            return self._lookup.record(receipt)

    def _page(self, query: Query, tally: Tally, at: int, reports: bool) -> tuple[list[Record | Report], int]:
        """The entries after `at`, and the place to go on from; -1 when there is nothing more."""
        self._db.execute("BEGIN")
        try:
            sql, values = pages.select(replace(query, limit=PAGE), "seq, id, status", after=at)
            rows = [(seq, name, status) for seq, name, status in self._db.execute(sql, values)]
            if reports:
                sql, values = pages.select(Query(query.scenario, kind="report", limit=PAGE), "seq, id", after=at)
                rows = sorted([*rows, *((seq, name, None) for seq, name in self._db.execute(sql, values))])[:PAGE]
            found: list[Record | Report] = []
            size = 0
            for seq, name, status in rows:
                if size >= SIZE:
                    return found, at
                at = seq
                entry = self._report(name, query, tally) if status is None else self._record(name, status, tally)
                if entry is not None:
                    found.append(entry)
                    size += len(entry.request) if isinstance(entry, Record) else 1024
            return found, at if rows else -1
        finally:
            self._db.execute("ROLLBACK")

    def _record(self, name: str, status: str, tally: Tally) -> Record | None:
        if status == "open":
            tally.skip("the answer is still under way")
            return None
        tally.read += 1
        return self._lookup.record(name)

    def _report(self, name: str, query: Query, tally: Tally) -> Report | None:
        row = self._db.execute("SELECT body FROM reports WHERE id = ?", (name,)).fetchone()
        report = codec.decode(codec.unpack(row[0]), Report)
        if not all(self._matches(receipt, query) for receipt in report.references):
            tally.skip("a report that quotes records which are left out")
            return None
        return report

    def _matches(self, receipt: str, query: Query) -> bool:
        row = self._db.execute("SELECT seq, status FROM records WHERE id = ?", (receipt,)).fetchone()
        if row is None or row[1] == "open":
            return False
        sql, values = pages.select(replace(query, before=row[0] + 1, limit=1), "seq", after=row[0] - 1)
        return self._db.execute(sql, values).fetchone() is not None


class Scores:
    """Answers by prompt and score, on disk: what is compared later need not fit into memory."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)  # a temporary file that SQLite removes
        self._db.execute(
            "CREATE TABLE answers (place INTEGER PRIMARY KEY, prompt BLOB, receipt TEXT, choice INT, score REAL)"
        )
        self._db.execute("BEGIN")

    def __enter__(self) -> Scores:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def add(self, prompt: bytes, receipt: str, choice: int, score: float) -> None:
        self._db.execute("INSERT INTO answers VALUES (NULL, ?, ?, ?, ?)", (prompt, receipt, choice, score))

    def groups(self) -> Iterator[Sequence[tuple[str, int, float]]]:
        """(receipt, choice, score) of the answers to one prompt, the best first; only where scores differ."""
        self._db.execute("CREATE INDEX prompts ON answers (prompt)")
        prompts = self._db.execute(
            "SELECT prompt FROM answers GROUP BY prompt HAVING min(score) < max(score) ORDER BY min(place)"
        )
        for (prompt,) in prompts:
            query = "SELECT receipt, choice, score FROM answers WHERE prompt = ? ORDER BY score DESC, place"
            yield self._db.execute(query, (prompt,)).fetchall()
