"""One thread that moves what is in the write-ahead log into the file, so that commits need not do it themselves.

Knows: about how much was written since it last ran. Does not know: what, or who reads.
A commit that finds the log very long still does the work itself; when this thread fails, that is all that happens.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from pathlib import Path

from reef.records import schema

PAGES = 1000  # written since the last time, about, before it is worth a sync of the file
LONGEST = 4000  # pages of log at which a commit moves them itself
log = logging.getLogger(__name__)


class Checkpoint:
    def __init__(self, path: Path, *, busy: float) -> None:
        self._path = path
        self._busy = busy
        self._pages = 0
        self._closing = False
        self._bell = threading.Event()
        self._thread = threading.Thread(target=self._run, name="records-checkpoint", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wrote(self, pages: int) -> None:
        """A commit wrote about so many pages."""
        self._pages += pages
        if self._pages >= PAGES:
            self._pages = 0
            self._bell.set()

    def close(self) -> None:
        self._closing = True
        self._bell.set()
        self._thread.join()

    def _run(self) -> None:
        connection: sqlite3.Connection | None = None
        while self._bell.wait() and not self._closing:
            self._bell.clear()
            try:
                connection = connection or schema.connect(self._path, busy=self._busy)
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            except sqlite3.Error as error:
                log.info("the log of %s was not moved into it: %s", self._path, error)
                if connection is not None:
                    connection.close()
                connection = None
        if connection is not None:
            connection.close()
