"""The watch: after a release, are the users still as content as before it? If not, go back, and say so.

Knows: which releases are compared, from where in the log, and what an alarm leads to.
Does not know: the test (`compare`), or how the release was made. Works from store, board, chain and journal alone, so
it goes on while a trainer is busy or gone.

- A release that the learner or a person brought (publish, promote) is watched against the one before it, until enough
  reports came, an alarm, or the next release. What a rollback brought is not watched so: going back never leads back.
- After that, and for what a rollback brought, it is watched against its own beginning (`fall`).
- All of it is worked out again from the log after a crash: the same reports in the same order, the same decision.
- An alarm is told first, then failures become tasks, then the release goes; each once, however often it is tried.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from reef.core.errors import ConflictError
from reef.core.failpoint import failpoint
from reef.core.nouns import Release
from reef.evaluation import Evaluator
from reef.loop import failures, reports, tell
from reef.loop.binding import Tools, Watching
from reef.loop.compare import LEAST, REPEATS, Comparison
from reef.loop.fall import Fall
from reef.loop.reports import PAGE, mean
from reef.scenario.serving import rollback

WINDOW: Final = 7 * 86400.0
"""Seconds before a release in which reports on the old release still tell what users want now."""
WATCHED: Final = ("publish", "promote")

log = logging.getLogger(__name__)


class Vigil:
    """The watch of one scenario. `look` is called again and again; it does at once whatever there is to do."""

    def __init__(self, tools: Tools, scenario: str, rule: Watching, past: Evaluator | None = None) -> None:
        self.rule, self.past = rule, past
        self._tools, self._scenario = tools, scenario
        self._release: Release | None = None  # what is served; watched only when there is a comparison
        self._before: Release | None = None
        self._comparison: Comparison | None = None
        self._cursor = 0
        self._done = False
        self._fall: Fall | None = None
        self._said = "nothing is served yet"

    async def look(self) -> bool:
        """Take the reports that came since; decide when they say enough. True when more may be waiting."""
        serving = await asyncio.to_thread(self._tools.board.get, self._scenario)
        if serving is None:
            return False
        if self._release is None or self._release.id != serving.release_id:
            await self._begin(await asyncio.to_thread(self._tools.chain.get, serving.release_id))
        comparison, release = self._comparison, self._release
        if comparison is None or release is None or self._done:
            return self._fall is not None and await self._fall.look()
        events = await self._tools.store.events(self._scenario, self._cursor, PAGE) if not comparison.over else []
        since = release.created_at - WINDOW
        came = [report for report in await reports.of(self._tools.store, events) if report.created_at >= since]
        found = await reports.sources(self._tools.store, came)
        for report in came:
            comparison.add(report, found)
        moved = comparison.alarmed and await self._alarm(comparison)
        if events:
            self._cursor = events[-1].seq
        self._done = comparison.over
        return moved or self._done or len(events) == PAGE

    def shown(self) -> dict[str, Any]:
        """For people and the status page."""
        comparison, release, before = self._comparison, self._release, self._before
        fall = {"fall": self._fall.shown()} if self._fall is not None else {}
        if comparison is None or release is None or before is None:
            return {"state": "idle", "reason": self._said} | fall
        count, rows = len(comparison.new), comparison.rows
        shown: dict[str, Any] = {"release_id": release.id, "before": before.id, "reports": count, "compared": rows}
        shown |= {"wanted": self.rule.reports, "evidence": round(comparison.value, 3), "alarm_at": comparison.bar}
        shown |= {"score": mean(comparison.new), "score_before": mean(comparison.old)}
        if comparison.alarmed:
            return shown | {"state": "alarm", "reason": sentence(comparison, release, before)}
        if len(comparison.old) < LEAST:
            few = f"only {len(comparison.old)} scored reports on release {before.seq}, which was before it"
            return shown | {"state": "blind", "reason": f"cannot be watched: {few}"}
        said = f"{count} of {self.rule.reports} reports came, {rows} were compared with earlier ones"
        return shown | {"state": "passed" if comparison.over else "watching", "reason": said} | fall

    async def _begin(self, release: Release) -> None:
        """A release is served that was not before: find out what to compare it with, and from where in the log."""
        await asyncio.to_thread(tell.releases, self._tools, self._scenario)  # a gateway may have died before it did
        self._release, self._before, self._comparison, self._done = None, None, None, False
        await self._compare(release)
        off = self.rule.action == "off"
        self._fall = None if off else Fall(self._tools, release, self.rule, self.past)
        self._release = release  # last: one that failed to begin begins again

    async def _compare(self, release: Release) -> None:
        chain = self._tools.chain
        if self.rule.action == "off":
            self._said = "the watch is off"
            return
        if release.operation not in WATCHED or release.parent is None:
            self._said = f"release {release.seq} is a {release.operation}; only what is new is watched"
            return
        before = await asyncio.to_thread(chain.get, release.parent)
        alike = [before]  # a rollback has the parts of an earlier release: reports on that one speak of it too
        while alike[-1].operation == "rollback" and alike[-1].base is not None:
            alike.append(await asyncio.to_thread(chain.get, alike[-1].base))
        # As many reports before the release as can be used; where there is none, from where it began.
        most, at = 2 * REPEATS * self.rule.reports, release.created_at
        self._cursor = await reports.begin(self._tools.store, self._scenario, most, at - WINDOW, at)
        self._before = before
        self._comparison = Comparison(
            release.id, [one.id for one in alike], reports=self.rule.reports, alpha=self.rule.alpha
        )

    async def _alarm(self, comparison: Comparison) -> bool:
        """Say it, keep the failures, go back (True). What a crash leaves undone is done by the next look."""
        tools, release, before = self._tools, self._release, self._before
        assert release is not None
        assert before is not None
        reason = sentence(comparison, release, before)
        detail = {
            "release": release.seq, "before": before.seq, "before_id": before.id, "rows": comparison.rows,
            "score": mean(comparison.new), "score_before": mean(comparison.old),
            "evidence": comparison.value, "alarm_at": comparison.bar,
        }  # fmt: skip
        pin = await asyncio.to_thread(tools.journal.pinned, self._scenario)
        action = "tell" if pin is not None else self.rule.action
        if pin is not None:
            reason += f"; nothing is done, because {pin.actor} pinned the scenario"
        failpoint("loop.before_alarm")
        told = await asyncio.to_thread(
            tools.journal.tell, self._scenario, "alarm", release.id,
            actor="watch", reason=reason, detail=detail | {"action": action},
        )  # fmt: skip
        failpoint("loop.after_alarm")
        if told is not None:
            log.warning("%s: %s", self._scenario, reason)
        await self._keep(comparison, release)
        failpoint("loop.after_failures")
        if action != "rollback":
            return False
        try:
            await asyncio.to_thread(
                rollback, self._scenario, before.id, tools.chain, tools.board,
                actor="watch", reason=reason, expected=release.id,
            )  # fmt: skip
        except ConflictError as error:  # somebody was quicker, or pinned it; what is served now is looked at next
            log.warning("%s: the watch did not go back: %s", self._scenario, error.message)
            return False
        failpoint("loop.after_watch")
        return True

    async def _keep(self, comparison: Comparison, release: Release) -> None:
        """The release's worst records become tasks, so that the next candidates are measured on them."""
        usual = mean(comparison.old) or 0.0
        low = [
            (receipt, f"scored {score:.3g} on release {release.seq}; {usual:.3g} was usual before it")
            for receipt, score in comparison.receipts
            if score < usual
        ]
        await failures.keep(self._tools, self._scenario, low[-failures.KEPT :], "watch")


def sentence(comparison: Comparison, release: Release, before: Release) -> str:
    """The evidence as a person reads it."""
    ours, theirs = comparison.new, comparison.old
    return (
        f"live reports on release {release.seq} are worse than on release {before.seq}: mean score "
        f"{mean(ours):.3g} over {len(ours)} reports against {mean(theirs):.3g} over {len(theirs)} "
        f"(evidence {comparison.value:.3g}, the alarm is at {comparison.bar:.3g})"
    )
