"""Falls: a release whose live scores sink long after it came, because users want something else, or others came.

Knows: a release's scores against its own earlier ones, and which earlier release might do better.
Does not know: why scores fell; the test (`compare`); how releases are measured (an `Evaluator` with a suite).

- A release's first scored reports say what is usual for it. Every further stretch of as many is compared with them.
- A fall is told, and its worst records become tasks, so that the suite knows what is wanted now; what users said
  before the fallen stretch judges nothing any more.
- Then the release before and the base are measured against what is served; the first that the evidence shows to be
  better is served again. Nothing is, without a suite: a fall alone does not say that anything else would be better.
  An earlier release that cannot be measured is told and left out after three tries: the watch goes on.
- After a fall the present level is the usual one, so that nobody is told the same again and again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

from reef.core.errors import ConflictError
from reef.core.failpoint import failpoint
from reef.core.nouns import Release
from reef.evaluation import Evaluator
from reef.loop import failures, reports, tell
from reef.loop.binding import Tools, Watching
from reef.loop.compare import Comparison
from reef.loop.reports import PAGE, mean
from reef.scenario.serving import rollback

TRIES: Final = 3
LOOKED: Final = 20
"""After a restart, so many times `reports` of the newest reports on a release are read again."""

log = logging.getLogger(__name__)


class Fall:
    """One served release. `look` reads on."""

    def __init__(self, tools: Tools, release: Release, rule: Watching, past: Evaluator | None) -> None:
        self._tools, self.release, self._rule, self._past = tools, release, rule, past
        self._comparison = self._fresh()
        self._cursor: int | None = None
        self._tries = 0  # at measuring earlier releases, since the last fall
        self.count = 0  # falls so far
        self.said = ""

    def _fresh(self) -> Comparison:
        rule = self._rule
        return Comparison(self.release.id, (), reports=rule.reports, alpha=rule.alpha, first=rule.reports)

    async def look(self) -> bool:
        """Take the reports that came since. True when more may be waiting, or when something was done."""
        scenario, tools = self.release.scenario, self._tools
        if self._comparison.alarmed:  # the last look did not end
            return await self._fell()
        if self._cursor is None:
            most, since = LOOKED * self._rule.reports, self.release.created_at
            self._cursor = await reports.begin(tools.store, scenario, most, since)
        events = await tools.store.events(scenario, self._cursor, PAGE)
        came = {report.id: report for report in await reports.of(tools.store, events)}
        found = await reports.sources(tools.store, list(came.values()))
        for event in events:
            self._cursor = event.seq
            if (report := came.get(event.ref)) is None:
                continue
            self._comparison.add(report, found)
            if self._comparison.alarmed:
                return await self._fell()
            if self._comparison.over:
                self._comparison = self._comparison.again()
        return len(events) == PAGE

    async def _fell(self) -> bool:
        """Tell it, keep the failures, look for something better. After a crash the next look does what is undone."""
        release, comparison, tools = self.release, self._comparison, self._tools
        told = f"fall {self.count + 1}"
        usual = mean(comparison.old) or 0.0
        reason = (
            f"live scores on release {release.seq} fell: mean {mean(comparison.new):.3g} over the last "
            f"{len(comparison.new)} reports against {usual:.3g} over its first {len(comparison.old)} "
            f"(evidence {comparison.value:.3g}, the alarm is at {comparison.bar:.3g})"
        )
        known = await asyncio.to_thread(tools.journal.about, release.id)
        if not any(act.kind == "alarm" and act.detail.get("fall") == told for act in known):
            detail = {"release": release.seq, "fall": told, "score": mean(comparison.new), "score_before": usual}
            await asyncio.to_thread(
                tools.journal.tell, release.scenario, "alarm", release.id,
                actor="watch", reason=reason, detail=detail, once=False,
            )  # fmt: skip
            log.warning("%s: %s", release.scenario, reason)
        failpoint("loop.after_fall")
        if tools.book is not None and comparison.began is not None:
            tools.book.shift(release.scenario, comparison.began)
        failpoint("loop.after_shift")
        low = [
            (receipt, f"scored {score:.3g} on release {release.seq}; {usual:.3g} was usual for it")
            for receipt, score in comparison.receipts
            if score < usual
        ]
        await failures.keep(tools, release.scenario, low[-failures.KEPT :], "watch")
        self.said = await self._better()
        self.count, self._tries = self.count + 1, 0
        self._comparison = self._fresh()
        return True

    async def _better(self) -> str:
        """Serve an earlier release again if it is shown to be better than this one now. A sentence on what was done."""
        release, tools = self.release, self._tools
        pin = await asyncio.to_thread(tools.journal.pinned, release.scenario)
        if self._past is None or self._rule.action != "rollback" or pin is not None:
            return "told; nothing earlier was measured"
        self._tries += 1
        lost: list[str] = []
        for earlier in await asyncio.to_thread(self._earlier):
            try:
                evaluation = await self._past.evaluate(earlier, release, 1)
            except Exception as error:
                if self._tries < TRIES:
                    raise
                lost.append(f"release {earlier.seq}: {error or type(error).__name__}")
                log.exception("%s: release %d cannot be measured", release.scenario, earlier.seq)
                continue
            failpoint("loop.after_past")
            if evaluation.verdict != "accept":
                continue
            reason = f"live scores fell, and release {earlier.seq} is better now: {evaluation.reason}"
            try:
                await asyncio.to_thread(
                    rollback, release.scenario, earlier.id, tools.chain, tools.board,
                    actor="watch", reason=reason, expected=release.id,
                )  # fmt: skip
            except ConflictError as error:  # somebody was quicker
                return f"release {earlier.seq} was better, but the head moved: {error.message}"
            return reason
        if lost:
            said = f"earlier releases could not be measured: {'; '.join(lost)}"
            await asyncio.to_thread(tell.trouble, tools, release.scenario, "watch", said, TRIES)
            return said
        return "no earlier release that was measured is better now"

    def _earlier(self) -> Sequence[Release]:
        """The release before and the base, as far as their parts are others."""
        chain, seen = self._tools.chain, [_key(self.release)]
        found: list[Release] = []
        node = self.release
        while node.parent is not None:
            node = chain.get(node.parent)
            if _key(node) not in seen and (not found or node.parent is None):
                seen.append(_key(node))
                found.append(node)
        return found

    def shown(self) -> dict[str, Any]:
        comparison = self._comparison
        return {
            "falls": self.count,
            "usual": mean(comparison.old),
            "now": mean(comparison.new),
            "compared": len(comparison.new),
            "last": self.said,
        }


def _key(release: Release) -> Any:
    return sorted((name, part.kind, tuple(sorted(part.files.items()))) for name, part in release.parts.items())
