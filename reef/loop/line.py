"""The line of a part: the working copy that steps advance, found from what is durable and from nothing else.

Knows: on which release a line stands, how far it came, how often the gate looked at it.
Does not know: how a step is made or judged.

- A line is named `<first 12 digits of its base>-<n>`; each base has its own count.
- Its base is the release that brought the head's part: a publish of another part does not disturb it, a rollback or
  promotion always begins a new one.
- It ends when a look accepts or rejects it. A held line waits for a person.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from reef.core.nouns import PartName, Release
from reef.loop.ledger import Ledger
from reef.trainers import folder


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    part: PartName
    base: Release
    base_step: int
    step: int  # the newest durable step; base_step for a line that made none
    looks: int  # undecided ones so far
    looked: int  # the step of the last of them; base_step when there was none
    held: bool  # a candidate of it waits for a person
    idle: frozenset[int] = frozenset()  # its steps that changed nothing
    asked: int = 0  # the newest step that a person asked for: it is looked at whatever the count

    @property
    def age(self) -> int:
        """`step` without the idle ones: what the staleness of a sample is counted by."""
        return self.step - len(self.idle)

    def due(self, every: int) -> bool:
        """Whether the gate should look at the line before it goes on. What changed nothing is not worth a look."""
        moved = any(step not in self.idle for step in range(self.looked + 1, self.step + 1))
        whole = (self.step - self.base_step) % every == 0 or self.asked > self.looked
        return not self.held and moved and whole


def root(get: Callable[[str], Release], head: Release, part: PartName) -> Release:
    """The release that brought the head's version of a part, or the rollback or promotion that did so last."""
    node = head
    while node.operation == "publish" and node.parent is not None:
        parent = get(node.parent)
        if not _same(node, parent, part):
            break
        node = parent
    return node


def find(ledger: Ledger, training: Path, scenario: str, part: PartName, base: Release) -> Line:
    """The open line on this base: the newest that was begun, or a new one when that has ended."""
    prefix = base.id[:12]
    place = folder.path(training, scenario, part, prefix, 0).parent.parent
    names = {entry.name for entry in place.glob(f"{prefix}-*")} | ledger.lines(scenario, part, prefix)
    numbers = [int(found[1]) for name in names if (found := re.fullmatch(rf"{prefix}-(\d+)", name))]
    name = f"{prefix}-{max(numbers, default=1)}"
    looks = ledger.looks(scenario, part, name)
    if any(look.verdict in ("accept", "reject") for look in looks):
        name, looks = f"{prefix}-{max(numbers) + 1}", []
    base_step = base.step if part == "weights" else 0
    undecided = [look.step for look in looks if look.verdict == "undecided"]
    step = max(folder.steps(training, scenario, part, name), default=base_step)
    held = any(look.verdict == "hold" for look in looks)
    looked, idle = max(undecided, default=base_step), ledger.idle(scenario, part, name)
    asked = ledger.asked(scenario, part, name) if part == "harness" else 0
    return Line(name, part, base, base_step, step, len(undecided), looked, held, idle, asked)


def _same(release: Release, parent: Release, part: PartName) -> bool:
    """Whether a publish left this part as it was. A weights step counts even when it changed no byte."""
    if part == "weights" and release.step != parent.step:
        return False
    ours, theirs = release.parts.get(part), parent.parts.get(part)
    if ours is None or theirs is None:
        return ours is theirs
    return ours.kind == theirs.kind and dict(ours.files) == dict(theirs.files)
