"""GEPA: texts of the tree are rewritten by reflection on what they led to, and the best of an archive is proposed.

Knows: its settings, how a search is driven and kept, what of it becomes a proposal.
Does not know: how the search goes on (`search.py`), or whether its result will be served: the gate decides, on tasks
that the search never sees.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from reef.core.errors import ConfigError
from reef.core.nouns import Batch, PartName, Unit
from reef.experience.units import Signal
from reef.recipe import Entry, Mutation, Objective, complaints, fields, writer
from reef.recipe.bench import Bench, Measured, Proposed, Refusal
from reef.recipe.writer import Writer

from . import prompt, tasks, texts
from .journal import Journal
from .search import Answer, Measure, Plan, Rewrite, Seen, Text, advance, over
from .state import State, load

KINDS = ("rules", "skill")
NAMED = 4  # tasks, and reports, that a reason names
REPORTS = 8  # that a reflector is shown
ERRORS = 5  # of an agent's work that a reflector is shown
HELD = 8_000  # characters of an answer that are kept for the reflector

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GEPARecipe:
    """The YAML keys of `recipe: gepa`."""

    tasks: str = ""  # a file of tasks (or package.module:name), as gate.suite has them: what is learnt from
    validation: str | None = None  # another: what chooses; null: half of `tasks`, by a digest of their ids
    batch_size: int = 3  # reports that begin a search
    max_score: float = 0.0  # reports with at most this score, or with written feedback, count
    minibatch: int = 3
    max_metric_calls: int = 150  # tasks that one search may run, never more
    merges: int = 5
    components: list[str] = field(default_factory=lambda: list(KINDS))  # kinds of entries whose texts are rewritten
    reflector: str | None = None  # null: the scenario's own engine; an engine's name; package.module:name of a callable
    answer_tokens: int = 4096  # of the reflector's answer, at most; what a model thinks is among them
    max_chars: int = 2_000  # of one text
    seed: int = 0
    max_staleness: int | None = None

    part: ClassVar[PartName | None] = "harness"
    signals: ClassVar[frozenset[Signal]] = frozenset({"score", "feedback"})
    trusted: ClassVar[frozenset[str]] = frozenset({"tasks", "validation", "reflector"})
    applies: ClassVar[bool] = True  # its tasks are asked with the texts in the request, so users get them there too

    def __post_init__(self) -> None:
        named = isinstance(self.tasks, str) and bool(self.tasks.strip())
        fields.need(named, "tasks", "a file of tasks, as gate.suite has them (not the gate's own)", self.tasks)
        fields.need(
            self.validation is None or (isinstance(self.validation, str) and bool(self.validation.strip())),
            "validation", "null or a file of tasks", self.validation,
        )  # fmt: skip
        fields.need(self.validation != self.tasks, "validation", "another file than tasks, or null", self.validation)
        fields.whole(self, "batch_size", 1)
        fields.number(self, "max_score", -1e9)
        fields.whole(self, "minibatch", 1, 256)
        fields.whole(self, "max_metric_calls", 1)
        fields.whole(self, "merges", 0, 1000)
        right = isinstance(self.components, list) and self.components and all(one in KINDS for one in self.components)
        fields.need(bool(right), "components", f"a list of {' and '.join(KINDS)}", self.components)
        writer.check(self, "reflector")
        fields.whole(self, "answer_tokens", 1)
        fields.whole(self, "max_chars", 20, 60_000)
        fields.whole(self, "seed", 0, 2**31 - 1)

    @property
    def engines(self) -> tuple[str, ...]:
        return writer.engines(self.reflector)

    def batch(self, units: Sequence[Unit]) -> Batch | None:
        """The first `batch_size` reports that say that something went wrong."""
        return complaints.batch(units, self.batch_size, self.max_score)

    def objective(self) -> Objective:
        raise ConfigError("gepa rewrites texts of the harness and has no objective; name a weights recipe to train")

    def propose(self, batch: Batch, tree: Sequence[Entry]) -> Sequence[Mutation]:
        """Nothing without a bench: see `search`."""
        return ()

    async def search(self, batch: Batch | None, tree: Sequence[Entry], bench: Bench) -> Proposed:
        """The texts that are best on the validation tasks, where they are better than those that are served.

        Errors are of the surroundings (an engine that is away, a file that is not there); the search goes on from
        `bench.folder` when it is called again.
        """
        sets = tasks.read(bench, self.tasks, self.validation)
        plan = self.plan(sets, tree)
        if (warning := _warning(plan)) is not None:
            log.warning(warning)
        if plan.proposals == 0:
            return Proposed((), warning or "")
        drive = _Drive(self, plan, sets, tree, bench, _reports(batch, bench))
        state = await drive.run()
        return _outcome(state, plan, tree, batch, warning, bench.rejected)

    def plan(self, sets: tasks.Sets, tree: Sequence[Entry]) -> Plan:
        return Plan(
            train=tuple(task.id for task in sets.train),
            validation=tuple(task.id for task in sets.validation),
            start=texts.read(tree, self.components),
            minibatch=self.minibatch,
            budget=self.max_metric_calls,
            merges=self.merges,
            seed=self.seed,
        )


@dataclass(slots=True)
class _Drive:
    """Answers what a search wants to know, and keeps the answers."""

    recipe: GEPARecipe
    plan: Plan
    sets: tasks.Sets
    tree: Sequence[Entry]
    bench: Bench
    reports: Sequence[str]

    async def run(self) -> State:
        journal = Journal(self.bench.folder, self.plan, self.tree)
        while (why := over(journal.state, self.plan)) is None:
            state = load(journal.before)
            round_, kept = advance(state, self.plan), list(journal.said)
            try:
                wanted = next(round_)
                while True:
                    if kept:
                        answer = kept.pop(0)
                    else:
                        answer = await self.answer(wanted, state.calls)
                        journal.answered(answer)
                    wanted = round_.send(answer)
            except StopIteration:
                journal.ended(state)
        journal.state.say(f"the end: {why}")
        return journal.state

    async def answer(self, wanted: Measure | Rewrite, calls: int) -> Answer:
        if isinstance(wanted, Rewrite):
            self.bench.progress("reflecting", calls, self.plan.budget)
            return await self.rewrite(wanted)
        self.bench.progress(wanted.stage, calls, self.plan.budget)
        grown = texts.grown(self.tree, wanted.texts)
        found = await self.bench.measure(grown, self.sets.find(wanted.tasks), wanted.seed)
        return [_seen(name, one) for name, one in zip(wanted.tasks, found, strict=True)]

    async def rewrite(self, wanted: Rewrite) -> Text:
        """What the reflector makes of it. Whatever it says, this is a value."""
        kind = next((entry.kind for entry in self.tree if entry.id == wanted.component), "rules")
        asked = {task.id: tasks.asked(task) for task in self.sets.train}
        text, most = wanted.texts[wanted.component], self.recipe.max_chars
        question = prompt.question(kind, text, wanted.seen, asked, self.reports, most)
        written = await Writer(self.recipe.reflector, self.recipe.answer_tokens).write(self.bench, question)
        if not written.text:
            return Text("", written.why)
        made = prompt.answer(written.text)
        wrong = texts.flaw(self.tree, {**wanted.texts, wanted.component: made}, wanted.component, most)
        return Text(made) if wrong is None else Text("", wrong)


def _seen(name: str, one: Measured) -> Seen:
    """What is kept of a measurement for the reflector: of an agent's work also what went wrong on the way."""
    failed = one.trajectory.errors if one.trajectory is not None else ()
    answer = "\n".join([one.answer, *(f"failed on the way: {error}" for error in failed[:ERRORS])])
    return Seen(name, one.score, answer[-HELD:], (one.feedback or one.note)[-HELD:])


