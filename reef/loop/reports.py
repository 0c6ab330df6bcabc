"""Reports as what is served is judged by them: read from the log, with who answered what they quote.

Knows: where in the log to begin, and that entries may be gone. Does not know: what follows from a score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, cast

from reef.core.nouns import Event, Record, Report
from reef.records import Query, RecordStore
from reef.records.lookup import Source
from reef.records.present import present

PAGE: Final = 500


async def of(store: RecordStore, events: Sequence[Event]) -> list[Report]:
    """The reports among these events, in log order."""
    entries = await present(store.get, [event.ref for event in events if event.kind == "report"])
    return [entry for entry in entries if isinstance(entry, Report)]


async def sources(store: RecordStore, reports: Sequence[Report]) -> dict[str, Source]:
    """Who answered the records that these reports quote; those that were forgotten are left out."""
    receipts = [name for report in reports for name in report.references]
    if (quick := getattr(store, "sources", None)) is not None:  # a store need not have it
        return cast(dict[str, Source], await quick(receipts))
    records = [entry for entry in await present(store.get, receipts) if isinstance(entry, Record)]
    return {entry.id: Source(entry.release_id, entry.session, entry.purpose) for entry in records}


async def begin(store: RecordStore, scenario: str, most: int, since: float, until: float | None = None) -> int:
    """The place in the log after which the newest `most` reports of that time come; the log's own place in that time
    when there is none."""
    first = count = 0
    while count < most:
        query = Query(scenario, kind="report", since=since, until=until, before=first or None, limit=min(PAGE, most))
        page = await store.find(query)
        if not page:
            break
        first, count = page[-1][0], count + len(page)
    if first:
        return first - 1
    newest = await store.find(Query(scenario, until=until, limit=1))
    return newest[0][0] if newest else 0


def mean(scores: Sequence[float]) -> float | None:
    return math.fsum(scores) / len(scores) if scores else None
