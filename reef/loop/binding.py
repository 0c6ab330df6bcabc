"""What the loop works with: one `Binding` for each scenario, one set of `Tools` for all.

Knows: which recipe, gate and engine a scenario is bound to, and where learning is kept.
Does not know: the configuration they came from. Assembly hands both in.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from reef.core.errors import TeacherError
from reef.core.nouns import PartName, Release
from reef.engines import Engine
from reef.evaluation import Evaluator, Means, Sizes, Task
from reef.evaluation.book import Book
from reef.experience.holdout import Holdout
from reef.experience.pool import Pool
from reef.experience.sessions import Sessions
from reef.experience.units import SIGNALS, Signal
from reef.harness.apply import Wish
from reef.loop.ledger import Ledger
from reef.recipe import Asking, Recipe
from reef.recipe.bench import Proposed
from reef.records import RecordStore
from reef.records.board import Board
from reef.records.journal import Journal
from reef.records.queue import Queue
from reef.releases import ReleaseChain
from reef.trainers import Trainer

State = Literal["waiting", "searching", "training", "evaluating", "publishing", "failed", "blocked"]
Trigger = Literal["auto", "manual", "hybrid"]
"""What makes a step: experience, a person's instruction, or either."""


@dataclass(frozen=True, slots=True)
class Watching:
    """What happens when live reports say that a release is worse than the one before it; see `watch`."""

    action: Literal["rollback", "tell", "off"] = "rollback"
    reports: int = 300  # scored reports on the new release that are compared, at most
    alpha: float = 0.05  # the chance of a false alarm for one release


@dataclass(frozen=True, slots=True)
class Searching:
    """What a harness recipe that searches measures with. `tasks` reads a file or dotted path in the form of
    `gate.suite`; ConfigError says what is wrong with it. `wish` is what a request gets of a tree."""

    means: Means
    sizes: Sizes
    wish: Wish
    tasks: Callable[[str], Sequence[Task]]


@dataclass(frozen=True, slots=True)
class Binding:
    """How one scenario learns. `names` says how each recipe is written in a release (a path or a short name)."""

    scenario: str
    recipes: Mapping[PartName, Recipe]  # at most one a part; a recipe that never learns is left out
    names: Mapping[PartName, str]
    evaluator: Evaluator
    engine: Engine
    evaluate_every: int = 1  # steps between two looks
    patience: int = 3  # looks until "undecided" counts as reject
    mode: Literal["auto", "review"] = "auto"
    watching: Watching = field(default_factory=Watching)
    holdout: Holdout | None = None  # which prompts never train; None: all may
    next_seconds: float = 900.0  # a message that comes later says nothing of the answer before it
    client_share: float = 1.0  # of a batch that one client may fill while others wait
    ask: Asking | None = None  # how a recipe asks a model about a unit; None: nothing here can
    trigger: Trigger = "auto"
    searching: Searching | None = None  # None: nothing here can measure a tree
    past: Evaluator | None = None  # measures earlier releases when live scores fall; None: there is no suite for it

    def bound(self, part: PartName) -> int | None:
        """The largest lag a sample may have; None for a part whose samples do not age."""
        if part != "weights" or not getattr(self.recipes[part], "ages", True):
            return None
        own = self.recipes[part].max_staleness
        return self.evaluate_every * self.patience if own is None else own

    def signals(self, part: PartName) -> Collection[Signal]:
        """What makes a report a unit for this part's recipe: its own `signals`, else what is usual for the part."""
        named: Collection[Signal] | None = getattr(self.recipes[part], "signals", None)
        return SIGNALS[part] if named is None else named


@dataclass(frozen=True, slots=True)
class Tools:
    """What every scenario's learner shares."""

    store: RecordStore
    chain: ReleaseChain
    board: Board
    ledger: Ledger
    trainer: Trainer
    training: Path  # the folder of step folders
    journal: Journal
    book: Book | None = None  # where failures become tasks; None: nowhere
    sessions: Sessions | None = None  # None: no recipe merges turns or learns from the next message

    @property
    def queue(self) -> Queue:
        """What people asked for."""
        return Queue(self.board)

    async def head(self, scenario: str) -> Release | None:
        return await asyncio.to_thread(self.chain.head, scenario)


