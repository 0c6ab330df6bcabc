"""One episode: an agent works on a task in a throw-away home, and what came of it is scored.

Knows: the task, the files it begins with, the check that ends it. Does not know: suites, gates, why it is run.

The room it runs in (`room`) has no network but one socket to Reef, a read-only system, and limits on time, memory,
processes, output and disk. The client's token can only infer, as one release, for as long as the episode lasts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from reef.harness.trajectory import Trajectory
from reef.harness.tree import Entry


@dataclass(frozen=True, slots=True)
class Job:
    """A task for an agent. `files` are the work folder at the start, `{path: text}`. `check` is a shell command, run in
    the same room when the agent is done, of which exit status 0 is a pass; the files of `hidden` are there only then,
    so that an agent cannot read its exam. Without a check the last words are scored by whoever asked."""

    agent: str
    prompt: str
    files: Mapping[str, str] = field(default_factory=dict)
    check: str | None = None
    hidden: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an episode. `score`: 1 or 0 by the check, None without one. `fault`: the agent's or the tree's own
    failure (it ran out of time, it crashed), which is a score of 0; `trouble`: the surroundings' (no sandbox, the
    endpoint was away), which says nothing of the tree."""

    score: float | None = None
    trajectory: Trajectory | None = None
    said: str = ""  # by the check: the end of its output
    fault: str | None = None
    trouble: str | None = None
    seconds: float = 0.0


class Episodes(Protocol):
    """Who can run episodes. Several at once are its own affair: it queues what it has no room for."""

    async def run(self, job: Job, entries: Sequence[Entry], release_id: str) -> Outcome:
        """The job's agent with this tree installed, answered by this release. Never raises for what happens inside."""
