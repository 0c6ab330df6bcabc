"""A bench without a loop: tasks from a list, answers from a function or an engine, and a count of what was asked."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reef.core.errors import EngineError
from reef.evaluation import Score, Task
from reef.evaluation.ask import Asker, Question, Side
from reef.harness.apply import Applied, Wish
from reef.recipe.bench import Measured


class Told:
    """A scorer of answers that say their own score: "0.5 too long"."""

    name, key = "told", "1"

    async def score(self, task: Task, text: str) -> Score:
        value, _, note = text.partition(" ")
        return Score(None, note) if value == "none" else Score(float(value), note)


def tasks(name: str, count: int, scorer: Any = None) -> tuple[Task, ...]:
    return tuple(
        Task(f"{name}{number}", Question.of(f"question {name}{number}", temperature=1.0), scorer or Told())
        for number in range(count)
    )


@dataclass
class Desk:
    """`says(entries, task, seed)` answers tasks; with an `engine` that is asked instead. `writes` answers prompts."""

    folder: Path
    sets: dict[str, Sequence[Task]] = field(default_factory=dict)
    says: Callable[..., str] | None = None
    writes: Callable[[str], Any] | None = None
    engine: Any = None
    instruction: str | None = None
    rejected: Sequence[Any] = ()
    stories: dict[str, str] = field(default_factory=dict)
    measured: list[tuple[Any, tuple[str, ...], int]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    asked: list[str | None] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)
    calls: int = 0
    asker: Asker | None = None

    async def ask(self, engine, body):
        self.asked.append(engine)
        self.prompts.append(body["messages"][-1]["content"])
        if self.writes is None:
            raise EngineError("nobody is there")
        said = self.writes(self.prompts[-1])
        return await said if inspect.isawaitable(said) else said

    def tasks(self, source):
        return self.sets[source]

    async def measure(self, tree, tasks, seed):
        self.measured.append((tuple(tree), tuple(task.id for task in tasks), seed))
        self.calls += len(tasks)
        texts = await asyncio.gather(*(self._answer(tree, task, seed + place) for place, task in enumerate(tasks)))
        made = []
        for task, text in zip(tasks, texts, strict=True):
            score = await task.scorer.score(task, text)
            note = "" if score.value is not None else score.note
            made.append(Measured(task, score.value, text, score.note if score.value is not None else "", note=note))
        return made

    async def _answer(self, tree, task, seed):
        if self.engine is None:
            assert self.says is not None
            return self.says(tree, task, seed)
        self.asker = self.asker or Asker(self.engine)
        applied = Applied.of(tree, Wish(apply=True))
        reply = await self.asker.reply(Side("base", applied, applied.key), replace(task.question, seed=seed))
        return reply.text if reply.missing is None else f"none {reply.missing}"

    async def story(self, unit):
        return self.stories.get(unit.id, f"user: something\nassistant: something else ({unit.seq})")

    def progress(self, stage, done, total):
        self.stages.append(stage)
