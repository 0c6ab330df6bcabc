"""What may be claimed of a candidate, and when the rows of a look prove it: the gate's decisions, without the asking.

Knows: for each claim (better, no worse, at least a floor) when it holds, when it never will, and how to say so.
Does not know: tasks, engines, how many candidates there were: it is given the chance of being wrong it may have.

- A claim is given rows one by one and asked after each chunk. Of its chance, EARLY goes to an e-value, which may end
  the look at any time; the rest to one exact test at the planned end (their sum bounds both, by the union bound).
- It gives up when the planned end can hardly be passed any more though the candidate were +20 points better: less than
  2%. That never makes a false release; it saves tasks. A candidate that by then looks worse, with a chance of at most
  WORSE if it is not, is rejected; else it is undecided.
- Rows are what the answers were; whoever asks leaves out what is missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Protocol

from reef.core.nouns import Verdict
from reef.evaluation.evidence import Evidence, Row, Wager, above, averaged, chance, student

EARLY = 0.1
WORSE = 0.05
LIFT = 0.2  # what a candidate is hoped to gain when a look gives up
HOPE = 0.02
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Finding:
    """What a claim says now. None: more tasks may decide. `words` is part of a sentence, `metrics` go on record."""

    verdict: Verdict | None
    words: str
    metrics: Mapping[str, float] = field(default_factory=dict)


class Claim(Protocol):
    needs: int  # tasks without which it can never be shown

    def add(self, row: Row) -> None:
        """Take the next task's row."""

    def find(self, *, final: bool) -> Finding:
        """What the rows so far say. `final`: there will be no more, so the planned test is made now."""


class Progress:
    """How far the sum of some scores is from passing its test at the planned end."""

    def __init__(self, planned: int, limit: float, lift: float) -> None:
        self.n, self.total, self.squares = 0, 0.0, 0.0
        self._planned, self._lift = planned, lift
        self._z = -_NORMAL.inv_cdf(limit)

    def add(self, score: float) -> None:
        self.n, self.total, self.squares = self.n + 1, self.total + score, self.squares + score**2

    @property
    def hopeless(self) -> bool:
        """Whether passing has less than HOPE of chance from here, with the tasks left lifted by `lift`, or by as much
        as the rows leave plausible (three standard errors above their mean) if that is less. Normal approximation."""
        left = self._planned - self.n
        if left <= 0 or not self.n:
            return False
        lift, mean, square = self._lift, self.total / self.n, self.squares / self.n
        spread = math.sqrt(max(square - mean**2, lift * (1 - lift)) / self.n)
        drift = min(lift, mean + 3 * spread)
        square = max(square, drift)  # a mean gain of scores in [-1, 1] that are mostly 0 and 1 has at least this square
        wanted = self._z * math.sqrt(self.squares + left * square)
        reach = self.total + left * drift - wanted
        return _NORMAL.cdf(reach / math.sqrt(left * max(square - drift**2, 1e-6))) < HOPE


class Higher:
    """The candidate scores higher than the incumbent does on the same tasks."""

    def __init__(self, limit: float, planned: int) -> None:
        self.needs = math.ceil(-math.log2((1 - EARLY) * limit))  # so many wins and nothing else
        self._limit = limit
        self._rows: list[Row] = []
        self._evidence = Evidence(), Evidence()  # of the rows, and of their differences: see `evidence.averaged`
        self._best = 1.0
        self._progress = Progress(planned, (1 - EARLY) * limit, LIFT)

    def add(self, row: Row) -> None:
        [mean] = averaged([row])
        self._evidence[0].add(*row)
        self._evidence[1].add(*mean)
        self._rows.append(row)
        self._progress.add(mean[0] - mean[1][0])

    def find(self, *, final: bool) -> Finding:
        self._best = max(self._best, min(one.value for one in self._evidence))
        metrics = {"evidence": self._best}
        if self._best >= 1 / (EARLY * self._limit):
            return Finding("accept", f"better: the evidence is {self._best:.3g} to 1", metrics)
        if not final and not self._progress.hopeless:
            return Finding(None, "not decided yet", metrics)
        worse = chance([(1 - ours, [1 - score for score in theirs]) for ours, theirs in self._rows])
        if worse <= WORSE:
            words = f"worse than the incumbent: chance of this if it is not {worse:.2g}"
            return Finding("reject", words, metrics | {"p_worse": worse})
        if not final:
            return Finding("undecided", "no hope left to show it is better, even if it were by 20 points", metrics)
        p, limit = chance(self._rows), (1 - EARLY) * self._limit
        words = f"chance of this if it is no better {p:.2g}, limit {limit:.2g}"
        if p <= limit:
            return Finding("accept", f"better: {words}", metrics | {"p": p})
        return Finding("undecided", f"not enough evidence that it is better: {words}", metrics | {"p": p})


