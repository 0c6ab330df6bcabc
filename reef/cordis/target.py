"""Where a live composition's effects go: for each agent, the placements of entries by path, and the files they make.

Knows: placements and who made them. Does not know: what they mean to a client (`harness.agents`), or who may add one.

- Plugging an entry adds its placements, undoing it takes exactly those away: nothing else changes, and no trace stays.
- The files are what `agents.gather` makes of the placements, so they equal those of a tree built from nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Final

from reef.cordis.context import Context, Inverse
from reef.core.errors import ConfigError
from reef.harness import agents
from reef.harness.agents import Agent, Door, Placed
from reef.harness.tree import Entry

DOOR: Final = Door("http://localhost:8900", "default")
"""Where an edit is tried out: no file of it is ever given to a client."""

log = logging.getLogger(__name__)


@cache
def known() -> Mapping[str, Agent]:
    """The agents that Reef comes with, by name."""
    found = {}
    for name in agents.AGENTS:
        try:
            found[name] = agents.agent(name)
        except ConfigError as error:
            log.warning("edits are not checked for %s: %s", name, error.message)
    return found


class Target:
    """Placements of many entries, for several agents."""

    def __init__(self, agents: Mapping[str, Agent], root: Context, door: Door = DOOR) -> None:
        self.agents = agents
        self._held: dict[str, dict[tuple[str, int], Placed]] = {name: {} for name in agents}
        for name, agent in agents.items():
            self._plug(root, name, "", agent.base(door))

    def plug(self, context: Context, entry: Entry) -> None:
        """What a composition does with an entry. ValueError names the agent that cannot show it."""
        for name, agent in self.agents.items():
            try:
                placed = agent.place(entry)
            except Exception as error:  # an adapter may be anybody's
                raise ValueError(f"{name} cannot show it: {error}") from error
            self._plug(context, name, entry.id, placed)

    def files(self, name: str) -> dict[str, str]:
        """One agent's files, `{path: text}`. ValueError as `agents.gather`: two entries claim one file, for example."""
        return agents.gather([(key[0], placed) for key, placed in sorted(self._held[name].items(), key=_key)])

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def _plug(self, context: Context, name: str, who: str, placed: Iterable[Placed]) -> None:
        for number, one in enumerate(placed):
            context.effect(partial(self._add, name, (who, number), one))

    def _add(self, name: str, key: tuple[str, int], one: Placed) -> Inverse:
        self._held[name][key] = one
        return lambda: self._held[name].pop(key)


def _key(item: tuple[tuple[str, int], Placed]) -> tuple[str, int]:
    return item[0]
