"""A SQLite file that is damaged is moved away whole, so that a fresh one can begin.

Knows: how to tell a damaged file from one that cannot be looked at now. Does not know: what was in it.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from pathlib import Path

from reef.core.errors import StoreError

_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

log = logging.getLogger(__name__)


def set_aside(path: Path, then: str) -> Path | None:
    """Move a damaged file away, with what belongs to it. Returns where it is now; `then` tells a person what follows.

    Only for the one process that writes the file, before it opens it. Reads the whole file: some ms for each MB.
    """
    if (wrong := _damage(path)) is None:
        return None
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%S')}")
    try:
        for ending in ("-wal", "-shm", ""):  # the file itself last: cut short, the next start goes on from here
            with contextlib.suppress(FileNotFoundError):
                path.with_name(path.name + ending).rename(aside.with_name(aside.name + ending))
    except OSError as error:
        raise StoreError(
            f"{path} is damaged ({wrong}) and cannot be moved away ({error.strerror}); remove it"
        ) from None
    log.error("%s is damaged (%s); it is kept as %s, and %s", path, wrong, aside.name, then)
    return aside


def _damage(path: Path) -> str | None:
    """What is wrong with a file; None when it is sound, missing, or cannot be looked at (who opens it says why)."""
    try:
        with path.open("rb") as file:
            if file.read(16) not in (b"", b"SQLite format 3\0"):
                return "it is not a database"
        # Read-only, so that closing it does not fold its -wal into a damaged file.
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30.0)) as base:
            said = str(base.execute("PRAGMA quick_check(1)").fetchone()[0])
        return None if said == "ok" else said
    except sqlite3.Error as error:
        return str(error) if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE else None
    except OSError:
        return None
