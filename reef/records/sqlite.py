"""The default record store: one SQLite file, written by one thread a process, read by a few on their own connections.

Knows: which thread does what, and what a dead process left open.
Does not know: tables (`rows`), batches (`writer`), or HTTP. Several processes may hold the same file at once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import zstandard

from reef.core.errors import ConflictError, InputError, StoreError
from reef.core.nouns import Event, Record, Report
from reef.records import Query, Stored, schema
from reef.records.rows import Rows
from reef.records.writer import Writer

READERS = 2
T = TypeVar("T")


class SqliteStore:
    """`records.RecordStore` over a SQLite file. `owner` names this process incarnation in the records it opens.

    busy: seconds to wait for another process's transaction. entries, size: how much may wait to be written (bytes).
    """

    def __init__(
        self, path: Path, *, owner: str, busy: float = 5.0, entries: int = 8192, size: int = 256 * 1024 * 1024
    ) -> None:
        self._path = path
        self._owner = owner
        self._busy = busy
        self._writer = Writer(path, busy=busy, entries=entries, size=size)
        self._readers = concurrent.futures.ThreadPoolExecutor(READERS, thread_name_prefix="records-reader")
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._state = "new"

    async def start(self) -> None:
        """Create or migrate the file and begin to write. StoreError says what is wrong with it."""
        await asyncio.to_thread(schema.migrate, self._path)
        self._writer.start()
        self._state = "open"

    async def append(self, entry: Record | Report) -> Stored:
        """See `RecordStore.append`. An append that is cancelled while it waits is stored all the same."""
        if self._state == "new":
            raise StoreError("the record store is not started; await start() first")
        if isinstance(entry, Record) and entry.status == "open" and entry.owner is None:
            entry = dataclasses.replace(entry, owner=self._owner)
        return await self._writer.submit(entry)

    async def get(self, ids: Sequence[str]) -> list[Record | Report]:
        return await self._read(lambda rows: rows.get(ids))

    async def events(self, scenario: str, after: int, limit: int) -> list[Event]:
        return await self._read(lambda rows: rows.events(scenario, after, limit))

    async def find(self, query: Query) -> list[tuple[int, Record | Report]]:
        if query.kind not in ("record", "report"):
            raise InputError(f"no kind {query.kind!r}; ask for record or report", param="kind")
        if query.kind == "report":
            for name in ("session", "release_id", "status", "purpose"):
                if getattr(query, name) is not None:
                    raise InputError(f"reports have no {name}; drop that filter", param=name)
        return await self._read(lambda rows: rows.find(query))

    async def reports_on(self, receipt: str) -> list[Report]:
        """Every report that quotes this record, oldest first; empty when there is none."""
        return await self._read(lambda rows: rows.reports_on(receipt))

    async def recover(self, owner_prefix_alive: Callable[[str], bool]) -> int:
        """Close as `interrupted` what dead owners left open; how many records that were.

        `owner_prefix_alive` tells of an owner whether its process lives. What this store's own owner opened stays.
        """
        closed = 0
        for name, owner in await self._read(lambda rows: rows.open_records()):
            if owner == self._owner or (owner is not None and owner_prefix_alive(owner)):
                continue
            (record,) = await self.get([name])
            assert isinstance(record, Record)
            if record.status != "open":
                continue
            why = "the server stopped before the answer ended"
            untrainable = record.untrainable or "interrupted"
            try:
                stored = await self.append(
                    dataclasses.replace(record, status="interrupted", error=why, untrainable=untrainable)
                )
                closed += not stored.duplicate
            except ConflictError:  # its owner lives after all and closed it a moment ago
                continue
        return closed

    async def close(self) -> None:
        if self._state == "open":
            await asyncio.to_thread(self._writer.close)
        self._state = "closed"
        await asyncio.to_thread(self._readers.shutdown)
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    async def _read(self, ask: Callable[[Rows], T]) -> T:
        if self._state != "open":
            raise StoreError(f"the record store is {self._state}; start it before reading")
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._ask, ask)

    def _ask(self, ask: Callable[[Rows], T]) -> T:
        """In a reader thread: one read transaction, so that a record's row, blobs and parents are of one moment."""
        try:
            rows, connection = self._reader()
            connection.execute("BEGIN")
            try:
                return ask(rows)
            finally:
                connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            self._local.__dict__.clear()
            raise schema.trouble(error, self._path) from error
        except zstandard.ZstdError as error:
            raise StoreError(f"the record store {self._path} is damaged ({error}); restore a backup") from error

    def _reader(self) -> tuple[Rows, sqlite3.Connection]:
        if getattr(self._local, "rows", None) is None:
            connection = schema.connect(self._path, busy=self._busy, reading=True)
            self._connections.append(connection)
            self._local.connection = connection
            self._local.rows = Rows(connection)
        return self._local.rows, self._local.connection
