"""How long records stay: by age, by size, and never less than what releases cite; and what is forgotten on request.

Knows: which records go. Does not know: how one is taken out (`erase`), or how releases cite (ids are handed in).

- Work is many short transactions with rests between them; killed anywhere, the next run goes on.
- Memory does not grow with the store: ids that must stay are kept in a temporary table on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from reef.core.errors import ReefError
from reef.core.nouns import Report
from reef.records import Query, codec, erase, pages
from reef.records.erase import Progress, Removed, Store

EVERY = 3600.0  # seconds between two looks of `tend`
FRESH = 3600.0  # seconds for which a size limit removes nothing: it may be in training
ROUNDS = 20  # times a size is measured again
log = logging.getLogger(__name__)


def prune(
    path: Path,
    *,
    keep_days: float | None,
    keep_bytes: int | None,
    cited: Iterable[str],
    now: float | None = None,
    fresh: float = FRESH,
    pause: float = 1.0,
    halt: threading.Event | None = None,
) -> Removed:
    """Remove records older than `keep_days`, then the oldest while the store uses more than `keep_bytes`. Blocking.

    Receipts in `cited` stay, and so do open records. The file does not shrink: its free pages are used again.
    """
    now = time.time() if now is None else now
    done = Removed()
    with Store(path, pause=pause, halt=halt) as store, erase.troubles(path), contextlib.suppress(erase.Halted):
        _protect(store, cited)
        if keep_days is not None:
            _backfill(store)
            for scenario in _scenarios(store):
                for ids in _older(store, scenario, now - 86400 * keep_days):
                    done += erase.remove(store, ids, forever=False)
        done += erase.sweep(store)
        if keep_bytes is not None:
            done += _shrink(store, keep_bytes, now - fresh)
    return done


async def tend(
    path: Path,
    *,
    keep_days: float | None,
    keep_bytes: int | None,
    cited: Callable[[], Iterable[str]],
    every: float = EVERY,
) -> None:
    """Prune now and then; a failure is logged and waits for the next time. Cancelled, it stops within a step."""
    halt = threading.Event()
    while keep_days is not None or keep_bytes is not None:
        try:
            done = await asyncio.to_thread(
                lambda: prune(path, keep_days=keep_days, keep_bytes=keep_bytes, cited=cited(), halt=halt)
            )
            if done.records or done.blobs:
                log.info("removed %d records, %d reports and %d blobs past their time; the store uses %d bytes",
                         done.records, done.reports, done.blobs, done.live)  # fmt: skip
        except asyncio.CancelledError:
            halt.set()
            raise
        except ReefError as error:
            log.warning("old records were not removed: %s", error.message)
        await asyncio.sleep(every)


def forget(
    path: Path, ids: Sequence[str], say: Progress | None = None, reports: Sequence[str] = ()
) -> tuple[Removed, bool]:
    """Erase records for good, with the reports on them alone and the blobs that only they had; and `reports`. Blocking.

    Also whether every byte is out of the files: not while a reader holds an old state; calling again finishes it.
    """
    with Store(path, pause=0.2) as store, erase.troubles(path):
        done = Removed()
        for start in range(0, len(ids), erase.BATCH):
            done += erase.remove(store, ids[start : start + erase.BATCH], forever=True)
            if say:
                say(f"erased {done.records} of {len(ids)} records")
        done += erase.unreport(store, reports)
        done += erase.sweep(store, say)
        return done, erase.scrub(store)


def select(path: Path, query: Query) -> list[str]:
    """The receipts of every record that a query matches, oldest first."""
    with Store(path) as store, erase.troubles(path):
        sql, values = pages.select(query, "seq, id", after=0)
        return [name for _, name in store.db.execute(sql, [*values[:-1], -1])]


def scenarios(path: Path) -> list[str]:
    """The scenarios that have records, archived ones too."""
    with Store(path) as store, erase.troubles(path):
        return list(_scenarios(store))


def of(path: Path, scenario: str, receipts: Iterable[str]) -> list[str]:
    """Those of these receipts that are records of the scenario."""
    query = "SELECT 1 FROM records WHERE id = ? AND scenario = ?"
    with Store(path) as store, erase.troubles(path):
        return [name for name in receipts if store.db.execute(query, (name, scenario)).fetchone()]


def reports(path: Path, scenario: str, ids: Iterable[str]) -> list[Report]:
    """Those of these ids that are reports of the scenario."""
    query = "SELECT body FROM reports WHERE id = ? AND scenario = ?"
    with Store(path) as store, erase.troubles(path):
        rows = [store.db.execute(query, (name, scenario)).fetchone() for name in ids]
        return [codec.decode(codec.unpack(row[0]), Report) for row in rows if row is not None]


def erased(path: Path, receipts: Iterable[str]) -> list[str]:
    """Those of these receipts that were forgotten."""
    with Store(path) as store, erase.troubles(path):
        return [n for n in receipts if store.db.execute("SELECT 1 FROM erased WHERE id = ?", (n,)).fetchone()]


# --- what goes --------------------------------------------------------------------------------------------------------


def _protect(store: Store, cited: Iterable[str]) -> None:
    store.db.execute("CREATE TEMP TABLE cited (id TEXT PRIMARY KEY) WITHOUT ROWID")
    names = iter(cited)
    while part := [(name,) for name in islice(names, 1000)]:
        store.db.executemany("INSERT OR IGNORE INTO cited VALUES (?)", part)


def _scenarios(store: Store) -> Iterator[str]:
    name = ""
    while True:
        (name,) = store.db.execute("SELECT min(scenario) FROM records WHERE scenario > ?", (name,)).fetchone()
        if name is None:
            return
        yield name


def _backfill(store: Store) -> None:
    """Give rows from before the column their time."""
    query = "SELECT seq, meta FROM records WHERE scenario = ? AND received_at IS NULL LIMIT ?"
    for scenario in _scenarios(store):
        while rows := store.db.execute(query, (scenario, erase.PAGE)).fetchall():
            times = [(codec.unpack_meta(meta, "complete", "live").timing.received_at, seq) for seq, meta in rows]
            with store.writing() as db:
                db.executemany("UPDATE records SET received_at = ? WHERE seq = ? AND received_at IS NULL", times)


def _older(store: Store, scenario: str, before: float) -> Iterator[list[str]]:
    """Batches of receipts that arrived before a time, oldest first."""
    query = (
        "SELECT received_at, seq, id FROM records"
        " WHERE scenario = ? AND received_at < ? AND (received_at, seq) > (?, ?)"
        " AND status != 'open' AND id NOT IN (SELECT id FROM temp.cited) ORDER BY received_at, seq LIMIT ?"
    )
    at = (float("-inf"), 0)
    while rows := store.db.execute(query, (scenario, before, *at, erase.BATCH)).fetchall():
        at = rows[-1][:2]
        yield [row[2] for row in rows]


def _shrink(store: Store, most: int, before: float) -> Removed:
    """Remove the oldest until the store uses at most so many bytes, or nothing is left that may go."""
    query = (
        "SELECT seq, id FROM records WHERE seq > ? AND status != 'open' AND (received_at IS NULL OR received_at < ?)"
        " AND id NOT IN (SELECT id FROM temp.cited) ORDER BY seq LIMIT ?"
    )
    done, at = Removed(), 0
    for _ in range(ROUNDS):
        live, _ = store.sizes()
        if live <= most:
            break
        (rows,) = store.db.execute("SELECT count(*) FROM records").fetchone()
        left = max(1, -(-rows * (live - most) // live))
        while left > 0 and (found := store.db.execute(query, (at, before, min(left, erase.BATCH))).fetchall()):
            at = found[-1][0]
            left -= len(found)
            done += erase.remove(store, [name for _, name in found], forever=False)
        done += erase.sweep(store)
        if left > 0:
            log.warning("the records use %d bytes and only %d may be kept, but the rest is open, fresh or cited by "
                        "releases; raise records.keep_bytes", store.sizes()[0], most)  # fmt: skip
            break
    return done
