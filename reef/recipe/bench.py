"""What a harness recipe that searches may use: a model to ask, trees to measure, and what was turned down before.

Knows: the seam between a method (`recipes/`) and the loop, which makes a `Bench` for each order.
Does not know: engines, episodes, the gate's own tasks: a search never sees what decides about its result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from reef.core.nouns import Json, Unit
from reef.evaluation import Task
from reef.harness.trajectory import Trajectory
from reef.harness.tree import Entry, Mutation


@dataclass(frozen=True, slots=True)
class Proposed:
    """An edit with its reason. No mutations: the search found nothing worth a candidate, and `reason` says why."""

    mutations: tuple[Mutation, ...]
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A proposal that came to nothing: shown to the next proposer so that it is not made again."""

    mutations: tuple[Mutation, ...]
    reason: str  # of the proposal
    why: str  # it was turned down, by the gate, by admission or by a person
    at: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What one task gave under one tree. None: it could not be measured, and `note` says why. `feedback` is what the
    scorer or check said, `answer` the last words, `trajectory` what an agent did."""

    task: Task
    score: float | None
    answer: str = ""
    feedback: str = ""
    trajectory: Trajectory | None = None
    note: str = ""


class Bench(Protocol):
    """`folder` is the search's own, kept until its order is settled: what it writes there (by rename) it finds again
    after a crash. `instruction` is a person's wish that this order came from; None: it came from experience.
    `rejected` is the newest first."""

    folder: Path
    instruction: str | None
    rejected: Sequence[Refusal]

    async def ask(self, engine: str | None, body: Mapping[str, Json]) -> str:
        """As `recipe.Asking`: the text of a model's answer."""

    def tasks(self, source: str) -> Sequence[Task]:
        """The tasks of a file (or dotted path) in the form of `gate.suite`. ConfigError says what is wrong with it."""

    async def measure(self, tree: Sequence[Entry], tasks: Sequence[Task], seed: int) -> Sequence[Measured]:
        """Each task once under this tree, answered by what is served now; in the order of `tasks`."""

    async def story(self, unit: Unit) -> str:
        """The session that a unit is of, as plain text, cut to what a proposer can read. Untrusted: fence it."""

    def progress(self, stage: str, done: int, total: int) -> None:
        """Shown in the status while the search goes on."""


Callback = Callable[[str], str]
"""A proposer in code: a prompt to an answer. Dotted paths in a recipe's `proposer` name one."""
