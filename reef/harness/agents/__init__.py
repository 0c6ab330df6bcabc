"""Agent adapters: how a harness tree becomes one client's files, how the client is started, how its transcript is read.

Knows: the seam. Each agent is one file here, named in AGENTS, or given as a dotted path.
Does not know: Reef's server, installing (`harness.install`), sandboxes (`harness.episode`), or what a good tree is.

- `place` is pure and per entry: what one entry puts where. `gather` makes files of many placements, so that a change of
  one entry is a change of its own placements only (see `cordis.composition`).
- Paths are relative to the client's config root, with `/`, and never leave it.
- The token is never in a file: only the name of the environment variable that holds it, REEF_TOKEN.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Protocol

from reef.core.load import load
from reef.core.nouns import Json
from reef.harness.trajectory import Trajectory
from reef.harness.tree import Entry

AGENTS = {
    "pi": "reef.harness.agents.pi:Pi",
    "opencode": "reef.harness.agents.opencode:OpenCode",
    "codex": "reef.harness.agents.codex:Codex",
    "claude": "reef.harness.agents.claude:Claude",
}
TOKEN: Final = "REEF_TOKEN"  # noqa: S105 - a variable's name
"""The environment variable in which a client finds its token."""
SESSION: Final = "REEF_SESSION"
"""The one with the session id that the wrapper gives a client that sends none by itself."""


@dataclass(frozen=True, slots=True)
class Client:
    """What is installed: an npm package at an exact version, and the program in its node_modules/.bin."""

    package: str
    version: str
    program: str
    node: str = "20.6"  # the least Node that runs this version
    root: str = ""  # the environment variable that names its config root


@dataclass(frozen=True, slots=True)
class Door:
    """Where and how a client reaches Reef. `url` has no path: the agent appends /v1 where its client wants that."""

    url: str
    scenario: str
    model: str = "reef"
    context: int = 128_000  # tokens, where a client must be told
    output: int = 4096


@dataclass(frozen=True, slots=True)
class Placed:
    """What one entry puts somewhere. `text`: the whole of a file, or a section of one that several entries share, in
    the order of their ids. `values`: merged into a settings file (see `settings` of the agent)."""

    path: str
    how: Literal["file", "section", "values"] = "file"
    text: str = ""
    values: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Launch:
    """One run of a client without a person: arguments after the program's name, and what is added to its environment.
    `answer`: whether its standard output is JSON events (`events`) or only the last message (`text`)."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    output: Literal["text", "events"] = "text"


class Agent(Protocol):
    """`name` is its short name; `client` what is installed."""

    name: str
    client: Client

    def place(self, entry: Entry) -> Sequence[Placed]:
        """What this entry is to this client: nothing, when it has no place for it."""

    def base(self, door: Door) -> Sequence[Placed]:
        """The files and settings that point the client at Reef: provider, model, scenario header, no telemetry."""

    def launch(self, root: Path, prompt: str) -> Launch:
        """How one task is run without a person; `root` is the config root, as the client will see it."""

    def environment(self, root: Path) -> Mapping[str, str]:
        """What the client needs in its environment besides REEF_TOKEN, also when a person starts it."""

    def read(self, root: Path) -> Trajectory | None:
        """The newest transcript below the config root; None when there is none. It never raises for what the client
        wrote: what cannot be read is left out and counted."""


def agent(name: str) -> Agent:
    """An adapter by short name or dotted path. ConfigError says which there are."""
    made: Agent = load(AGENTS.get(name, name), what="agent")()
    return made


def render(agent: Agent, entries: Iterable[Entry], door: Door) -> dict[str, str]:
    """A tree as the client's files, `{path: text}`. Built from nothing; `cordis.composition` arrives at the same."""
    placed = [(entry.id, one) for entry in sorted(entries, key=lambda entry: entry.id) for one in agent.place(entry)]
    return gather([("", one) for one in agent.base(door)] + placed)


def gather(placed: Iterable[tuple[str, Placed]]) -> dict[str, str]:
    """Placements by the id of their entry ('' : the base), in any order, as files. ValueError when two entries claim
    one file, or a path leaves the root."""
    raise NotImplementedError


def merge(first: Mapping[str, Json], second: Mapping[str, Json]) -> dict[str, Json]:
    """Objects merged key by key; anything else of `second` replaces what `first` has."""
    merged = dict(first)
    for key, value in second.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def dump(values: Mapping[str, Json]) -> str:
    """A settings object as JSON that a person reads."""
    return json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
