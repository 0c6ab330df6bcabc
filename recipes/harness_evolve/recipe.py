"""Harness evolution: sessions that went wrong are shown to a proposer, who answers with an edit of the tree.

Knows: its settings, what a proposer is shown, how its answer is read and repaired once, a first cheap check.
Does not know: whether the edit is any good: the gate decides, on tasks that are never seen here.

Whatever a proposer says is a value: an edit, or no proposal with its reason. Only an engine that is away, or a file
that is not there, is an error.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from reef.cordis.compose import propose
from reef.core.errors import ConfigError
from reef.core.nouns import Batch, PartName, Unit
from reef.evaluation import Task
from reef.experience.units import Signal
from reef.recipe import Entry, Mutation, Objective, complaints, fields, writer
from reef.recipe.bench import Bench, Proposed
from reef.recipe.writer import Writer

from . import prompt, proposal
from .prompt import Case
from .proposal import Edit, Faults

KINDS = ("rules", "skill", "command")
CHECKED = 8  # tasks of a cheap check
NAMED = 4  # reports that a reason names
FILE = "evolve.json"
_ROLE = re.compile(r"^(user|assistant|system|developer|tool): ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class HarnessEvolve:
    """The YAML keys of `recipe: harness_evolve`."""

    batch_size: int = 3  # reports of one proposal
    proposer: str | None = None  # null: the scenario's own engine; an engine's name; package.module:name of a callable
    answer_tokens: int = 4096  # of the proposer's answer, at most; what a model thinks is among them
    max_score: float = 0.0  # reports with at most this score, or with written feedback, count
    kinds: list[str] = field(default_factory=lambda: list(KINDS))  # of entries it may create, change and remove
    max_chars: int = 2_000  # of one text
    tasks: str | None = None  # a file of tasks as gate.suite has them (not the gate's own): checked before the gate
    max_staleness: int | None = None

    trusted: ClassVar[frozenset[str]] = frozenset({"tasks", "proposer"})
    part: ClassVar[PartName | None] = "harness"
    signals: ClassVar[frozenset[Signal]] = frozenset({"score", "feedback"})

    def __post_init__(self) -> None:
        fields.whole(self, "batch_size", 1)
        writer.check(self, "proposer")
        fields.whole(self, "answer_tokens", 1)
        fields.number(self, "max_score", -1e9)
        right = isinstance(self.kinds, list) and self.kinds and all(one in KINDS for one in self.kinds)
        fields.need(bool(right), "kinds", f"a list of {', '.join(KINDS)}", self.kinds)
        fields.whole(self, "max_chars", 20, 60_000)
        fields.need(
            self.tasks is None or (isinstance(self.tasks, str) and bool(self.tasks.strip())),
            "tasks", "null or a file of tasks, as gate.suite has them (not the gate's own)", self.tasks,
        )  # fmt: skip

    @property
    def engines(self) -> tuple[str, ...]:
        return writer.engines(self.proposer)

    def batch(self, units: Sequence[Unit]) -> Batch | None:
        """The first `batch_size` reports that say that something went wrong."""
        return complaints.batch(units, self.batch_size, self.max_score)

    def objective(self) -> Objective:
        raise ConfigError("harness_evolve edits the harness and has no objective; name a weights recipe to train")

    def propose(self, batch: Batch, tree: Sequence[Entry]) -> Sequence[Mutation]:
        """Nothing without a bench: see `search`."""
        return ()

    async def search(self, batch: Batch | None, tree: Sequence[Entry], bench: Bench) -> Proposed:
        """One edit, asked for once and once more where the first answer is none. After a crash the proposer is not
        asked again for what it answered before."""
        units = batch.units if batch is not None else ()
        tasks = list(bench.tasks(self.tasks)) if self.tasks is not None else []
        shown = await cases(units, bench)
        asked = prompt.question(
            tree, shown,
            kinds=self.kinds, most=self.max_chars, instruction=bench.instruction, rejected=bench.rejected,
        )  # fmt: skip
        told, figures = asked, {"sessions": float(len(shown)), "suspicious": float(_steering(shown))}
        faults: tuple[str, ...] = ()
        for turn in range(2):
            bench.progress("proposing", turn, 2)
            figures["repairs"] = float(turn)
            said = await self._ask(bench, told, turn)
            if not said.text:
                return Proposed((), f"no proposal: {said.why}", figures)
            read = proposal.read(
                said.text, tree, kinds=self.kinds, most=self.max_chars, rejected=bench.rejected
            )  # fmt: skip
            if isinstance(read, Edit):
                return await self._checked(read, tree, tasks, bench, units, figures)
            assert isinstance(read, Faults)
            faults = read.said
            told = prompt.repair(asked, faults)
        return Proposed((), f"no proposal: the proposer's answer cannot be used: {'; '.join(faults)}", figures)

    async def _ask(self, bench: Bench, told: str, turn: int) -> writer.Written:
        """The proposer's answer of this turn, written down before it is used."""
        path = bench.folder / FILE
        known = _kept(path)
        if turn < len(known):
            return writer.Written(known[turn])
        said = await Writer(self.proposer, self.answer_tokens).write(bench, told)
        if said.text:
            _keep(path, [*known, said.text])
        return said

    async def _checked(
        self,
        edit: Edit,
        tree: Sequence[Entry],
        tasks: Sequence[Task],
        bench: Bench,
        units: Sequence[Unit],
        figures: dict[str, float],
    ) -> Proposed:
        """The edit, if it is not worse than what is served on a few tasks. Equal is enough: what is mended may not be
        among them, and the gate looks closer."""
        reason = f"evolve: {edit.reason or 'no reason was given'}{_from(units, bench)}"
        if figures["suspicious"]:
            reason += f"; {figures['suspicious']:g} of its sessions hold text that looks like an attempt to steer"
        if not edit.mutations:
            return Proposed((), f"no proposal: {edit.reason or 'the proposer sees nothing to mend'}", figures)
        figures["mutations"] = float(len(edit.mutations))
        if not tasks:
            return Proposed(edit.mutations, reason, figures)
        grown = propose(tree, edit.mutations).entries
        assert grown is not None, "read admitted it"
        seed = int(hashlib.sha256(repr(edit.mutations).encode("utf-8", "replace")).hexdigest()[:7], 16)
        chosen = random.Random(seed).sample(tasks, min(CHECKED, len(tasks)))
        before = await bench.measure(tree, chosen, seed)
        bench.progress("checking", 1, 2)
        after = await bench.measure(grown, chosen, seed)
        pairs = [
            (one.score, other.score)
            for one, other in zip(before, after, strict=True)
            if one.score is not None and other.score is not None
        ]
        old, new = math.fsum(one for one, _ in pairs), math.fsum(other for _, other in pairs)
        figures |= {"checked": float(len(pairs)), "check_before": old, "check_after": new}
        if new < old:
            return Proposed((), f"no proposal: worse on {len(pairs)} tasks, {new:g} against {old:g}: {reason}", figures)
        return Proposed(edit.mutations, f"{reason}; {new:g} against {old:g} on {len(pairs)} tasks", figures)


