"""Measure a candidate against the incumbent and decide. The gate is one method, `evaluate`.

Knows: how to ask an engine for answers of two releases (`ask`, `trial`), what a broken model looks like (`guards`),
tasks and how answers are scored (`suite`, `traffic`, `scorers`), how strong evidence is (`evidence`, `budget`), what it
proves (`claims`, `shield`) and how all of it becomes a verdict (`policies`). What must be remembered is in `book`.
Does not know: how the candidate was made, or what happens after the verdict.

Guards run always. A *look* is one measurement of one candidate; its tasks come from the suite, candidate and incumbent
get the same ones, and it stops as soon as it is decided. Undecided means "not enough evidence yet", a value like the
others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, cast

from reef.core.nouns import Candidate, Cost, Evaluation, Record, Release

if TYPE_CHECKING:
    from reef.engines import Engine
    from reef.evaluation.ask import Question
    from reef.evaluation.book import Book
    from reef.harness.apply import Applied
    from reef.harness.episode import Episodes, Job

POLICIES = {
    "always": "reef.evaluation.policies:Always",
    "guarded": "reef.evaluation.policies:Guarded",
    "floor": "reef.evaluation.policies:Floor",
    "better": "reef.evaluation.policies:Better",
    "no_worse": "reef.evaluation.policies:NoWorse",
    "protected": "reef.evaluation.policies:Protected",
    "all_of": "reef.evaluation.policies:AllOf",
}

Origin = Literal["file", "traffic", "failure", "code"]


class Evaluator(Protocol):
    async def evaluate(self, candidate: Candidate, incumbent: Release, look: int) -> Evaluation:
        """One look at a candidate. `look` counts from 1. EngineError when the engine cannot answer now."""


@dataclass(frozen=True, slots=True)
class Score:
    """What an answer is worth, 0 to 1. None: it could not be judged, and `note` says why; that is never a 0."""

    value: float | None
    note: str = ""
    cost: Cost = field(default_factory=Cost)  # of judging; most scorers cost nothing


class Scorer(Protocol):
    """Judges answers of one task. `name` is its name in the configuration; `key` changes when its judgement may."""

    name: str
    key: str

    async def score(self, task: Task, text: str) -> Score:
        """An answer by itself. Never raises for what the answer says."""


class Versus(Scorer, Protocol):
    """A scorer that compares two answers, such as a pairwise judge."""

    async def compare(self, task: Task, ours: str, theirs: str) -> Score:
        """1: ours is better; 0: theirs is; 0.5: no difference. The order in which they are shown plays no part."""


@dataclass(frozen=True, slots=True)
class Task:
    """One question and how its answers are judged. `id` is stable: the same task has it in every run."""

    id: str
    question: Question
    scorer: Scorer
    origin: Origin = "file"
    protected: bool = False  # may never go from pass to fail (policy `protected`)
    receipt: str | None = None  # the live record it was made of

    @property
    def job(self) -> Job | None:
        """What an agent works on, where the question is one for an agent."""
        return self.question.job


@dataclass(frozen=True, slots=True)
class Draw:
    """The tasks of a look, in the order they are asked. The order and the seeds stay the same within a generation."""

    tasks: tuple[Task, ...]
    name: str  # of the suite, with the digest of its tasks
    generation: int  # grows with each release and each rotation
    uses: int  # candidates that this generation serves for, so far
    warning: str = ""  # a sentence for a person: too small, used too often; empty: nothing to say


class Suite(Protocol):
    async def draw(self, limit: int, *, avoid: Collection[str] = ()) -> Draw:
        """At most `limit` tasks, without those whose ids are in `avoid`."""


@dataclass(frozen=True, slots=True)
class Price:
    """Money for a million tokens of a model."""

    prompt: float
    output: float


@dataclass(frozen=True, slots=True)
class Means:
    """What a policy measures with. Assembly puts it together; `Means.none()` serves to check a configuration.

    `base_id` is the scenario's release 0. `prompts` gives recent records, held-out ones first when there are any.
    `renders` is what a release adds to each request (it may block). `model` is the name put into
    requests. `capped` is told the month and a sentence when a monthly cap ends a look, each time; telling it on is for
    whoever knows what was told. `episodes` runs agents' jobs; without it they are missing.
    """

    scenario: str
    engine: Engine
    base_id: str
    book: Book | None = None
    suite: Suite | None = None
    prompts: Callable[[], Awaitable[Sequence[Record]]] | None = None
    renders: Callable[[Release], Applied] | None = None
    model: str | None = None
    price: Price | None = None  # of the engine that is measured; None: not known
    capped: Callable[[str, str], None] | None = None
    episodes: Episodes | None = None

    @classmethod
    def none(cls, suite: Suite | None = None) -> Means:
        """Nothing to measure with: enough to make a policy, so that its options are checked."""
        return cls("", cast("Engine", None), "", suite=suite)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much a look may ask, and how sure it must be. From the configuration's `gate`.

    alpha: the share of releases that may be false, held over a scenario's life (`budget`). tasks: at most in one look.
    least: tasks without which nothing is decided. repeats: answers of the incumbent to each task, kept while it stands.
    calls, tokens, money: caps of a scenario's evaluation in a calendar month (UTC); None: no cap.
    """

    alpha: float = 0.05
    tasks: int = 192
    least: int = 16
    repeats: int = 3
    calls: int | None = None
    tokens: int | None = None
    money: float | None = None


TOLD: ContextVar[Callable[[str, int, int], None]] = ContextVar("told", default=lambda stage, done, total: None)
"""Told how far a look is: what is counted (answers, episodes), how many are there, of how many. Whoever calls
`evaluate` sets it; looks of two scenarios go on at once, so it belongs to the task that looks."""

Options = Mapping[str, object]
"""The configuration's `gate.options`: limits of the guards, and the policy's own fields."""
