"""The tasks of a search: those it learns from and those it chooses by.

Knows: two files, or one that is split for good. Does not know: the gate's suite, which is a third set: what decides
about a search is never seen by it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from reef.core.errors import ConfigError
from reef.evaluation import Task
from reef.recipe.bench import Bench


@dataclass(frozen=True, slots=True)
class Sets:
    train: tuple[Task, ...]
    validation: tuple[Task, ...]

    def find(self, names: Sequence[str]) -> list[Task]:
        known = {task.id: task for task in (*self.train, *self.validation)}
        return [known[name] for name in names]


def read(bench: Bench, tasks: str, validation: str | None) -> Sets:
    """Both sets. ConfigError when they are too small, or when one task is in both."""
    given = tuple(bench.tasks(tasks))
    if validation is None:
        made = split(given)
        if not made.train or not made.validation:
            raise ConfigError(
                f"{tasks} has {len(given)} tasks, too few to be split in two; add some, or name a file in validation",
                param="tasks",
            )
        return made
    chosen = tuple(bench.tasks(validation))
    names, questions = {task.id for task in given}, {asked(task) for task in given}
    # ids are often just line numbers: the same ids of two files are two tasks, the same questions are not
    if twice := [task.id for task in chosen if asked(task) in questions]:
        raise ConfigError(
            f"the task {twice[0]!r} is in tasks and in validation; what is learnt from must not choose",
            param="validation",
        )
    return Sets(given, tuple(_renamed(task) if task.id in names else task for task in chosen))


def split(tasks: Sequence[Task]) -> Sets:
    """About half each, by a digest of the id: a task stays on its side whatever is added to the file."""
    train = tuple(task for task in tasks if _even(task.id))
    return Sets(train, tuple(task for task in tasks if not _even(task.id)))


def asked(task: Task) -> str:
    """The question as text: the words of its only message, or the chat as it is."""
    job: Any = getattr(task, "job", None)
    if job is not None:
        return str(job.prompt)
    messages = json.loads(task.question.messages)
    if len(messages) == 1 and isinstance(messages[0].get("content"), str):
        return str(messages[0]["content"])
    return "\n".join(f"{one.get('role')}: {one.get('content')}" for one in messages)


def _even(name: str) -> bool:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[0] % 2 == 0


def _renamed(task: Task) -> Task:
    return replace(task, id=f"validation {task.id}")
