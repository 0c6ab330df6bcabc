"""The default record store: one SQLite file, written by one thread a process, read by a few on their own connections.

Knows: which thread does what, and what a dead process left open.
Does not know: tables (`rows`, `lookup`), batches (`writer`), or HTTP. Several processes may hold the same file at once.
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
from reef.records import Query, Stored, pages, schema
from reef.records.lookup import Group, Lookup, Source
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

    @property
    def commits(self) -> int:
        """How many transactions this store wrote."""
        return self._writer.commits

    @property
    def waiting(self) -> int:
        """How many appends wait to be written."""
        return self._writer.waiting

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

    async def append_all(self, entries: Sequence[Record | Report]) -> list[Stored]:
        if self._state == "new":
            raise StoreError("the record store is not started; await start() first")
        for index, entry in enumerate(entries):
            if isinstance(entry, Record) and entry.status == "open":
                raise InputError(f"entry {index}: an open record cannot be stored with others", param=f"[{index}]")
        return await self._writer.submit_all(entries) if entries else []

    async def get(self, ids: Sequence[str]) -> list[Record | Report]:
        return await self._read(lambda lookup: lookup.get(ids))

    async def exchanges(self, ids: Sequence[str]) -> list[Record]:
        """Those of these records that are in the store, without `rendered`, `reply` and tokens; cheap for the turns of
        one session, however long it is."""
        return await self._read(lambda lookup: lookup.exchanges(ids))

    async def known(self, ids: Sequence[str]) -> list[str]:
        """Those of these ids that are in the store."""
        return await self._read(lambda rows: rows.known(ids))

    async def sources(self, ids: Sequence[str]) -> dict[str, Source]:
        """Release, session and purpose of each of these records, by id; cheap, however large the records are."""
        return await self._read(lambda lookup: lookup.sources(ids))

    async def events(self, scenario: str, after: int, limit: int) -> list[Event]:
        return await self._read(lambda lookup: lookup.events(scenario, after, limit))

    async def find(self, query: Query) -> list[tuple[int, Record | Report]]:
        pages.check(query)
        return await self._read(lambda lookup: lookup.find(query))

    async def erased(self, ids: Sequence[str]) -> list[str]:
        """Those of these ids that were erased on request, and cannot be stored again."""
        return await self._read(lambda rows: rows.erased(ids))

    async def sessions(self, scenario: str, before: int | None, limit: int) -> list[Group]:
        """The sessions that clients named, the one with the newest record first; `before`: a `last_seq` to page on."""
        return await self._read(lambda rows: rows.sessions(scenario, before, limit))

    async def session(self, scenario: str, name: str, after: int, limit: int) -> list[tuple[int, Record]]:
        """A page of one session's records with their sequence numbers, the oldest first."""
        return await self._read(lambda rows: rows.session(scenario, name, after, limit))

    async def quotable(self, scenario: str, name: str, tokens: Sequence[str | None], limit: int) -> list[str]:
        """The newest records of a session that its reports are about; see `Lookup.quotable`."""
        return await self._read(lambda rows: rows.quotable(scenario, name, tokens, limit))

    async def reports_on(self, receipt: str) -> list[Report]:
        """Every report that quotes this record, oldest first; empty when there is none."""
        return await self._read(lambda lookup: lookup.reports_on(receipt))

    async def recover(self, owner_prefix_alive: Callable[[str], bool]) -> int:
        """Close as `interrupted` what dead owners left open; how many records that were.

        `owner_prefix_alive` tells of an owner whether its process lives. What this store's own owner opened stays.
        """
        closed = 0
        for name, owner in await self._read(lambda lookup: lookup.open_records()):
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

    async def _read(self, ask: Callable[[Lookup], T]) -> T:
        if self._state != "open":
            raise StoreError(f"the record store is {self._state}; start it before reading")
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._ask, ask)

    def _ask(self, ask: Callable[[Lookup], T]) -> T:
        """In a reader thread: one read transaction, so that a record's row, blobs and parents are of one moment."""
        try:
            lookup, connection = self._reader()
            connection.execute("BEGIN")
            try:
                return ask(lookup)
            finally:
                connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            self._local.__dict__.clear()
            raise schema.trouble(error, self._path) from error
        except zstandard.ZstdError as error:
            raise StoreError(f"the record store {self._path} is damaged ({error}); restore a backup") from error

    def _reader(self) -> tuple[Lookup, sqlite3.Connection]:
        if getattr(self._local, "lookup", None) is None:
            connection = schema.connect(self._path, busy=self._busy, reading=True)
            self._connections.append(connection)
            self._local.connection = connection
            self._local.lookup = Lookup(connection)
        return self._local.lookup, self._local.connection
