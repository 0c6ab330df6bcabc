"""The statistics of the gate: how strong the evidence is that one side's scores are higher, task by task.

Knows: exact tests on paired and matched scores, evidence that may be looked at after every task, intervals.
Does not know: where scores come from, how many candidates there were (`budget`), or what follows from a number.

- A *row* is one task: the candidate's score, and the incumbent's scores on the same task (one or several seeds).
- *Nothing changed*: both sides answer alike, so the candidate's score could as well have been any other of its row.
  Tests of rows are exact for that, whatever the scores' distribution. With one incumbent score it is the paired test.
- *Changed, but no better*: tests of rows would mistake an incumbent whose answers never vary for proof; see `averaged`.
- An e-value is evidence that may be looked at after each task: if nothing is better, the chance that it ever reaches
  1/alpha is at most alpha (Ville 1939; Shafer 2021; Ramdas, Grünwald, Vovk, Shafer 2023).
- Scores lie in [0, 1]. Equal scores carry no evidence: p = 1, e = 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

Row = tuple[float, Sequence[float]]
"""(candidate's score, the incumbent's scores) of one task."""

TILTS = 32
GRID = 60
"""Steps of a score in `tail`: the exact test is of scores rounded to 1/60, so scores that differ by less are equal. The
mean of up to six 0/1 scores needs no rounding."""


class Evidence:
    """An e-value that grows when the candidate scores higher (`sign` 1) or lower (-1) than the incumbent's row says.

    Each task multiplies it by exp(l c) / mean(exp(l x)) over the row's scores x, with c the candidate's; the average is
    over odds p / (1 - p) = exp(l) for p spread evenly on (1/2, 1). For 0/1 scores and one incumbent score that is
    2 * integral over p of (2p)^wins (2(1 - p))^losses: the mixture of sequential sign tests (Robbins 1970).
    """

    def __init__(self, sign: int = 1) -> None:
        self._sign = sign
        self._logs = [0.0] * TILTS

    def add(self, ours: float, theirs: Sequence[float]) -> None:
        if theirs and any(score != ours for score in theirs):
            grown = _growth(self._sign, ours, tuple(sorted(theirs)))
            self._logs = [log + step for log, step in zip(self._logs, grown, strict=True)]

    @property
    def value(self) -> float:
        top = max(self._logs)
        return math.exp(min(700.0, top + math.log(math.fsum(math.exp(log - top) for log in self._logs) / TILTS)))


@lru_cache(maxsize=4096)
def _growth(sign: int, ours: float, theirs: tuple[float, ...]) -> list[float]:
    """The logarithm of what a row multiplies the e-value by, for each of the odds. 0/1 scores have few such rows."""
    steps, row = [], (ours, *theirs)
    for place in range(TILTS):
        p = 0.5 + (place + 0.5) / (2 * TILTS)
        tilt = sign * math.log(p / (1 - p))
        steps.append(tilt * ours - math.log(math.fsum(math.exp(tilt * score) for score in row) / len(row)))
    return steps


def tail(rows: Sequence[Row]) -> float:
    """The exact chance of a candidate sum this high when each row's score could as well have been any other of its row.

    One-sided; the within-task permutation test. With 0/1 scores and one incumbent score a row it is McNemar's exact
    test, with any one incumbent score the sign-flip test of the differences (Fisher 1935). No rows, or rows of equal
    scores only: 1.
    """
    cells = [[round(GRID * score) for score in (ours, *theirs)] for ours, theirs in rows]
    steps = [[cell - min(row) for cell in row] for row in cells]
    unit = math.gcd(*(step for row in steps for step in row)) or 1
    got = sum(row[0] for row in steps) // unit
    chances = [1.0]
    for row in steps:
        if not any(row):
            continue
        reach = max(row) // unit
        grown = [0.0] * (len(chances) + reach)
        for step in set(row):
            share, up = row.count(step) / len(row), step // unit
            moved = [*[0.0] * up, *[share * chance for chance in chances], *[0.0] * (reach - up)]
            grown = [a + b for a, b in zip(grown, moved, strict=True)]
        chances = grown
    return min(1.0, math.fsum(chances[got:]))


def averaged(rows: Sequence[Row]) -> list[Row]:
    """Each row with the mean of the incumbent's scores as its only other score.

    A test of these asks whether the *differences* lean to one side, so it also holds for a candidate that changed and
    is no better on average: one that wins some tasks and loses as many, where the incumbent's answers never vary. A
    test of the rows themselves calls such a candidate better 3 times in 100 where it promised 1 in 1000 (measured).
    """
    return [(ours, (math.fsum(theirs) / len(theirs),)) for ours, theirs in rows if theirs]


def chance(rows: Sequence[Row]) -> float:
    """The chance of rows this good if the candidate is no better: the larger of both tests' p-values. Exact when
    nothing changed; when much changed, exact for differences that are as often positive as negative at each size."""
    return max(tail(rows), tail(averaged(rows)))


def differences(rows: Sequence[Row]) -> list[float]:
    """Candidate's score minus the mean of the incumbent's, for each task."""
    return [ours - math.fsum(theirs) / len(theirs) for ours, theirs in rows if theirs]


def gain(differences: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """(mean, lower, upper): the mean difference and Student's two-sided interval; (., -1, 1) without two of them.

    Equal differences have no variance to go by, and still are no certainty: what n of n tasks did not show may hold for
    a share 1 - ((1 - level) / 2)^(1 / n) of all tasks (the exact binomial bound of none seen: Clopper, Pearson 1934;
    about 3.7 / n at 95%), which could be at -1 or at 1.
    """
    n = len(differences)
    if n < 2:
        return (math.fsum(differences), -1.0, 1.0)
    mean = math.fsum(differences) / n
    if max(differences) - min(differences) < 1 / GRID:
        unseen = 1 - (0.5 - level / 2) ** (1 / n)
        return mean, mean - unseen * (1 + mean), mean + unseen * (1 - mean)
    error = standard_error(differences)
    reach = quantile(0.5 - level / 2, n - 1) * error
    return mean, mean - reach, mean + reach


def standard_error(differences: Sequence[float]) -> float:
    """Of the mean, from the sample's variance (n - 1)."""
    n = len(differences)
    mean = math.fsum(differences) / n
    return math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1) / n)


