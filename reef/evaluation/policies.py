"""The gate's policies: one class each, one method. A verdict comes with a reason a person understands.

Knows: what each policy claims, in which order things are asked, and how guards and claims become a verdict.
Does not know: how guards and scores are measured (`check`, `trial`), the statistics (`claims`, `shield`), or how the
candidate was made and what follows from the verdict.

- Guards come first and cost least: what they reject is not asked a suite. `Always` accepts unseen.
- A policy with a suite asks chunks of tasks until each of its claims is decided, then what protected tasks need.
- More than a tenth of the tasks missing or unjudged is undecided, never a release.
- An engine that cannot answer now is an EngineError; a candidate the engine cannot load is rejected.
- Every policy is made with the same three arguments, so that one is exchanged for another by its name.
"""

from __future__ import annotations

import asyncio
import difflib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast

from reef.core.errors import ConfigError
from reef.core.load import load
from reef.core.nouns import Candidate, Evaluation, Guard, Release, Verdict
from reef.evaluation import POLICIES, Means, Options, Sizes
from reef.evaluation.ask import Asker
from reef.evaluation.book import Book, digest
from reef.evaluation.budget import left, share
from reef.evaluation.check import Check
from reef.evaluation.claims import Above, Claim, Higher, Look, NoLower
from reef.evaluation.evidence import differences, gain
from reef.evaluation.guards import Limits
from reef.evaluation.shield import Shield
from reef.evaluation.trial import Trial, exhausted

CHUNK = 16  # tasks asked at once, before a look asks whether it is decided
WORK = 4  # of agents' jobs, which cost more
SPELLED = {"accept": "Accepted", "reject": "Rejected", "undecided": "Undecided"}
REMEMBERED = 64  # looks whose tasks are remembered, so that the gain is measured on others


@dataclass(frozen=True, slots=True)
class Gain:
    """How much better an accepted release is, measured after the decision: score points from -1 to 1, with a 95%
    interval. `fresh`: on tasks that the decision did not see; else on the same ones with other seeds."""

    mean: float
    lower: float
    upper: float
    tasks: int
    fresh: bool


class Always:
    """Accepts every candidate unseen. For experiments, and for a person who decides elsewhere."""

    name = "always"
    fields: ClassVar[tuple[str, ...]] = ()
    suited = False

    def __init__(self, means: Means, sizes: Sizes, options: Options) -> None:
        pass

    async def evaluate(self, candidate: Candidate, incumbent: Release, look: int) -> Evaluation:
        return Evaluation(
            "always", "accept", "Accepted unseen: the policy is `always`.", candidate.id, incumbent.id, looks=look
        )

    def claims(self, limit: float, planned: int) -> list[Claim]:
        return []

    def shields(self) -> list[Shield]:
        return []


