"""Live exchanges that went wrong become tasks: the next candidates are measured on them.

Knows: who may make one (the watch after an alarm; a report with metadata {"promote": true}), and how many are kept.
Does not know: how such a task is asked or judged (`evaluation`). The book holds receipts; the words stay in records.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from reef.core.failpoint import failpoint
from reef.core.nouns import Record
from reef.experience import holdout
from reef.loop import reports
from reef.loop.binding import Tools
from reef.loop.reports import PAGE
from reef.records.present import present

KEPT: Final = 200
"""Tasks that these two may have made, for each scenario; the oldest make room. What a person promotes stays."""
MAKERS: Final = ("watch", "report")
SAVE_EVERY: Final = 256  # events that may be read again after a crash because nothing in them was worth a write


async def keep(tools: Tools, scenario: str, failed: Iterable[tuple[str, str]], actor: str) -> int:
    """Make tasks of these records (receipt and reason each); how many are new. Repeating it changes nothing."""
    if tools.book is None:
        return 0
    made = 0
    for receipt, reason in failed:
        for record in await present(tools.store.get, [receipt]):
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
    wanted = [
        (receipt, "a report asked for it")
        for report in await reports.of(tools.store, events)
        if isinstance(report.metadata, dict) and report.metadata.get("promote") is True
        for receipt in report.references
    ]
    await keep(tools, scenario, wanted, "report")
    failpoint("loop.before_asked")
    if wanted or len(events) >= SAVE_EVERY:
        tools.ledger.advance(scenario, "reports", events[-1].seq)
    return len(events) == PAGE