def student(t: float, freedom: int) -> float:
    """The chance that Student's t (Student 1908) with so many degrees of freedom is at least t: the finite series of
    Abramowitz, Stegun 1964, 26.7.3 and 26.7.4, exact but for rounding (about 1e-15)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for k in range(1, freedom // 2 + 1):
        total += term
        term *= square * ((2 * k) / (2 * k + 1) if odd else (2 * k - 1) / (2 * k))
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return min(1.0, max(0.0, 0.5 - inside / 2))


def quantile(above: float, freedom: int) -> float:
    """The t that Student's t exceeds with chance `above` (at most 1/2, at least 1e-12), by bisection."""
    low, high = 0.0, 1.0
    while student(high, freedom) > above:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student(middle, freedom) > above else (low, middle)
    return (low + high) / 2


def mcnemar(wins: int, losses: int) -> float:
    """McNemar's exact test, one-sided: the chance of at least `wins` of `wins + losses` fair coin tosses (McNemar 1947,
    in the exact binomial form). Pairs with equal scores carry no evidence and are not counted. No pairs: 1."""
    pairs = wins + losses
    return float(sum(math.comb(pairs, k) for k in range(wins, pairs + 1)) / 2**pairs)


def above(scores: Sequence[float], at: float) -> float:
    """The chance of a mean this high, at most, if each score's mean is `at`: the exact binomial tail for 0/1 scores,
    Hoeffding's bound exp(-n KL(mean, at)) (Hoeffding 1963, theorem 1) for others. No scores: 1."""
    n, total = len(scores), math.fsum(scores)
    if all(score in (0.0, 1.0) for score in scores):
        return min(1.0, math.fsum(math.comb(n, k) * at**k * (1 - at) ** (n - k) for k in range(round(total), n + 1)))
    mean = total / n
    if mean <= at:
        return 1.0
    rest = (1 - mean) * math.log((1 - mean) / (1 - at)) if mean < 1 else 0.0
    return math.exp(-n * (mean * math.log(mean / at) + rest))


def fisher(passed: int, of: int, before: int, of_before: int) -> float:
    """Fisher's exact test, one-sided: the chance that the second of two groups gets so few of all passes as `passed` of
    `of`, when the first got `before` of `of_before` (Fisher 1935)."""
    all_passed, everything = passed + before, of + of_before
    ways = sum(math.comb(of, k) * math.comb(of_before, all_passed - k) for k in range(passed + 1))
    return ways / math.comb(everything, all_passed)


class Wager:
    """An e-value that a mean of scores in [-1, 1] lies above `bound`, for scores that are not exchangeable with others:
    the wealth of one who bets on it (Waudby-Smith, Ramdas 2024).

    The stake is chosen from what was seen before (plug-in, at most `most` of what can be lost), so it is predictable;
    `stake` fixes it.
    """

    def __init__(self, bound: float = 0.0, most: float = 0.5, stake: float | None = None) -> None:
        self._bound, self._most, self._stake = bound, most, stake
        self._count, self._sum, self._squares = 0, 0.0, 0.0
        self._log = 0.0
        self.best = 1.0

    def add(self, score: float) -> float:
        """Take one score; returns the e-value now."""
        above, stake = score - self._bound, self._stake
        if stake is None:
            mean, square = self._sum / (self._count + 1), (self._squares + 0.25) / (self._count + 1)
            stake = max(0.0, min(self._most / (1 + self._bound), mean / square)) if self._count else 0.0
        self._log += math.log1p(stake * above)
        self._count, self._sum, self._squares = self._count + 1, self._sum + above, self._squares + above**2
        self.best = max(self.best, self.value)
        return self.value

    @property
    def value(self) -> float:
        return math.exp(min(700.0, self._log))


def msprt(total: float, count: int, variance: float, prior: float) -> float:
    """The mixture sequential probability ratio of a normal mean against 0, with a normal prior of variance `prior`
    (Robbins 1970; Johari, Pekelis, Walsh 2015). `total`: the sum of `count` observations of the given variance."""
    spread = variance + count * prior
    return math.sqrt(variance / spread) * math.exp(prior * total**2 / (2 * variance * spread))