class Guarded:
    """Accepts a candidate that holds every guard; see `guards`. `options` are fields of `guards.Limits`."""

    name = "guarded"
    fields: ClassVar[tuple[str, ...]] = ()  # of `options` that are the policy's own

    def __init__(self, means: Means, sizes: Sizes, options: Options) -> None:
        own = {name: value for name, value in options.items() if name in self.fields}
        self.limits = Limits.of({name: value for name, value in options.items() if name not in own}, self.fields)
        self.sizes = sizes
        self.means = replace(means, book=means.book or Book.memory())
        self._ask = Asker.of(means)
        self._check = Check(means, self._ask, self.limits)
        self._used: dict[str, frozenset[str]] = {}  # the tasks that a candidate's look asked
        self.configure(own)
        if self.suited and means.suite is None:
            raise ConfigError(
                f"the gate policy {self.name} compares scores on a suite; set gate.suite, or use policy: guarded",
                param="gate.suite",
            )

    def configure(self, options: Options) -> None:
        """Read the policy's own options. ConfigError says what is wrong with them."""

    def claims(self, limit: float, planned: int) -> list[Claim]:
        """What must be shown on the suite, each with this chance of being wrong."""
        return []

    def shields(self) -> list[Shield]:
        return []

    @property
    def suited(self) -> bool:
        """Whether it measures on a suite."""
        return bool(self.claims(0.01, 1) or self.shields())

    async def evaluate(self, candidate: Candidate, incumbent: Release, look: int) -> Evaluation:
        began, book = time.monotonic(), cast(Book, self.means.book)
        if why := exhausted(self.means, self.sizes):
            return Evaluation(self.name, "undecided", f"Undecided: {why}.", candidate.id, incumbent.id, looks=look)
        guards = await self._check.all(candidate, incumbent)
        cost = self._ask.bill()
        book.charge(self.means.scenario, cost)
        verdict, reason = _judge(guards)
        metrics = {one.name: one.value for one in guards if one.value is not None}
        name = None
        if verdict == "accept" and self.suited:
            trial = await Trial.open(self.means, candidate, incumbent, sizes=self.sizes, asker=self._ask)
            turn = book.turn(self.means.scenario, trial.key)
            budget = book.budget(self.means.scenario)
            verdict, words, measured = await self._measure(trial, self.sizes.alpha * budget * share(turn))
            reason = f"{SPELLED[verdict]}: {words}{_aside(trial, turn)}."
            metrics |= measured | {"turn": turn}
            cost, name = cost + trial.cost, trial.draw.name
            self._used[trial.key] = frozenset(result.id for result in trial.results)
            while len(self._used) > REMEMBERED:
                del self._used[next(iter(self._used))]
            if verdict == "accept":
                book.won(self.means.scenario, trial.key, left(budget, turn))
        seconds = time.monotonic() - began
        return Evaluation(
            self.name, verdict, reason, candidate.id, incumbent.id, tuple(guards), metrics, look, seconds, name, cost
        )

    async def remeasure(self, release: Release, before: Release) -> Gain | None:
        """How much an accepted release gained over the one before it. What was measured for the decision is too good:
        it was accepted because it looked good (the winner's curse). None: there are too few tasks, or no suite."""
        if not self.suited:
            return None
        sizes = replace(self.sizes, repeats=1)
        used = self._used.get(digest((await self._ask.side(release)).key), frozenset())
        for avoid in (used, frozenset[str]()):
            trial = await Trial.open(
                self.means, release, before, sizes=sizes, asker=self._ask, measure=True, avoid=avoid
            )
            if len(trial.tasks) < self.sizes.least:
                continue
            while await trial.more(_chunk(trial)):
                pass
            found = differences(trial.rows)
            if len(found) < max(2, self.sizes.least):
                return None
            return Gain(*gain(found), tasks=len(found), fresh=bool(avoid))
        return None

    async def _measure(self, trial: Trial, limit: float) -> tuple[Verdict, str, dict[str, float]]:
        """(verdict, why, figures) of a look: its claims on the suite, then its protected tasks. `limit`: the chance of
        being wrong that the claims may have."""
        look = Look(self.claims(limit, len(trial.tasks)), self.sizes.least)
        verdict, words = await self._claim(trial, look) if look.claims else ("accept", "")
        figures = {name: value for one in look.findings for name, value in one.metrics.items()}
        for shield in self.shields():
            if verdict != "accept":
                break
            found = await shield.look(trial)
            verdict = cast(Verdict, found.verdict)
            words = "; ".join(filter(None, [words, found.words])) if verdict == "accept" else found.words
            figures |= found.metrics
        return verdict, words, figures | _figures(trial)

    async def _claim(self, trial: Trial, look: Look) -> tuple[Verdict, str]:
        """Chunks of tasks until the look is decided."""
        planned, taken = len(trial.tasks), 0
        if planned < look.needs:
            return "undecided", f"not enough evidence: {planned} tasks can never show it, {look.needs} are needed"
        while True:
            more = await trial.more(_chunk(trial))
            final = not more or len(trial.results) >= planned
            rows = trial.rows[taken:]
            taken += len(rows)
            verdict = await asyncio.to_thread(look.take, rows, final=final)
            lost, limit = trial.missing + trial.unjudged, self.limits.missing
            if lost > limit * (len(trial.results) if final else planned):
                return "undecided", _lost(trial)
            if verdict is not None and lost <= limit * len(trial.results):
                capped = trial.capped if verdict == "undecided" else ""
                return verdict, "; ".join(filter(None, [_rates(trial), look.words(verdict), capped]))


class Better(Guarded):
    """Accepts a candidate that scores higher than the incumbent on the suite, beyond chance."""

    name = "better"

    def claims(self, limit: float, planned: int) -> list[Claim]:
        return [Higher(limit, planned)]


class NoWorse(Guarded):
    """Accepts a candidate that scores less than `margin` (0.05) below the incumbent, beyond chance."""

    name = "no_worse"
    fields = ("margin",)

    def configure(self, options: Options) -> None:
        self.margin = _between(options, "margin", 0.05)

    def claims(self, limit: float, planned: int) -> list[Claim]:
        return [NoLower(limit, planned, self.margin)]


class Floor(Guarded):
    """Accepts a candidate whose own mean score is above `at`, beyond chance. The incumbent's scores play no part."""

    name = "floor"
    fields = ("at",)

    def configure(self, options: Options) -> None:
        self.at = _between(options, "at", None)

    def claims(self, limit: float, planned: int) -> list[Claim]:
        return [Above(limit, planned, self.at)]


class Protected(Guarded):
    """Accepts a candidate under which no protected task goes from pass to fail. `tasks` are ids of more such tasks."""

    name = "protected"
    fields = ("tasks",)

    def configure(self, options: Options) -> None:
        names = options.get("tasks", ())
        if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(one, str) for one in names):
            raise ConfigError("gate option tasks must be a list of task ids", param="gate.options.tasks")
        self.shield = Shield(names)

    def shields(self) -> list[Shield]:
        return [self.shield]


