"""What a person must agree to: everything in a tree that acts on a machine and did not stand in the tree before.

Knows: kinds that act (`harness.kinds`), and text that does (`screen.acts`). Does not know: who decides, or when.

- A new, changed or removed entry of a kind that acts is named: taking away a setting or an extension can loosen what a
  client may do just as adding one can.
- In other kinds it is the passages that hold a command, code or an address. A passage is new unless the tree before had
  the same one, with the words that introduce it, in an entry of that kind that is read on the same occasion.
- An entry that waited for another was in no client's files: what it holds is new when it comes in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from reef.cordis.composition import same
from reef.cordis.screen import acts, secret
from reef.cordis.text import excerpt
from reef.core.nouns import Json
from reef.harness.kinds import KINDS
from reef.harness.tree import Entry, settled

SHOWN: Final = 3  # passages of one entry that are quoted
KEYS: Final = 12  # settings that are named


def reasons(before: Sequence[Entry], after: Sequence[Entry]) -> tuple[str, ...]:
    """One sentence for each entry of `after` that brings something that acts, in the order of ids; empty: none does."""
    old = {entry.id: entry for entry in settled(before)}
    new = {entry.id: entry for entry in settled(after)}
    stood = {(*_occasion(entry), passage) for entry in old.values() for passage in _acts(entry)}
    said = []
    for name in sorted(old.keys() | new.keys()):
        was, now = old.get(name), new.get(name)
        if was is not None and now is not None and same(was, now):
            continue
        if was is not None and KINDS[was.kind].acts and (now is None or now.kind != was.kind):
            said.append(f"{was.kind} {name!r} is taken away: what {_agent(was)} may do can change")
        if now is None:
            continue
        if KINDS[now.kind].acts:
            said.append(_whole(now, was if was is not None and was.kind == now.kind else None))
        elif fresh := [passage for passage in _acts(now) if (*_occasion(now), passage) not in stood]:
            more = f" (and {len(fresh) - SHOWN} more)" if len(fresh) > SHOWN else ""
            quotes = ", ".join(_quote(passage) for passage in fresh[:SHOWN])
            said.append(f"{now.kind} {name!r} adds a command, code or an address: {quotes}{more}")
    return tuple(said)


def _occasion(entry: Entry) -> tuple[str, str]:
    """When a text is read: rules always, a skill or command when its description fits."""
    return entry.kind, entry.config.get("description", "")


def _acts(entry: Entry) -> tuple[str, ...]:
    if KINDS[entry.kind].acts:
        return ()
    return acts([value for key, value in entry.config.items() if key != "needs"])


def _whole(entry: Entry, was: Entry | None) -> str:
    """A sentence on an entry that acts as a whole, and what it was before."""
    agent, what = _agent(entry), "adds" if was is None else "changes"
    if entry.kind == "extension":
        lines = entry.config["text"].count("\n") + 1
        return f"extension {entry.id!r} {what} code that {agent} runs: {entry.config['file']}, {lines} lines"
    if entry.kind == "config":
        moved = _moved({} if was is None or _agent(was) != agent else was.config["values"], entry.config["values"])
        keys = ", ".join(excerpt(key, 40) for key in list(moved)[:KEYS]) + (", …" if len(moved) > KEYS else "")
        return f"config {entry.id!r} {what} settings of {agent} ({keys or 'its needs only'}): {_quote(_compact(moved))}"
    return f"{entry.kind} {entry.id!r} {what} what {agent} runs: {_quote(_compact(entry.config))}"


def _moved(old: Mapping[str, Json], new: Mapping[str, Json]) -> dict[str, Json]:
    """The settings that are not what they were, by name; null for one that is gone."""
    both = {key for key in old.keys() & new.keys() if _compact(old[key]) == _compact(new[key])}
    return {key: new.get(key) for key in sorted((old.keys() | new.keys()) - both)}


def _agent(entry: Entry) -> str:
    return str(entry.config.get("agent", "a client"))


def _quote(text: str) -> str:
    return "(a part that is not shown: it looks like a secret)" if secret(text) else f'"{excerpt(text)}"'


def _compact(value: Json) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
