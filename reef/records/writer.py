"""One thread that writes: many awaiting appends share one transaction and one sync of the disk (group commit).

Knows: a bounded queue, batches, and whose failure is whose. Does not know: tables, or what an entry means.

- What was accepted is written, also when the one who waited for it went away; a retry is then answered as a duplicate.
- An entry that is refused fails alone. A machine fault (lock, disk) fails the whole batch, of which nothing is stored.
- After a fault the connection is opened anew, so writing works again as soon as the fault is gone.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reef.core.errors import InputError, ReefError, StoreError
from reef.core.failpoint import failpoint
from reef.core.nouns import Record, Report
from reef.records import Stored, schema
from reef.records.checkpoint import LONGEST, Checkpoint
from reef.records.columns import Made, plain
from reef.records.rows import Rows

BATCH = 256  # entries a commit carries at most, unless they came as one
PATIENCE = 0.5  # of a commit's time, waited for those who were just answered
SHORT = 2048  # bytes of memory a short record holds, about
TOUCHED = 8  # pages that even the smallest commit writes
LINGER = 0.001  # seconds, the same at most
Result = Stored | list[Stored] | ReefError
log = logging.getLogger(__name__)


class Waiting(NamedTuple):
    future: asyncio.Future[Any]  # of Stored, or of a list of them when together
    size: int
    entries: Sequence[Record | Report]  # one; or several that are stored together or not at all
    made: Made | None = None
    together: bool = False


def size_of(entry: Record | Report) -> int:
    """About how many bytes of memory an entry holds while it waits."""
    if isinstance(entry, Report):
        return 1024
    size = 1024 + len(entry.request)
    if entry.rendered is not None:
        size += len(entry.rendered)
    if entry.reply is not None:
        size += len(entry.reply)
    if entry.prompt_ids is not None:
        size += 32 * len(entry.prompt_ids)
    for choice in entry.choices:
        if choice.output_ids is not None:
            size += 32 * len(choice.output_ids)
    return size


class Writer:
    def __init__(self, path: Path, *, busy: float, entries: int, size: int) -> None:
        self._path = path
        self._busy = busy
        self._most_entries = entries
        self._most_bytes = size
        self._queue: deque[Waiting] = deque()
        self._bytes = 0
        self._closing = False
        self._wanted = 0  # the bell rings at this many; 0: nobody listens
        self._lock = threading.Lock()  # of the five above
        self._bell = threading.Lock()
        self._bell.acquire()
        self._thread = threading.Thread(target=self._run, name="records-writer", daemon=True)
        self._checkpoint = Checkpoint(path, busy=busy)
        self._connection: sqlite3.Connection | None = None
        self._turn: schema.Turn | None = None
        self._rows: Rows | None = None
        self.commits = 0

    @property
    def waiting(self) -> int:
        """How many wait to be written."""
        return len(self._queue)

    def start(self) -> None:
        self._thread.start()
        self._checkpoint.start()

    def submit(self, entry: Record | Report) -> asyncio.Future[Stored]:
        """Accept an entry; the future is done when it is on disk. StoreError when the queue is full or closed."""
        future = asyncio.get_running_loop().create_future()
        made = plain(entry) if isinstance(entry, Record) else None
        self._accept(Waiting(future, size_of(entry) if made is None else SHORT, (entry,), made))
        return future

    def submit_all(self, entries: Sequence[Record | Report]) -> asyncio.Future[list[Stored]]:
        """Accept entries that are stored together or not at all."""
        future = asyncio.get_running_loop().create_future()
        self._accept(Waiting(future, sum(map(size_of, entries)), tuple(entries), together=True))
        return future

    def _accept(self, waiting: Waiting) -> None:
        with self._lock:
            if self._closing:
                raise StoreError("the record store is closed; send this to a running server")
            full = len(self._queue) >= self._most_entries or self._bytes + waiting.size > self._most_bytes
            if full and self._queue:
                raise StoreError(f"{len(self._queue)} entries wait to be stored already; retry in a second")
            self._queue.append(waiting)
            self._bytes += waiting.size
            if 0 < self._wanted <= len(self._queue):
                self._ring()

    def close(self) -> None:
        """Write what was accepted, then end the thread. Blocking."""
        with self._lock:
            self._closing = True
            if self._wanted:
                self._ring()
        self._thread.join()

    def _ring(self) -> None:
        self._wanted = 0
        self._bell.release()

    def _run(self) -> None:
        batch: list[Waiting] = []
        took = 0.0
        while batch := self._take(len(batch), min(PATIENCE * took, LINGER)):
            begin = time.perf_counter()
            results = self._write(batch)
            took = time.perf_counter() - begin
            self._deliver(batch, results)
        self._checkpoint.close()
        self._disconnect()

    def _take(self, answered: int, patience: float) -> list[Waiting]:
        """The next batch; empty when closed and everything is written.

        Those who were just answered tend to come again. While others wait already, they get a part of the time that a
        commit takes to join them; one that waits alone is taken at once.
        """
        self._listen(1, -1)
        if len(self._queue) > 1 or answered > 1:
            self._listen(min(BATCH, len(self._queue) + answered), patience)
        batch: list[Waiting] = []
        with self._lock:
            entries = 0
            while self._queue and entries < BATCH:
                batch.append(waiting := self._queue.popleft())
                entries += len(waiting.entries)
                self._bytes -= waiting.size
        return batch

    def _listen(self, entries: int, seconds: float) -> None:
        """Sleep until so many entries wait, or it is time to close; for so long at most (-1: however long it takes)."""
        with self._lock:
            if len(self._queue) >= entries or self._closing:
                return
            self._wanted = entries
        self._bell.acquire(timeout=seconds)
        with self._lock:
            if self._wanted:  # it did not ring
                self._wanted = 0
            else:
                self._bell.acquire(blocking=False)

    def _write(self, batch: Sequence[Waiting]) -> Sequence[Result]:
        try:
            return self._commit(batch)
        except Exception as error:
            self._disconnect()
            if isinstance(error, sqlite3.Error) and schema.environmental(error):
                log.error("%d entries not stored: %s", len(batch), error)
                return [schema.trouble(error, self._path) for _ in batch]
            if isinstance(error, StoreError):
                return [StoreError(error.message) for _ in batch]
            if len(batch) > 1:  # one of them is to blame; the others must not suffer for it
                return [result for waiting in batch for result in self._write([waiting])]
            name = batch[0].entries[0].id
            log.error("entry %s not stored", name, exc_info=error)
            if isinstance(error, UnicodeEncodeError | OverflowError | TypeError):
                return [InputError(f"entry {name!r} cannot be stored: {error}")]
            if isinstance(error, sqlite3.Error):
                return [schema.trouble(error, self._path)]
            return [StoreError(f"storing {name} failed: {type(error).__name__}: {error}")]

    def _commit(self, batch: Sequence[Waiting]) -> list[Result]:
        if self._connection is None or self._rows is None or self._turn is None:
            self._turn = schema.Turn(self._path, self._busy, own=True)
            self._connection = schema.connect(self._path, busy=self._busy)
            self._connection.execute(f"PRAGMA wal_autocheckpoint = {LONGEST}")
            self._connection.execute("PRAGMA busy_timeout = 0")  # the turn waits, and sooner than SQLite would
            self._rows = Rows(self._connection)
        self._turn.begin(self._connection)
        self._rows.begin()
        written = self._rows.written
        results: list[Result] = []
        for together, some in itertools.groupby(batch, lambda waiting: waiting.together):
            if together:
                results += [self._together(waiting.entries) for waiting in some]
            else:
                results += self._rows.put_each([(waiting.entries[0], waiting.made) for waiting in some])
        failpoint("records.before_commit")
        self._connection.execute("COMMIT")
        failpoint("records.after_commit")
        self.commits += 1
        self._rows.settle()
        self._checkpoint.wrote(TOUCHED + len(batch) // 4 + (self._rows.written - written) // 4096)
        return results

    def _together(self, entries: Sequence[Record | Report]) -> Result:
        assert self._rows is not None
        try:
            return self._rows.put_all(entries)
        except ReefError as error:
            return error

    def _disconnect(self) -> None:
        """Closing rolls back what is open; a fresh connection also knows nothing of a transaction that failed."""
        if self._connection is not None:
            self._connection.close()
        if self._turn is not None:
            self._turn.close()
        self._connection = self._rows = self._turn = None

    def _deliver(self, batch: Sequence[Waiting], results: Sequence[Result]) -> None:
        loops: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Result]]] = {}
        for waiting, result in zip(batch, results, strict=True):
            loops.setdefault(waiting.future.get_loop(), []).append((waiting.future, result))
        for loop, pairs in loops.items():
            try:
                loop.call_soon_threadsafe(_resolve, pairs)
            except RuntimeError:  # the loop ended; what it waited for is stored all the same
                log.info("%d entries were stored after their loop had ended", len(pairs))


def _resolve(pairs: Sequence[tuple[asyncio.Future[Any], Result]]) -> None:
    for future, result in pairs:
        if future.done():
            continue
        if isinstance(result, ReefError):
            future.set_exception(result)
        else:
            future.set_result(result)
