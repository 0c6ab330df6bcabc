"""Agent adapters: how a harness tree becomes one client's files, how the client is started, how its transcript is read.

Knows: the seam. Each agent is one file here, named in AGENTS, or given as a dotted path.
Does not know: Reef's server, installing (`harness.install`), sandboxes (`harness.episode`), or what a good tree is.

- `place` is pure and per entry: what one entry puts where. `gather` makes files of many placements, so that a change of
  one entry is a change of its own placements only (see `cordis.composition`).
- Paths are relative to the client's config root, with `/`, and never leave it.
- What the base sets, no entry can set otherwise: a tree cannot point a client away from Reef.
- The token is never in a file: only the name of the environment variable that holds it, REEF_TOKEN.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from reef.core.load import load
from reef.core.nouns import Json
from reef.harness.trajectory import Trajectory
from reef.harness.tree import Entry, settled

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
    placed = [(entry.id, one) for entry in settled(entries) for one in agent.place(entry)]
    return gather([("", one) for one in agent.base(door)] + placed)


def gather(placed: Iterable[tuple[str, Placed]]) -> dict[str, str]:
    """Placements by the id of their entry ('' : the base), in any order, as files. ValueError when two entries claim
    one file, a path leaves the root, or an entry sets what the base has set otherwise."""
    claims: dict[str, list[tuple[str, Placed]]] = {}
    for id_, one in sorted(placed, key=lambda pair: pair[0]):
        if (wrong := _astray(one.path)) is not None:
            raise ValueError(f"{_who(id_)} would write {one.path!r}, which {wrong}")
        claims.setdefault(one.path.casefold(), []).append((id_, one))
    for key, group in claims.items():
        for folder in list(_above(key)):
            if folder in claims:
                raise ValueError(f"{_both(group[0], claims[folder][0])} need {folder!r}, as a folder and as a file")
    return {group[0][1].path: _file(group) for _, group in sorted(claims.items())}


def _file(group: Sequence[tuple[str, Placed]]) -> str:
    """One file of all that is placed at its path: the base's placements first, then by the ids of the entries."""
    first = group[0]
    for other in group[1:]:
        if other[1].path != first[1].path:
            paths = f"{first[1].path!r} and {other[1].path!r}"
            raise ValueError(f"{_both(first, other)} write {paths}, which are one file where case does not count")
        if "file" in (first[1].how, other[1].how) or other[1].how != first[1].how:
            raise ValueError(f"{_both(first, other)} both write {first[1].path!r}: rename or remove one")
    if first[1].how == "file":
        return first[1].text
    if first[1].how == "section":
        return "\n\n".join(one.text.strip("\n") for _, one in group) + "\n"
    try:
        return _settings(group)
    except (TypeError, RecursionError) as error:
        names = ", ".join(_who(id_) for id_, _ in group)
        raise ValueError(f"the settings of {names} cannot be written as {first[1].path} ({error})") from None


def _settings(group: Sequence[tuple[str, Placed]]) -> str:
    fixed: dict[str, Json] = {}
    merged: dict[str, Json] = {}
    for id_, one in group:
        if not id_:
            fixed = merge(fixed, one.values)
        elif (key := _clash(fixed, one.values)) is not None:
            raise ValueError(f"{_who(id_)} sets {key}, which is fixed by what points the client at Reef: leave it out")
        merged = merge(merged, one.values)
    return _FORMATS[Path(group[0][1].path).suffix](merged)


def _clash(fixed: Mapping[str, Json], values: Mapping[str, Json], above: str = "") -> str | None:
    """The first key, with dots, whose fixed value the others would replace."""
    for key, value in values.items():
        if key not in fixed or value == fixed[key]:
            continue
        old = fixed[key]
        if not isinstance(old, dict) or not isinstance(value, dict):
            return above + key
        if (deeper := _clash(old, value, f"{above}{key}.")) is not None:
            return deeper
    return None


_PART = re.compile(r"[A-Za-z0-9._@+ -]{1,128}")
_RESERVED = re.compile(r"(?i)(?:con|prn|aux|nul|com\d|lpt\d)(?:\..*)?|\.git|\.reef.*")


def _astray(path: str) -> str | None:
    """Why no file may be written at this path, as the end of a sentence that begins with it; None when one may."""
    if path.startswith("/"):
        return "is absolute; paths are relative to the client's config root"
    for part in path.split("/"):
        if part in ("", ".", ".."):
            return "has an empty part, '.' or '..'"
        if not _PART.fullmatch(part) or part[-1] in " .":
            return "has a part with more than ASCII letters, digits, blanks and ._@+-, or a blank or dot at its end"
        if _RESERVED.fullmatch(part):
            return f"has the reserved name {part!r}"
    return None


def _above(path: str) -> Iterable[str]:
    """The folders of a path, nearest first."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _who(id_: str) -> str:
    return f"entry {id_!r}" if id_ else "the base"


def _both(one: tuple[str, Placed], other: tuple[str, Placed]) -> str:
    return f"{_who(one[0])} and {_who(other[0])}"


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


def _toml(values: Mapping[str, Json]) -> str:
    import tomli_w  # only where an agent's settings are TOML

    return tomli_w.dumps(_ordered(values))


def _ordered(values: Json) -> Any:
    """Keys sorted all the way down, as `dump` sorts them: same tree, same bytes."""
    if isinstance(values, dict):
        return {key: _ordered(values[key]) for key in sorted(values)}
    return [_ordered(item) for item in values] if isinstance(values, list) else values


_FORMATS = {".json": dump, ".toml": _toml}
