"""A small SQLite file of one process: how it is opened, migrated, written in transactions, and what its troubles mean.

Knows: WAL, every commit synced, numbered migrations run once under a lock, errors as sentences.
Does not know: what is in a row. (The record store, which many processes write at once, is `records`.)
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from reef.core.errors import StoreError


class Database:
    """Used from one thread. StoreError when the file cannot be opened, read or written."""

    def __init__(self, path: Path | str, migrations: Sequence[str], *, reading: bool = False) -> None:
        """`migrations` are scripts, each run once, in order: never edit one that was released. `reading`: for another
        process, which only looks and finds the file as it is."""
        self._name = Path(path).name
        try:
            if reading:
                address = f"{Path(path).absolute().as_uri()}?mode=ro"
                self._base = sqlite3.connect(address, uri=True, isolation_level=None, timeout=5.0)
                return
            self._base = sqlite3.connect(path, isolation_level=None, timeout=30.0)
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA synchronous=FULL")
            self._base.execute("PRAGMA secure_delete=ON")  # what was deleted is gone from the file
            self._migrate(migrations)
        except sqlite3.Error as error:
            raise StoreError(f"{path} cannot be opened ({error}); check permissions and free space") from None

    def close(self) -> None:
        self._base.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """One transaction, durable at its end; nothing of it when it fails."""
        try:
            self._base.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._base.execute("COMMIT")
            except BaseException:
                if self._base.in_transaction:
                    self._base.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise StoreError(f"{self._name} cannot be written ({error}); check free space and permissions") from None

    def _read(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            return self._base.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            said = f"{self._name} cannot be read ({error}); restore it, or move it away and restart"
            raise StoreError(said) from None

    def _migrate(self, migrations: Sequence[str]) -> None:
        self._base.execute("BEGIN IMMEDIATE")
        try:
            done = int(self._base.execute("PRAGMA user_version").fetchone()[0])
            if done > len(migrations):
                raise StoreError(f"{self._name} was written by a newer Reef; use that version, or a fresh state folder")
            for number, script in enumerate(migrations[done:], done + 1):
                for statement in script.split(";"):
                    self._base.execute(statement)
                self._base.execute(f"PRAGMA user_version={number}")
            self._base.execute("COMMIT")
        except BaseException:
            self._base.execute("ROLLBACK")
            raise
