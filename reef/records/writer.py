"""One thread that writes: many awaiting appends share one transaction and one sync of the disk (group commit).

Knows: a bounded queue, batches, and whose failure is whose. Does not know: tables, or what an entry means.

- What was accepted is written, also when the one who waited for it went away; a retry is then answered as a duplicate.
- An entry that is refused fails alone. A machine fault (lock, disk) fails the whole batch, of which nothing is stored.
- After a fault the connection is opened anew, so writing works again as soon as the fault is gone.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reef.core.errors import InputError, ReefError, StoreError
from reef.core.failpoint import failpoint
from reef.core.nouns import Record, Report
from reef.records import Stored, schema
from reef.records.rows import Rows

BATCH = 256  # entries a commit carries at most
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Waiting:
    entry: Record | Report
    size: int
    future: asyncio.Future[Stored]


def size_of(entry: Record | Report) -> int:
    """About how many bytes of memory an entry holds while it waits."""
    if isinstance(entry, Report):
        return 1024
    tokens = len(entry.prompt_ids or ()) + sum(len(choice.output_ids or ()) for choice in entry.choices)
    return 1024 + len(entry.request) + len(entry.rendered or b"") + 32 * tokens


class Writer:
    def __init__(self, path: Path, *, busy: float, entries: int, size: int) -> None:
        self._path = path
        self._busy = busy
        self._most_entries = entries
        self._most_bytes = size
        self._queue: deque[Waiting] = deque()
        self._bytes = 0
        self._closing = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="records-writer", daemon=True)
        self._connection: sqlite3.Connection | None = None
        self._turn: schema.Turn | None = None
        self._rows: Rows | None = None
        self.commits = 0

    def start(self) -> None:
        self._thread.start()

    def submit(self, entry: Record | Report) -> asyncio.Future[Stored]:
        """Accept an entry; the future is done when it is on disk. StoreError when the queue is full or closed."""
        waiting = Waiting(entry, size_of(entry), asyncio.get_running_loop().create_future())
        with self._change:
            if self._closing:
                raise StoreError("the record store is closed; send this to a running server")
            full = len(self._queue) >= self._most_entries or self._bytes + waiting.size > self._most_bytes
            if full and self._queue:
                raise StoreError(f"{len(self._queue)} entries wait to be stored already; retry in a second")
            self._queue.append(waiting)
            self._bytes += waiting.size
            self._change.notify()
        return waiting.future

    def close(self) -> None:
        """Write what was accepted, then end the thread. Blocking."""
        with self._change:
            self._closing = True
            self._change.notify()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._take():
            self._deliver(batch, self._write(batch))
        self._disconnect()

    def _take(self) -> list[Waiting]:
        """The next batch; empty when closed and everything is written."""
        with self._change:
            while not self._queue and not self._closing:
                self._change.wait()
            batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
            self._bytes -= sum(waiting.size for waiting in batch)
        return batch

    def _write(self, batch: Sequence[Waiting]) -> Sequence[Stored | ReefError]:
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
            log.error("entry %s not stored", batch[0].entry.id, exc_info=error)
            if isinstance(error, UnicodeEncodeError | OverflowError | TypeError):
                return [InputError(f"entry {batch[0].entry.id!r} cannot be stored: {error}")]
            if isinstance(error, sqlite3.Error):
                return [schema.trouble(error, self._path)]
            return [StoreError(f"storing {batch[0].entry.id} failed: {type(error).__name__}: {error}")]

    def _commit(self, batch: Sequence[Waiting]) -> list[Stored | ReefError]:
        if self._connection is None or self._rows is None or self._turn is None:
            self._turn = schema.Turn(self._path, self._busy)
            self._connection = schema.connect(self._path, busy=self._busy)
            self._rows = Rows(self._connection)
        results: list[Stored | ReefError] = []
        self._turn.begin(self._connection)
        for waiting in batch:
            try:
                results.append(self._rows.put(waiting.entry))
            except ReefError as error:
                results.append(error)
        failpoint("records.before_commit")
        self._connection.execute("COMMIT")
        failpoint("records.after_commit")
        self.commits += 1
        self._rows.settle()
        return results

    def _disconnect(self) -> None:
        """Closing rolls back what is open; a fresh connection also knows nothing of a transaction that failed."""
        if self._connection is not None:
            self._connection.close()
        if self._turn is not None:
            self._turn.close()
        self._connection = self._rows = self._turn = None

    def _deliver(self, batch: Sequence[Waiting], results: Sequence[Stored | ReefError]) -> None:
        loops: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Stored], Stored | ReefError]]] = {}
        for waiting, result in zip(batch, results, strict=True):
            loops.setdefault(waiting.future.get_loop(), []).append((waiting.future, result))
        for loop, pairs in loops.items():
            try:
                loop.call_soon_threadsafe(_resolve, pairs)
            except RuntimeError:  # the loop ended; what it waited for is stored all the same
                log.info("%d entries were stored after their loop had ended", len(pairs))


def _resolve(pairs: Sequence[tuple[asyncio.Future[Stored], Stored | ReefError]]) -> None:
    for future, result in pairs:
        if future.done():
            continue
        if isinstance(result, ReefError):
            future.set_exception(result)
        else:
            future.set_result(result)
