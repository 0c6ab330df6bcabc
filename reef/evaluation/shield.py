"""Protected tasks may not go from pass to fail: how that is told from bad luck.

Knows: the rule, and which answers it needs. Does not know: the other claims, or what follows.

- An answer passes with a score of at least PASS. A task is *suspected* when the candidate's answer fails and more than
  half of the incumbent's pass. Answers that merely vary make suspects too, so a suspect is asked again on both sides,
  with seeds of its own: 4 answers, then 8, then 16, and let go as soon as it passes no fewer than the incumbent's.
- A task on which the incumbent's own answer cannot be judged protects nothing: a check that a report brought may be one
  that takes for ever, and must not hold up every candidate from then on.
- It *went from pass to fail* when so few passes of the candidate beside those of the incumbent have a chance (Fisher's
  exact test) of at most ALPHA / (3 * protected tasks). So a candidate that is as good on all of them is rejected with
  a chance of at most ALPHA, and one that always fails what always passed is rejected for sure, up to 10 million tasks.
"""

from __future__ import annotations

from collections.abc import Collection

from reef.evaluation import Task
from reef.evaluation.claims import Finding
from reef.evaluation.evidence import fisher
from reef.evaluation.trial import Result, Trial

ALPHA = 0.05
PASS = 0.5
ANSWERS = (4, 8, 16)


class Shield:
    """Covers the tasks that are marked as protected, and those named."""

    def __init__(self, names: Collection[str] = ()) -> None:
        self.names = frozenset(names)

    def covers(self, task: Task) -> bool:
        return task.protected or task.id in self.names

    async def look(self, trial: Trial) -> Finding:
        """Ask what is needed until each protected task of the trial is cleared, or one has failed."""
        covered = [task for task in trial.tasks if self.covers(task)]
        absent = sorted(self.names - {task.id for task in covered})
        if absent or not covered:
            named = f"the suite has no task {absent[0]}" if absent else "the suite has no protected task"
            return Finding("undecided", f"nothing can be said of protected tasks: {named}")
        while len(trial.results) <= max(place for place, task in enumerate(trial.tasks) if self.covers(task)):
            if not await trial.more(16):
                return Finding("undecided", f"not all {len(covered)} protected tasks were asked")
        results = [result for result in trial.results if self.covers(result.task)]
        lost = [result for result in results if result.row is None and not result.void]
        suspects = [result for result in results if _suspect(result)]
        metrics = {"protected": len(covered), "suspected": len(suspects)}
        for suspect in suspects:
            found = await self._again(trial, suspect.task, ALPHA / (len(ANSWERS) * len(covered)))
            if found is None:
                lost.append(suspect)
            elif found:
                return Finding("reject", f"the protected task {suspect.id} went from pass to fail: {found}", metrics)
        if lost:
            why = lost[0].missing or lost[0].unjudged or trial.capped or "it could not be asked again"
            return Finding("undecided", f"the protected task {lost[0].id} was not measured ({why})", metrics)
        if all(result.void for result in results):
            return Finding("undecided", f"no protected task could be judged ({results[0].unjudged})", metrics)
        words = f"none of {len(covered)} protected tasks went from pass to fail"
        return Finding("accept", words, metrics)

    async def _again(self, trial: Trial, task: Task, limit: float) -> str | None:
        """Of a suspect: words when it went from pass to fail, nothing when it did not. None: it was not measured."""
        for answers in ANSWERS:
            scores = await trial.repeat(task, answers)
            if scores is None:
                return None
            ours, theirs = (sum(score >= PASS for score in side) for side in scores)
            p = fisher(ours, answers, theirs, answers)
            if p <= limit:
                return f"it passes {ours} of {answers} answers, the incumbent {theirs} (chance {p:.2g})"
            if ours >= theirs:
                break
        return ""


def _suspect(result: Result) -> bool:
    if result.row is None:
        return False
    ours, theirs = result.row
    return ours < PASS and sum(score >= PASS for score in theirs) > len(theirs) / 2