async def cases(units: Sequence[Unit], bench: Bench) -> list[Case]:
    """One for each session, however many of its turns were reported on. Who said a line is written so that it is not
    taken for a role marker that somebody slipped in."""
    told: dict[str, list[tuple[float | None, str]]] = {}
    for unit in units:
        said, story = (unit.score, complaints.said(unit)), _ROLE.sub(r"\1 said: ", await bench.story(unit))
        if said not in told.setdefault(story, []):
            told[story].append(said)
    return [Case(story, tuple(reports)) for story, reports in told.items()]


def _steering(shown: Sequence[Case]) -> int:
    return sum(bool(case.suspicious) for case in shown)


def _from(units: Sequence[Unit], bench: Bench) -> str:
    """What led to a proposal, as the end of its reason."""
    if bench.instruction:
        return f" (asked for: {' '.join(bench.instruction.split())[:200]})"
    reports = list(dict.fromkeys(unit.report.id for unit in units))
    more = f" and {len(reports) - NAMED} more" if len(reports) > NAMED else ""
    return f" (from {', '.join(reports[:NAMED])}{more})" if reports else ""


def _kept(path: Path) -> list[str]:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))["said"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return said if isinstance(said, list) and all(isinstance(one, str) for one in said) else []


def _keep(path: Path, said: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"said": list(said)}), encoding="utf-8")
    part.replace(path)