class AllOf(Guarded):
    """Accepts what each of `policies` accepts, over one set of guards and one look: names, or a mapping with `policy`
    and that policy's options. Claims share the rows; protected tasks, which may need more answers, come last."""

    name = "all_of"
    fields = ("policies",)

    def configure(self, options: Options) -> None:
        listed = options.get("policies")
        if isinstance(listed, str) or not isinstance(listed, Sequence) or not listed:
            raise ConfigError("policy all_of needs options.policies, a list of policies", param="gate.options.policies")
        self.parts = [self._part(one) for one in listed]

    def _part(self, given: object) -> Always | Guarded:
        options = {"policy": given} if isinstance(given, str) else dict(given) if isinstance(given, Mapping) else {}
        name = options.pop("policy", None)
        if isinstance(name, str) and name not in POLICIES and ":" not in name:
            close = difflib.get_close_matches(name, POLICIES, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(POLICIES)}"
            raise ConfigError(f"options.policies: there is no policy {name!r}; {hint}", param="gate.options.policies")
        made_of = load(POLICIES.get(name, name), what="policy") if isinstance(name, str) else None
        if not (isinstance(made_of, type) and issubclass(made_of, Always | Guarded)):
            raise ConfigError(
                f"options.policies: {given!r} is no policy; use one of {', '.join(POLICIES)}, or a mapping with policy",
                param="gate.options.policies",
            )
        if strange := sorted(set(options) - set(made_of.fields)):
            raise ConfigError(
                f"options.policies: {name} has no option {strange[0]!r}; guard limits stand beside policies",
                param="gate.options.policies",
            )
        return made_of(self.means, self.sizes, options)

    def claims(self, limit: float, planned: int) -> list[Claim]:
        return [claim for part in self.parts for claim in part.claims(limit, planned)]

    def shields(self) -> list[Shield]:
        return [shield for part in self.parts for shield in part.shields()]


# --- words and figures ------------------------------------------------------------------------------------------------


def _between(options: Options, name: str, default: float | None) -> float:
    value = options.get(name, default)
    if value is None and name not in options:
        raise ConfigError(
            f"gate option {name} is missing: a number between 0 and 1, under gate.options", param=f"gate.options.{name}"
        )
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ConfigError(f"gate option {name} must be a number between 0 and 1", param=f"gate.options.{name}")
    return float(value)


def _chunk(trial: Trial) -> int:
    return WORK if any(task.job is not None for task in trial.tasks) else CHUNK


def _judge(guards: Sequence[Guard]) -> tuple[Verdict, str]:
    first = guards[0]
    if first.name == "answered" and first.passed and (first.value or 0.0) > (first.limit or 0.0):
        return "undecided", f"Undecided: {first.note}."
    failed = [one for one in guards if not one.passed]
    if failed:
        more = (
            f" ({len(failed) - 1} more guards failed: {', '.join(one.name for one in failed[1:])})"
            if failed[1:]
            else ""
        )
        value = f"{failed[0].value:.2f}" if failed[0].value is not None else "none"
        limit = f", limit {failed[0].limit:.2f}" if failed[0].limit is not None else ""
        return "reject", f"Rejected by guard {failed[0].name} ({value}{limit}): {failed[0].note}{more}."
    unmeasured = [one.name for one in guards if one.value is None]
    aside = f"; not measured: {', '.join(unmeasured)}" if unmeasured else ""
    return "accept", f"Accepted: all {len(guards) - len(unmeasured)} guards hold{aside}."


def _means(trial: Trial) -> tuple[float, float]:
    """Mean scores of candidate and incumbent."""
    rows = trial.rows
    ours = math.fsum(ours for ours, _ in rows) / len(rows)
    return ours, ours - math.fsum(differences(rows)) / len(rows)


def _rates(trial: Trial) -> str:
    if not trial.rows:
        return ""
    ours, theirs = _means(trial)
    return f"it scores {ours:.2f}, the incumbent {theirs:.2f} on {len(trial.rows)} tasks"


def _figures(trial: Trial) -> dict[str, float]:
    figures: dict[str, float] = {"tasks": len(trial.results), "missing": trial.missing, "unjudged": trial.unjudged}
    figures["impossible"] = trial.candidate_failures
    if trial.rows:
        figures["candidate"], figures["incumbent"] = _means(trial)
    return figures


def _lost(trial: Trial) -> str:
    what = {"missing": trial.missing, "not judged": trial.unjudged}
    counts = " and ".join(f"{count} {name}" for name, count in what.items() if count)
    why = next(one.missing or one.unjudged for one in trial.results if one.missing or one.unjudged)
    return f"of {len(trial.results)} tasks {counts} ({why})"


def _aside(trial: Trial, turn: int) -> str:
    """In brackets behind a verdict: what the error budget counts, and what to know of the suite."""
    told = ["the first candidate since the last release" if turn == 1 else f"candidate {turn} since the last release"]
    if any(one.failed and one.task.job is not None for one in trial.results):
        first = f", one because {trial.faults[0]}" if trial.faults else ""
        told.append(f"{trial.candidate_failures} of its episodes failed by themselves, which score 0{first}")
    elif trial.candidate_failures:
        told.append(f"it makes {trial.candidate_failures} requests impossible, which score 0")
    if trial.draw.warning:
        told.append(trial.draw.warning.rstrip("."))
    return f" ({'; '.join(told)})"
