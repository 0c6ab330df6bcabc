"""The bench of one search: what a harness recipe asks, measures and reads while it looks for an edit.

Knows: how a task is asked of what is served with another tree in the place of its own, what that cost, and what was
turned down before. Does not know: what a search does with it, or the tasks that the gate decides on.

- Nothing asked here is experience: no record is made, live traffic goes first, and the tokens of episodes only infer.
- What could not be measured (the engine or sandbox was away, the scorer failed) has no score, and says why.
- Calls count to the scenario's evaluation budget; when that is used up nothing more is measured.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from reef.core.errors import ConfigError, EngineError
from reef.core.nouns import Cost, Json, Release, Unit
from reef.evaluation import Task
from reef.evaluation.ask import Asker, Side
from reef.evaluation.book import digest
from reef.evaluation.trial import exhausted
from reef.harness.apply import Applied
from reef.harness.tree import Entry
from reef.loop import retell
from reef.loop.binding import Binding, Searching, Tools, Work
from reef.recipe.bench import Measured, Refusal
from reef.records.queue import Ask


@dataclass(slots=True)
class Workbench:
    """A `recipe.bench.Bench`. `head` is what is served when the search begins; it is asked until the search ends."""

    folder: Path
    _ask: Ask | None
    _tools: Tools
    _binding: Binding
    _work: Work
    _head: Release
    instruction: str | None = field(init=False)
    rejected: Sequence[Refusal] = field(init=False)
    _asker: Asker | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.instruction = str(self._ask.body.get("text") or "") if self._ask is not None else None
        self.rejected = self._tools.ledger.rejected(self._binding.scenario)

    async def ask(self, engine: str | None, body: Mapping[str, Json]) -> str:
        if self._binding.ask is None:
            raise EngineError(f"the recipe of {self._binding.scenario} asks a model, and nothing here can ask one")
        return await self._binding.ask(engine, body)

    def tasks(self, source: str) -> Sequence[Task]:
        return self._searching.tasks(source)

    async def measure(self, tree: Sequence[Entry], tasks: Sequence[Task], seed: int) -> Sequence[Measured]:
        """Each task once under this tree. The same tree, task and seed are answered once in a search."""
        searching = self._searching
        if why := exhausted(searching.means, searching.sizes):
            return [Measured(task, None, note=why) for task in tasks]
        if self._asker is None:
            self._asker = Asker.of(searching.means)
        if not searching.wish.apply and any(task.job is None for task in tasks):
            raise ConfigError(
                f"the harness of {self._binding.scenario} is in no request, so no chat task can measure it; set "
                "harness.apply: true, or give tasks for an agent",
                param="harness.apply",
            )
        asker, applied = self._asker.apart(), Applied.of(tree, searching.wish)
        served = await asker.side(self._head)
        side = Side(self._head.id, applied, json.dumps([served.key, applied.key]))
        judging: list[Cost] = []
        try:
            return await asyncio.gather(
                *(self._measured(asker, side, task, _seed(seed, task), judging) for task in tasks)
            )
        finally:
            cost = sum(judging, asker.bill())
            if searching.means.book is not None and cost != Cost():
                searching.means.book.keep(searching.means.scenario, [], cost)

    async def _measured(self, asker: Asker, side: Side, task: Task, seed: int, judging: list[Cost]) -> Measured:
        reply = await asker.reply(side, replace(task.question, seed=seed))
        outcome = reply.outcome
        said, trajectory = (outcome.said, outcome.trajectory) if outcome is not None else ("", None)
        if reply.missing is not None:
            return Measured(task, None, reply.text, said, trajectory, reply.missing)
        if reply.impossible is not None:  # the tree's own fault
            return Measured(task, 0.0, reply.text, "\n".join(filter(None, (reply.impossible, said))), trajectory)
        if outcome is not None and outcome.score is not None:
            return Measured(task, outcome.score, reply.text, said, trajectory)
        score = await task.scorer.score(task, reply.text)
        judging.append(score.cost)
        if score.value is None:
            note = score.note or "the scorer gave no score"
            return Measured(task, None, reply.text, said, trajectory, note)
        return Measured(task, score.value, reply.text, score.note or said, trajectory)

    async def story(self, unit: Unit) -> str:
        return await retell.retell(self._tools, unit)

    def progress(self, stage: str, done: int, total: int) -> None:
        self._work.state, self._work.progress = "searching", (stage, done, total)

    @property
    def _searching(self) -> Searching:
        if self._binding.searching is None:
            raise ConfigError(f"nothing here can measure a harness of {self._binding.scenario}")
        return self._binding.searching


def _seed(seed: int, task: Task) -> int:
    return int(digest("search", seed, task.id)[:8], 16) % 2**31
