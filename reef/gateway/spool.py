"""Records that could not be stored when their answers went out, kept in memory until the store is back.

Knows: a bounded queue, and when to try again. Does not know: why the store failed, or exchanges.
What does not fit is dropped, oldest first, and counted in the log: these answers had no receipt.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from reef.core.errors import ReefError, StoreError
from reef.core.nouns import Record
from reef.records import RecordStore

BYTES = 64 * 1024 * 1024
PAUSE = 1.0  # seconds between tries
log = logging.getLogger(__name__)


class Spool:
    def __init__(self, store: RecordStore, most: int = BYTES) -> None:
        self._store = store
        self._most = most
        self._waiting: deque[tuple[Record, int]] = deque()
        self._bytes = 0
        self._task: asyncio.Task[None] | None = None
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, record: Record) -> None:
        """Keep a record for later."""
        size = 1024 + len(record.request) + len(record.rendered or b"") + sum(len(c.text) for c in record.choices)
        self._waiting.append((record, size))
        self._bytes += size
        while self._bytes > self._most:
            _, size = self._waiting.popleft()
            self._bytes -= size
            self.dropped += 1
        if self._task is None or self._task.done():
            log.error("the record store cannot write: exchanges wait in memory and are stored when it is back")
            self._task = asyncio.create_task(self._empty(), name="reef-spool")

    async def close(self) -> None:
        """One last try."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        while self._waiting and await self._one():
            pass
        if self._waiting:
            log.error("%d exchanges were answered and could not be recorded", len(self._waiting))

    async def _empty(self) -> None:
        stored = 0
        while self._waiting:
            if await self._one():
                stored += 1
            else:
                await asyncio.sleep(PAUSE)
        log.warning("the record store is back: %d exchanges stored, %d dropped", stored, self.dropped)
        self.dropped = 0

    async def _one(self) -> bool:
        """Store the oldest; False when the store still cannot."""
        record, size = self._waiting[0]
        try:
            await self._store.append(record)
        except StoreError:
            return False
        except ReefError as error:  # it is there already, as it was or closed by another
            log.info("record %s was not stored again: %s", record.id, error.message)
        if self._waiting and self._waiting[0][0] is record:
            self._waiting.popleft()
            self._bytes -= size
        return True
