"""Live exchanges that went wrong become tasks: the next candidates are measured on them.

Knows: who may make one (the watch after an alarm; a report with metadata {"promote": true}), and how many are kept.
Does not know: how such a task is asked or judged (`evaluation`). The book holds receipts; the words stay in records.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from reef.core.errors import MissingError
from reef.core.failpoint import failpoint
from reef.core.nouns import Record, Report
from reef.experience import holdout
from reef.loop.binding import Tools
from reef.records import RecordStore

KEPT: Final = 200
"""Tasks that these two may have made, for each scenario; the oldest make room. What a person promotes stays."""
MAKERS: Final = ("watch", "report")
PAGE: Final = 500
SAVE_EVERY: Final = 256  # events that may be read again after a crash because nothing in them was worth a write


async def keep(tools: Tools, scenario: str, failed: Iterable[tuple[str, str]], actor: str) -> int:
    """Make tasks of these records (receipt and reason each); how many are new. Repeating it changes nothing."""
    if tools.book is None:
        return 0
    made = 0
    for receipt, reason in failed:
        for record in await found(tools.store, [receipt]):
            if not isinstance(record, Record) or record.scenario != scenario:
                continue
            prompt = holdout.read(record)
            if prompt is not None:  # nothing that could be asked again
                made += tools.book.promote(scenario, receipt, prompt.side, actor=actor, reason=reason)
    if made:
        ours = [failure for failure in tools.book.failures(scenario) if failure.actor in MAKERS]
        for failure in ours[KEPT:]:
            tools.book.demote(scenario, failure.receipt)
    return made


async def asked(tools: Tools, scenario: str) -> bool:
    """Keep what reports since the last look ask for. True when more may be waiting."""
    if tools.book is None:
        return False
    cursor = tools.ledger.cursor(scenario, "reports")
    events = await tools.store.events(scenario, cursor, PAGE)
    names = [event.ref for event in events if event.kind == "report"]
    wanted = [
        (receipt, "a report asked for it")
        for report in await found(tools.store, names)
        if isinstance(report, Report) and isinstance(report.metadata, dict) and report.metadata.get("promote") is True
        for receipt in report.references
    ]
    await keep(tools, scenario, wanted, "report")
    failpoint("loop.before_asked")
    if wanted or len(events) >= SAVE_EVERY:
        tools.ledger.advance(scenario, "reports", events[-1].seq)
    return len(events) == PAGE


async def found(store: RecordStore, names: Sequence[str]) -> list[Record | Report]:
    """The entries with these ids; those that were forgotten on request are left out."""
    try:
        return await store.get(names) if names else []
    except MissingError:
        return [entry for name in names for entry in await _one(store, name)]


async def _one(store: RecordStore, name: str) -> list[Record | Report]:
    try:
        return await store.get([name])
    except MissingError:
        return []