class NoLower:
    """The candidate scores at most `margin` lower than the incumbent, on average (non-inferiority)."""

    def __init__(self, limit: float, planned: int, margin: float) -> None:
        self.needs = 2
        self._limit, self._margin = limit, margin
        self._differences: list[float] = []
        self._wager = Wager(-margin)
        self._progress = Progress(planned, (1 - EARLY) * limit, LIFT + margin)

    def add(self, row: Row) -> None:
        [(ours, (theirs,))] = averaged([row])
        self._differences.append(ours - theirs)
        self._wager.add(ours - theirs)
        self._progress.add(ours - theirs + self._margin)

    def find(self, *, final: bool) -> Finding:
        points = f"{100 * self._margin:g} points"
        metrics = {"evidence": self._wager.best}
        if self._wager.best >= 1 / (EARLY * self._limit):
            return Finding("accept", f"not worse by {points}: the evidence is {self._wager.best:.3g} to 1", metrics)
        if not final and not self._progress.hopeless:
            return Finding(None, "not decided yet", metrics)
        mean, deviation = self._spread()
        p, limit = self._p(mean, deviation), (1 - EARLY) * self._limit
        metrics |= {"p": p}
        if 1 - p <= WORSE:
            words = f"worse by more than {points}: chance of this if it is not {1 - p:.2g}"
            return Finding("reject", words, metrics)
        words = f"chance of this if it is {points} worse {p:.2g}, limit {limit:.2g}"
        if final and p <= limit:
            return Finding("accept", f"not worse by {points}: {words}", metrics)
        needed = self._needed(mean, deviation, limit)
        more = f"about {needed} tasks would be needed" if needed else "no number of tasks would show it from here"
        return Finding("undecided", f"not enough evidence that it is no worse: {words}; {more}", metrics)

    def _spread(self) -> tuple[float, float]:
        """(mean difference, standard deviation). Differences of a mean of -margin have a variance of at least margin
        (1 - margin) when they are 0 and 1; with less, a few equal answers would look like certainty."""
        n = len(self._differences)
        mean = math.fsum(self._differences) / n
        variance = math.fsum((d - mean) ** 2 for d in self._differences) / max(1, n - 1)
        return mean, math.sqrt(max(variance, self._margin * (1 - self._margin)))

    def _p(self, mean: float, deviation: float) -> float:
        """Student's t of the mean above -margin."""
        n = len(self._differences)
        return student((mean + self._margin) / deviation * math.sqrt(n), n - 1) if n > 1 else 0.5

    def _needed(self, mean: float, deviation: float, limit: float) -> int | None:
        """Tasks at which the test passes four times in five if the differences go on like this."""
        lead = mean + self._margin
        if lead <= 0.005:
            return None
        return math.ceil(((_NORMAL.inv_cdf(0.8) - _NORMAL.inv_cdf(limit)) * deviation / lead) ** 2)


class Above:
    """The candidate's own mean score is above `at`."""

    def __init__(self, limit: float, planned: int, at: float) -> None:
        self.needs = math.ceil(math.log((1 - EARLY) * limit) / math.log(at))  # so many perfect answers
        self._limit, self._at = limit, at
        self._scores: list[float] = []
        self._wager = Wager(2 * at - 1)
        self._progress = Progress(planned, (1 - EARLY) * limit, min(LIFT, 1 - at))

    def add(self, row: Row) -> None:
        self._scores.append(row[0])
        self._wager.add(2 * row[0] - 1)
        self._progress.add(row[0] - self._at)

    def find(self, *, final: bool) -> Finding:
        at, metrics = f"{self._at:g}", {"evidence": self._wager.best}
        if self._wager.best >= 1 / (EARLY * self._limit):
            return Finding("accept", f"above {at}: the evidence is {self._wager.best:.3g} to 1", metrics)
        if not final and not self._progress.hopeless:
            return Finding(None, "not decided yet", metrics)
        below = above([1 - score for score in self._scores], 1 - self._at)
        if below <= WORSE:
            words = f"below {at}: chance of this if it is not {below:.2g}"
            return Finding("reject", words, metrics | {"p_worse": below})
        if not final:
            return Finding("undecided", f"no hope left to show it is above {at}", metrics)
        p, limit = above(self._scores, self._at), (1 - EARLY) * self._limit
        words = f"chance of this if it is at {at} {p:.2g}, limit {limit:.2g}"
        if p <= limit:
            return Finding("accept", f"above {at}: {words}", metrics | {"p": p})
        return Finding("undecided", f"not enough evidence that it is above {at}: {words}", metrics | {"p": p})


class Look:
    """The claims of one look, which must all hold, over the same rows. Both the policies and the simulation use it."""

    def __init__(self, claims: Sequence[Claim], least: int) -> None:
        self.needs = max([least, *(claim.needs for claim in claims)])
        self.claims = claims
        self.findings: list[Finding] = []
        self._least, self._count = least, 0

    def take(self, rows: Sequence[Row], *, final: bool) -> Verdict | None:
        """Take the next rows. A rejected claim rejects, one that cannot be shown ends the look undecided, and all must
        be shown to accept; None: go on. `findings` then says why."""
        self._count += len(rows)
        for row in rows:
            for claim in self.claims:
                claim.add(row)
        if self._count < self._least:
            words = f"not enough evidence: {self._count} tasks were answered and judged, {self._least} are needed"
            self.findings = [Finding("undecided" if final else None, words)]
        else:
            self.findings = [claim.find(final=final) for claim in self.claims]
        verdicts = {finding.verdict for finding in self.findings}
        if "reject" in verdicts:
            return "reject"
        if "undecided" in verdicts:
            return "undecided"
        return None if None in verdicts else "accept"

    def words(self, verdict: Verdict) -> str:
        """Why, as part of a sentence."""
        return "; ".join(one.words for one in self.findings if one.verdict == verdict)