@dataclass(slots=True)
class Work:
    """What a learner remembers of one part between two updates. All of it can be lost: the ledger has the rest."""

    scenario: str
    part: PartName
    pool: Pool
    saved: int  # the cursor as the ledger has it
    state: State = "waiting"
    line: str = ""
    step: int = 0
    looks: int = 0
    batch_size: int | None = None
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    progress: tuple[str, int, int] | None = None
    timings: dict[str, float] = field(default_factory=dict)
    last: dict[str, Any] | None = None
    rests: int = 0  # times an update found nothing to do; who saw it twice knows that all before the first was seen
    error: str | None = None
    blocked: str | None = None  # what a person must do before it learns on
    failures: int = 0
    rest_until: float = 0.0  # monotonic seconds: not before
    lags: dict[int, int] = field(default_factory=dict)  # of the ready units, when they were last looked at
    tries: dict[str, int] = field(default_factory=dict)  # failures of assessing a unit
    discarded: int = 0  # units that the recipe's `discard` gave up since the last step
    recalled: bool = False  # whether the assessments that were written down are with their units
    search: asyncio.Task[Proposed] | None = None  # goes on beside the other part's updates
    sought: str = ""  # the batch that it is for

    @classmethod
    def open(cls, tools: Tools, binding: Binding, part: PartName) -> Work:
        """From what the ledger knows."""
        name = binding.scenario
        cursor = tools.ledger.cursor(name, part)
        settled, signals = (lambda unit: tools.ledger.settled(name, part, unit)), binding.signals(part)
        merges, patience = bool(getattr(binding.recipes[part], "merge", False)), binding.next_seconds
        pool = Pool(
            name, part, signals, settled, cursor, binding.holdout,
            sessions=tools.sessions, merges=merges, patience=patience,
        )  # fmt: skip
        work = cls(name, part, pool, cursor, batch_size=getattr(binding.recipes[part], "batch_size", None))
        work.count(tools.ledger)
        newest = tools.ledger.metrics(name, part)
        work.metrics = newest[0][2] if newest else {}
        looks = tools.ledger.looks(name, part, limit=1)
        if looks:
            seen = looks[0]
            work.last = _last(seen.verdict, seen.reason, seen.release, dict(seen.timings), seen.step)
        return work

    def count(self, ledger: Ledger) -> None:
        fates = ledger.fates(self.scenario, self.part)
        self.trained = fates.pop("trained", 0)
        self.dropped = fates

    def decided(self, verdict: str, reason: str, release: str | None, step: int) -> None:
        self.last = _last(verdict, reason, release, self.timings, step)

    def enter(self, state: State) -> None:
        """A phase begins: how far the one before was is not true of it."""
        self.state, self.progress = state, None

    def failed(self, error: Exception, *, longest: float) -> None:
        """Rest twice as long after each failure in a row, from half a second up to `longest`."""
        self.failures += 1
        self.state = "blocked" if isinstance(error, TeacherError) else "failed"
        self.error = str(error) or type(error).__name__
        self.rest_until = time.monotonic() + min(longest, 0.25 * 2**self.failures)

    def well(self) -> None:
        if self.search is not None:
            return  # it may fail as the last one did
        self.failures, self.error, self.progress = 0, None, None
        self.state = "blocked" if self.blocked else "waiting"

    @property
    def busy(self) -> bool:
        """Whether a search goes on: there is nothing to do for this part until it ends."""
        return self.search is not None and not self.search.done()

    def leave(self) -> list[asyncio.Task[Any]]:
        """Cancel the search, if one goes on; returns what to wait for."""
        search, self.search, self.sought = self.search, None, ""
        if search is None:
            return []
        search.cancel()
        return [search]

    def shown(self) -> dict[str, Any]:
        """For people and the status page."""
        units = self.pool.ready.values()
        return {
            "state": self.state,
            "pending": len(self.pool.ready) + self.pool.waiting,
            "waiting_open": self.pool.waiting,
            "oldest_seconds": max(0.0, time.time() - min(u.report.created_at for u in units)) if units else None,
            "batch_size": self.batch_size,
            "signals": self.pool.signals,
            "line": self.line,
            "step": self.step,
            "looks": self.looks,
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "ages": _ages([unit.report.created_at for unit in units]),
            "lags": {str(lag): count for lag, count in sorted(self.lags.items())},
            "merged": dict(self.pool.merged),
            "metrics": dict(self.metrics),
            "progress": list(self.progress) if self.progress else None,
            "last": self.last,
            "rests": self.rests,
            "error": self.error or self.blocked,
        }


AGES: Final = (("<1m", 60.0), ("<10m", 600.0), ("<1h", 3600.0), ("<1d", 86400.0), ("older", math.inf))
"""How long ago the reports came that make ready units: less than so many seconds."""


def _ages(times: Sequence[float]) -> dict[str, int]:
    now = time.time()
    counts = dict.fromkeys((name for name, _ in AGES), 0)
    for at in times:
        counts[next(name for name, limit in AGES if now - at < limit)] += 1
    return counts


def _last(verdict: str, reason: str, release: str | None, timings: dict[str, float], step: int) -> dict[str, Any]:
    shown = {name: timings.get(name) for name in ("waiting", "training", "gate", "activation")}
    return {"verdict": verdict, "reason": reason, "release_id": release, "step": step, "timings": shown}
