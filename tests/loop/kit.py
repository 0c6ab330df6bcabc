"""A scenario that learns, from real parts: SQLite, git, the board, and the package's fake trainer and engine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

from reef.core.nouns import (
    Batch,
    Candidate,
    Choice,
    Evaluation,
    PartName,
    Record,
    Release,
    Report,
    Sampling,
    Span,
    Timing,
    Unit,
    Verdict,
)
from reef.engines.fake import FakeEngine
from reef.evaluation.book import Book
from reef.harness import tree
from reef.harness.tree import Entry, Mutation
from reef.loop import asks
from reef.loop.binding import Binding, Tools, Work
from reef.loop.ledger import Ledger
from reef.loop.recover import recover
from reef.loop.update import update_once
from reef.recipe import Objective
from reef.records.board import Board
from reef.records.journal import Journal
from reef.records.sqlite import SqliteStore
from reef.releases import Draft, NewPart
from reef.releases.chain import GitChain
from reef.scenario.serving import align, ensure
from reef.trainers.fake import FakeTrainer

META = {"base": {"name": "fake", "digest": "0" * 64}, "kind": "base", "rank": None, "alpha": None}
BASE = NewPart("base", {"weights.json": json.dumps(META).encode()}, META)
NAME = "work"


@dataclass(frozen=True, slots=True)
class Score:
    """Learns from the first `batch_size` scored units."""

    part: ClassVar[PartName | None] = "weights"
    batch_size: int = 2
    max_staleness: int | None = None

    def batch(self, units: Sequence[Unit]) -> Batch | None:
        chosen = tuple(units[: self.batch_size])
        return _batch("weights", chosen) if len(chosen) == self.batch_size else None

    def objective(self) -> Objective:
        return Objective("fake:Objective", {"rate": 0.1})

    def propose(self, batch: Batch, tree: Sequence[Entry]) -> Sequence[Mutation]:
        raise AssertionError("a weights recipe proposes nothing")


@dataclass(frozen=True, slots=True)
class Rules:
    """Turns each feedback text into a rule, numbered, since no two rules may say the same; "nothing" makes no edit,
    "bad" one that cordis refuses."""

    part: ClassVar[PartName | None] = "harness"
    batch_size: int = 1
    max_staleness: int | None = None

    def batch(self, units: Sequence[Unit]) -> Batch | None:
        chosen = tuple(units[: self.batch_size])
        return _batch("harness", chosen) if len(chosen) == self.batch_size else None

    def objective(self) -> Objective:
        raise AssertionError("a harness recipe has no objective")

    def propose(self, batch: Batch, tree: Sequence[Entry]) -> Sequence[Mutation]:
        edits = []
        for unit in batch.units:
            if unit.report.feedback == "bad":
                edits.append(Mutation("remove", "no-such-entry"))
            elif unit.report.feedback != "nothing":
                name = f"rule-{unit.seq}-{unit.record.id[-4:]}"
                text = f"{unit.report.feedback} ({unit.seq}, {unit.record.id[-4:]})"
                edits.append(Mutation("create", name, "rules", {"text": text}))
        return edits


def _batch(part: PartName, units: tuple[Unit, ...]) -> Batch:
    return Batch(sha256(json.dumps([part, *(unit.id for unit in units)]).encode()).hexdigest(), part, units)


@dataclass
class Scripted:
    """Answers with the given verdicts in turn, then with `accept`; `before` runs ahead of each look."""

    verdicts: list[Verdict] = field(default_factory=list)
    before: Callable[[Candidate, Release], Any] | None = None
    looked: list[tuple[Candidate, Release, int]] = field(default_factory=list)

    async def evaluate(self, candidate: Candidate, incumbent: Release, look: int) -> Evaluation:
        self.looked.append((candidate, incumbent, look))
        if self.before is not None:
            await asyncio.to_thread(self.before, candidate, incumbent)
        verdict = self.verdicts.pop(0) if self.verdicts else "accept"
        return Evaluation("scripted", verdict, f"the script says {verdict}", candidate.id, incumbent.id)


class World:
    """One state folder. `open` starts a learner's life on it, `close` ends it properly."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipes: dict[PartName, Any] = {"weights": Score()}
        self.evaluator = Scripted()
        self.engine = FakeEngine()
        self.options: dict[str, Any] = {}
        self.works: dict[PartName, Work] = {}
        self.made = 0

    async def open(self) -> World:
        self.store = SqliteStore(self.folder / "records.db", owner="learner-test")
        await self.store.start()
        self.board = Board(self.folder / "records.db")
        self.chain = GitChain(self.folder / "releases.git")
        self.chain.open()
        if self.chain.head(NAME) is None:  # only then: an update must see for itself that the board lies behind
            ensure(NAME, self.chain, self.board, BASE, "fake")
        self.ledger = Ledger(self.folder / "learn.db")
        self.training = self.folder / "training"
        self.trainer = FakeTrainer(self.training)
        self.journal = Journal(self.board)
        self.book = Book(self.folder / "gate.db")
        self.tools = Tools(
            self.store, self.chain, self.board, self.ledger, self.trainer, self.training, self.journal, self.book
        )
        self.works = {}
        return self

    async def close(self) -> None:
        await asyncio.gather(*(task for work in self.works.values() for task in work.leave()), return_exceptions=True)
        self.ledger.close()
        self.book.close()
        self.board.close()
        await self.store.close()

    @property
    def binding(self) -> Binding:
        names: dict[PartName, str] = {part: f"test:{type(recipe).__name__}" for part, recipe in self.recipes.items()}
        return Binding(NAME, self.recipes, names, self.evaluator, self.engine, **self.options)

    @property
    def head(self) -> Release:
        found = self.chain.head(NAME)
        assert found is not None
        return found

    async def update(self) -> bool:
        binding = asks.whole(self.tools, self.binding)
        for part in binding.recipes:
            if part not in self.works:
                await recover(self.tools, NAME, part)
                self.works[part] = Work.open(self.tools, binding, part)
            self.works[part].rest_until = 0.0
        return await update_once(self.tools, binding, self.works)

    async def settle(self, limit: int = 50) -> int:
        """Update until nothing moves; returns how many updates did something."""
        for done in range(limit):
            if await self.update():
                continue
            if not (searches := [work.search for work in self.works.values() if work.search is not None]):
                return done
            await asyncio.wait(searches)
        raise AssertionError("the learner never came to rest")

    async def say(
        self, count: int = 1, *, release: str | None = None, session: str | None = None, **fields: Any
    ) -> list[str]:
        """Store answers of a release (the served one) with one report each; returns the receipts."""
        receipts = []
        for _ in range(count):
            made = record(self.made, release or self.head.id, session=session)
            await self.store.append(made)
            await self.store.append(report(self.made, made.id, **({"score": 1.0} | fields)))
            receipts.append(made.id)
            self.made += 1
        return receipts

    def ask(self, text: str, part: PartName = "harness", **more: Any) -> str:
        """A person's instruction; returns its id."""
        body = {"text": text} | {name: more.pop(name) for name in ("session",) if name in more}
        return self.tools.queue.put(NAME, part, "instruction", body, actor="ada", **more)[0].id

    def propose(self, *mutations: dict[str, Any], reason: str = "because I say so", **more: Any) -> str:
        """A person's edit of the harness; returns its id."""
        body = {"mutations": list(mutations), "reason": reason}
        return self.tools.queue.put(NAME, "harness", "proposal", body, **{"actor": "ada"} | more)[0].id

    def note(self, text: str = "Stay calm.", operation: Any = "publish") -> Release:
        """Somebody publishes rules, and they are served."""
        data = tree.write((tree.Entry(f"note-{self.head.seq}", "rules", {"text": text}),))
        draft = Draft(
            operation, {"harness": NewPart("tree", {tree.FILE: data})}, base=self.head.id, step=self.head.step
        )
        made = self.chain.publish(NAME, draft, self.head.id)
        align(NAME, self.chain, self.board)
        return made


def record(number: int, release: str, **fields: Any) -> Record:
    """A complete answer of two tokens to a prompt of three."""
    text = f"answer {number}"
    choice = Choice(
        0, text, "stop", output_ids=(number, number + 1), logprobs=(-0.5, -0.25), spans=(Span(release, 0, 2),)
    )
    made = Record(
        id=f"{number:032x}",
        scenario=NAME,
        release_id=release,
        purpose="live",
        dialect="chat",
        status="complete",
        request=json.dumps({"messages": [{"role": "user", "content": f"question {number}"}]}).encode(),
        timing=Timing(time.time()),
        choices=(choice,),
        prompt_ids=(1, 2, 3),
        sampling=Sampling(),
    )
    return replace(made, **fields)


def report(number: int, *receipts: str, **fields: Any) -> Report:
    return replace(Report(f"rep_{number:032x}", NAME, receipts, time.time()), **fields)
