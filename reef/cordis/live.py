"""A live tree that changes whole or not at all: what Cordis has no answer to, since there a failed update stays failed.

Knows: how a new tree is tried out beside the live one. Does not know: who wants it, or what else an edit must keep to
(`compose`).

- A new tree is applied to a scratch composition, checked, and rendered for every agent. Only if all of that went well
  is the live composition updated, by difference; and if that does not arrive at what was tried out, it is taken back.
- So after `swap`, tree and files are those of the new tree, or byte for byte those from before.
- A tree answers for what it changes: what was wrong before the edit, and still is, is no reason against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from reef.cordis.composition import Composition
from reef.cordis.context import Context
from reef.cordis.target import DOOR, Target
from reef.cordis.text import excerpt
from reef.harness.agents import Agent, Door
from reef.harness.tree import Entry

REASON: Final = 300  # characters of an adapter's own words
Files = Mapping[str, Mapping[str, str]]
"""agent → path → text; an agent for which the tree does not render is left out."""


class Live:
    """`entries` and their `files`; `flaws` says what is wrong with the tree as it stands."""

    def __init__(self, agents: Mapping[str, Agent], entries: Sequence[Entry] = (), door: Door = DOOR) -> None:
        self._agents, self._door = agents, door
        self.entries: tuple[Entry, ...] = ()
        self.files: Files = {}
        self.flaws: tuple[str, ...] = ()
        self._build(entries)

    def swap(self, entries: Sequence[Entry]) -> tuple[str, ...]:
        """Become these entries; or every reason why not, in sentences, and nothing has changed."""
        scratch = Live(self._agents, entries, self._door)
        refused = tuple(flaw for flaw in scratch.flaws if flaw not in self.flaws)
        if not refused:
            errors = self._composition.update(scratch.entries)
            files, flaws = self._look()
            if not errors and (files, flaws) == (scratch.files, scratch.flaws):
                self.entries, self.files, self.flaws = scratch.entries, files, flaws
            else:
                self._composition.dispose()
                self._build(self.entries)
                refused = ("what went well beside the live tree did not in it; nothing was changed",)
        scratch.dispose()
        return refused

    def dispose(self) -> tuple[Exception, ...]:
        errors = self._composition.dispose()
        self.entries, self.files, self.flaws = (), {}, ()
        return errors

    def __len__(self) -> int:
        """How many placements there are."""
        return len(self._target)

    def _build(self, entries: Sequence[Entry]) -> None:
        root = Context()
        self._target = Target(self._agents, root, self._door)
        self._composition = Composition(self._target.plug, root)
        self._composition.update(entries)
        self.entries = tuple(sorted(entries, key=lambda entry: entry.id))
        self.files, self.flaws = self._look()

    def _look(self) -> tuple[Files, tuple[str, ...]]:
        """The files of each agent, and what is wrong: with entries first, then with what they make together."""
        flaws = []
        for name, plug in sorted(self._composition.plugs.items()):
            if plug.state == "pending":
                flaws.append(f"{name!r} {plug.why}")
            elif plug.state == "failed":
                flaws.append(f"{name!r} does not render: {excerpt(plug.why, REASON)}")
        files = {}
        for name in self._agents:
            try:
                files[name] = self._target.files(name)
            except ValueError as error:
                flaws.append(f"the tree does not render for {name}: {excerpt(str(error), REASON)}")
        return files, tuple(flaws)
