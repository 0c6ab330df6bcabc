"""Live scores on a release against those on the release before it: how strong the evidence is that it is worse.

Knows: which reports count, how they are paired in the order of the log, and the anytime-valid test.
Does not know: where reports come from, or what follows from an alarm (`watch`).

- A row is one report on the new release and up to REPEATS of the newest unused ones on the old release. If users are
  as content as before, the new score could as well have been any other of its row: the gate's test, with sides swapped.
- One record counts once, one report once a side, and a session that is named once a side: nobody decides by repeating.
- Scores are compared by their rank among all seen so far, so their scale does not matter and one absurd score changes
  little. With scores of two values the result is that of 0 and 1. Scores that are not finite do not count.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Collection, Mapping
from typing import Final, Literal

from reef.core.nouns import Report
from reef.evaluation.evidence import Evidence
from reef.records.lookup import Source

REPEATS: Final = 3
"""Scores of the old release that one score of the new one is compared with, at most."""
LEAST: Final = 7
"""Scores of the old release without which there is no alarm at the usual alpha: six rows of the worst kind give 18."""

Side = Literal["new", "old"]


class Comparison:
    """Fed with reports in the order of the log. `reports`: those on the new release after which it is over.

    `first`: the new release is compared with itself; so many of its scores stand for the old one. Then `alpha` is for
    all its stretches together: the k-th may raise a false alarm with a chance of alpha / (k (k + 1)), which sum
    to alpha however many there are, although all are compared with the same scores.
    """

    def __init__(
        self,
        new: str,
        old: Collection[str],
        *,
        reports: int = 300,
        alpha: float = 0.05,
        first: int = 0,
        stretch: int = 1,
    ) -> None:
        self.new: list[float] = []  # every score that counts, on each side
        self.old: list[float] = []
        self.rows = 0
        self.alarmed = False
        self.began: float | None = None  # when the first report came that counts on the new side
        self.receipts: list[tuple[str, float]] = []  # records of the new release, and their scores
        self._sides: dict[str, Side] = dict.fromkeys(old, "old")
        self._sides[new] = "new"
        self._reports, self._first, self._alpha, self._stretch = reports, first, alpha, stretch
        self.bar = (stretch * (stretch + 1) if first else 1) / alpha
        self._evidence = Evidence(-1)
        self._unused: deque[float] = deque(maxlen=REPEATS * reports)  # of the old release, the newest last
        self._ranked: list[float] = []
        self._seen: set[tuple[str, ...]] = set()  # records; sides and sessions; those and the report that counted

    @property
    def value(self) -> float:
        """The evidence so far: if nothing is worse, the chance that it ever reaches x is at most 1/x."""
        return self._evidence.value

    @property
    def over(self) -> bool:
        return self.alarmed or len(self.new) >= self._reports

    def add(self, report: Report, sources: Mapping[str, Source]) -> None:
        """Take one report; `sources` tells of the records it quotes. Nothing changes once the comparison is over."""
        found: dict[Side, list[tuple[str, float]]] = {}
        for receipt in dict.fromkeys(report.references):
            source, score = sources.get(receipt), report.score_of(receipt)
            if source is None or source.purpose != "live" or score is None or not math.isfinite(score):
                continue
            side = self._sides.get(source.release_id)
            if side is not None and self._counts(side, receipt, report.id, source.session):
                found.setdefault(side, []).append((receipt, score))
        for side, scores in found.items():
            if not self.over:
                self._take(side, scores)
                if self.new and self.began is None:
                    self.began = report.created_at

    def _counts(self, side: Side, receipt: str, report: str, session: str | None) -> bool:
        """Whether this is the first report on a record, and its session's first on this side (or this same report)."""
        if (receipt,) in self._seen:
            return False
        self._seen.add((receipt,))
        if session is None:
            return True
        if (side, session) in self._seen and (side, session, report) not in self._seen:
            return False
        self._seen |= {(side, session), (side, session, report)}
        return True

    def _take(self, side: Side, scores: list[tuple[str, float]]) -> None:
        """One report's scores on one side count as one: their mean."""
        score = math.fsum(score for _, score in scores) / len(scores)
        insort(self._ranked, score)
        if side == "old" or len(self.old) < self._first:
            self.old.append(score)
            self._unused.append(score)
            return
        # So many that they last as long as the watch does. It depends on the past alone, as the test demands.
        share = len(self._unused) // (self._reports - len(self.new))
        self.new.append(score)
        self.receipts += scores
        if not self._unused:
            return
        theirs = [self._unused.pop() for _ in range(min(REPEATS, max(1, share)))]
        self._evidence.add(self._rank(score), [self._rank(other) for other in theirs])
        self.rows += 1
        self.alarmed = self.value >= self.bar

    def again(self) -> Comparison:
        """The next comparison after one that is over: with the same old scores, on reports that are still to come."""
        made = Comparison(
            "", (), reports=self._reports, alpha=self._alpha, first=self._first, stretch=self._stretch + 1
        )
        made._sides, made._seen, made.old = self._sides, self._seen, list(self.old)
        made._unused.extend(self.old)
        for score in self.old:
            insort(made._ranked, score)
        return made

    def _rank(self, score: float) -> float:
        """A score's place among all seen so far, the lowest at 0 and the highest at 1."""
        low, high = self._place(self._ranked[0]), self._place(self._ranked[-1])
        return (self._place(score) - low) / (high - low) if high > low else 0.5

    def _place(self, score: float) -> int:
        return bisect_left(self._ranked, score) + bisect_right(self._ranked, score)