def _reports(batch: Batch | None, bench: Bench) -> list[str]:
    """What people said that a reflector should know: their reports, and the wish that began the search."""
    said = [complaints.said(unit) for unit in batch.units] if batch is not None else []
    return [one for one in dict.fromkeys((bench.instruction or "", *said)) if one][:REPORTS]


def _warning(plan: Plan) -> str | None:
    """Where the budget is too small to be of use."""
    if plan.proposals >= 2:
        return None
    least = len(plan.validation) + 2 * plan.round
    pays = "one proposal" if plan.proposals else "no proposal"
    return (
        f"max_metric_calls {plan.budget} pays for {pays}: {len(plan.validation)} validation tasks are run for what is "
        f"served and again for each proposal, with 2 minibatches of {plan.size}; two proposals need {least}"
    )


def _outcome(
    state: State,
    plan: Plan,
    tree: Sequence[Entry],
    batch: Batch | None,
    warning: str | None,
    rejected: Sequence[Refusal],
) -> Proposed:
    """The best candidate as an edit, with what led to it."""
    spent = f"{state.calls} of {plan.budget} metric calls in {state.rounds} rounds"
    figures = {
        "metric_calls": float(state.calls),
        "rounds": float(state.rounds),
        "rewrites": float(state.rewrites),
        "usable": float(state.usable),
        "better_on_minibatch": float(state.accepted),
        "candidates": float(len(state.candidates)),
        "merges": float(state.merges),
    }
    if not state.candidates:
        return Proposed((), f"no proposal: {state.over or 'nothing could be measured'} ({spent})", figures)
    means, best = state.means, _best(state, tree, rejected)
    figures |= {"validation_before": means[0], "validation_best": max(means)}
    if best is None:
        note = f"; {warning}" if warning else ""
        return Proposed((), f"no proposal: nothing new was better than what is served ({spent}){note}", figures)
    chosen = state.candidates[best]
    reason = (
        f"gepa: validation {means[best]:.3f} against {means[0]:.3f} on {len(chosen.scores)} tasks ({spent}); learnt "
        f"from {_some(chosen.learnt)}"
    )
    if batch is not None:
        reason += f"; begun by {_some([unit.report.id for unit in batch.units])}"
    return Proposed(texts.mutations(tree, chosen.texts), reason, figures)


def _best(state: State, tree: Sequence[Entry], rejected: Sequence[Refusal]) -> int | None:
    """The candidate with the best mean that is better than what is served on the tasks that both were measured on, and
    was not turned down before; of equals the oldest."""
    first = state.candidates[0]
    refused = {_bare(one.mutations) for one in rejected}
    for place in state.ranking:
        one = state.candidates[place]
        common = first.scores.keys() & one.scores.keys()
        gain = math.fsum(one.scores[task] - first.scores[task] for task in common)
        if gain > 0 and _bare(texts.mutations(tree, one.texts)) not in refused:
            return place
    return None


def _bare(mutations: Sequence[Mutation]) -> str:
    return json.dumps(sorted([one.op, one.id, one.config] for one in mutations), sort_keys=True)


def _some(names: Sequence[str]) -> str:
    known = list(dict.fromkeys(names))
    more = f" and {len(known) - NAMED} more" if len(known) > NAMED else ""
    return ", ".join(one[:40] for one in known[:NAMED]) + more
