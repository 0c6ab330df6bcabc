"""A harness tree: entries, their canonical file `harness.json`, and rules applied to a chat request.

Knows: entries and mutations, the limits of a tree, the one byte form each tree has, how rules join a system message.
Does not know: where the file is stored, who changes the tree, or what a good rule is.

- Same tree, same bytes: entries sorted by id, keys sorted, compact UTF-8 JSON, one newline at the end.
- What `write` wrote, `read` reads back equal. `read` refuses anything `write` would not have written an entry for.
- An entry that needs another is left out of what a tree becomes until the other is there (`settled`).
- `apply_rules` never changes its argument and touches nothing but the leading system message.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from reef.core.errors import ChainError, InputError
from reef.core.nouns import Json
from reef.harness import kinds

FILE = "harness.json"
MAX_ENTRIES = 1024
MAX_ENTRY = 64 * 1024  # bytes of one entry's canonical JSON
MAX_TREE = 1024 * 1024  # bytes of the whole file


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a harness tree."""

    id: str
    kind: str  # one of `kinds.KINDS`
    config: Json


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change: `create` needs kind and config, `update` config (a kind only confirms it), `remove` neither."""

    op: str  # create | update | remove
    id: str
    kind: str | None = None
    config: Json = None


def flaw(entry: Entry) -> str | None:
    """Why this entry cannot stand in a tree, as the end of a sentence that begins with its id; None when it can."""
    if not isinstance(entry.id, str) or not kinds.ID.fullmatch(entry.id):
        return "is not a valid id: use 1 to 64 of a-z, 0-9, '.', '_', '-', beginning with a letter or digit"
    if kinds.reserved(entry.id):
        return "is not a valid id: it ends with a dot, or is a device on Windows; choose another"
    if not isinstance(entry.kind, str) or entry.kind not in kinds.KINDS:
        return f"has the unknown kind {kinds.quoted(entry.kind)}; known: {', '.join(sorted(kinds.KINDS))}"
    if (wrong := kinds.flaw(entry.kind, entry.config)) is not None:
        return wrong
    try:
        size = len(_bytes(_plain(entry)))
    except (TypeError, ValueError, RecursionError) as error:
        return f"has a config that is not plain JSON ({error})"
    return f"is {size} bytes; the limit is {MAX_ENTRY}" if size > MAX_ENTRY else None


def write(entries: Sequence[Entry]) -> bytes:
    """The tree's one byte form. InputError for an entry that cannot stand in a tree, a repeated id, or too many."""
    if len(entries) > MAX_ENTRIES:
        raise InputError(f"a tree of {len(entries)} entries; the limit is {MAX_ENTRIES}: remove some first")
    seen: set[str] = set()
    for entry in entries:
        if (wrong := flaw(entry)) is not None:
            raise InputError(f"harness entry {kinds.quoted(entry.id)} {wrong}", param="entries")
        if entry.id in seen:
            raise InputError(f"two harness entries have the id {entry.id!r}; ids must differ", param="entries")
        seen.add(entry.id)
    data = _bytes({"entries": [_plain(entry) for entry in sorted(entries, key=lambda entry: entry.id)]}) + b"\n"
    if len(data) > MAX_TREE:
        raise InputError(f"a tree of {len(data)} bytes; the limit is {MAX_TREE}: shorten or remove entries")
    return data


def read(data: bytes) -> tuple[Entry, ...]:
    """The entries of a `harness.json`, sorted by id. ChainError says what is damaged: its bytes come from a release."""
    try:
        tree = json.loads(data, parse_constant=_refuse)
        if set(tree) != {"entries"} or not isinstance(tree["entries"], list):
            raise ValueError('its only key must be "entries", a list')
        entries = []
        for item in tree["entries"]:
            if not isinstance(item, dict) or set(item) != {"id", "kind", "config"}:
                raise ValueError("each entry needs exactly id, kind and config")
            entries.append(Entry(item["id"], item["kind"], item["config"]))
        write(entries)
    except (ValueError, TypeError, RecursionError, InputError) as error:
        raise ChainError(f"{FILE} is damaged ({error}); roll back to an earlier release") from None
    return tuple(sorted(entries, key=lambda entry: entry.id))


def needs(entry: Entry) -> tuple[str, ...]:
    """The ids without which this entry is left out."""
    return tuple(entry.config.get("needs", ())) if isinstance(entry.config, dict) else ()


def settled(entries: Iterable[Entry], without: Collection[str] = ()) -> tuple[Entry, ...]:
    """The entries whose needs are in the tree and settled themselves, each after those it needs, else in id order.

    What is in no such order, because a need is missing (or is one of the ids in `without`) or needs go in a circle, is
    left out. Pure; the order depends on the set of entries only.
    """
    tree = {entry.id: entry for entry in entries if entry.id not in without}
    waits = {name: len(needs(entry)) for name, entry in tree.items()}
    wanted: dict[str, list[str]] = {}
    for name, entry in tree.items():
        for need in needs(entry):
            wanted.setdefault(need, []).append(name)
    ready = sorted(name for name, count in waits.items() if count == 0)
    order = []
    while ready:
        order.append(tree[name := heapq.heappop(ready)])
        for other in wanted.get(name, ()):
            waits[other] -= 1
            if waits[other] == 0:
                heapq.heappush(ready, other)
    return tuple(order)


def waiting(entries: Iterable[Entry], without: Collection[str] = ()) -> dict[str, str]:
    """Why each entry that is not settled is left out, as the end of a sentence that begins with its id."""
    tree = {entry.id: entry for entry in entries}
    left = tree.keys() - {entry.id for entry in settled(tree.values(), without)} - set(without)
    said, after = {}, {}
    for name in sorted(left):
        lacks = next(need for need in needs(tree[name]) if need not in tree or need in left or need in without)
        if lacks in left:
            after[name] = lacks
        else:
            said[name] = f"needs {lacks!r}, which {'failed' if lacks in tree else 'is not in the tree'}"
    circles: set[str] = set()
    seen: dict[str, str] = {}
    for start in after:  # each leads on to one other, so a walk ends in a circle, at what is missing, or on an old walk
        name = start
        while name in after and name not in seen:
            seen[name] = start
            name = after[name]
        if seen.get(name) == start:
            while name not in circles:
                circles.add(name)
                name = after[name]
    for name, lacks in after.items():
        said[name] = f"needs itself, through {lacks!r}" if name in circles else f"needs {lacks!r}, which waits itself"
    return said


def render_rules(entries: Sequence[Entry]) -> str | None:
    """The rules entries as one text for a system message, in id order; None when the tree has no rules."""
    rules = sorted((entry for entry in entries if entry.kind == "rules"), key=lambda entry: entry.id)
    if not rules:
        return None
    lines = ["Follow these rules:"]
    for entry in rules:
        lines.append("- " + entry.config["text"].strip().replace("\n", "\n  "))
    return "\n".join(lines)


def apply_rules(body: dict[str, Any], rules: str | None, dialect: str = "chat") -> dict[str, Any]:
    """A request with the rules in front of what else instructs the model: `instructions` of Responses, `system` of
    Messages, the leading system message of Chat, or a new one.

    A leading `developer` message counts as one. Text content gets the rules and a blank line before it; list content
    gets a text part as its first. A body without a list of messages is returned as it is: refusing it is not our part.
    """
    if rules and dialect in _INSTRUCTIONS:
        name = _INSTRUCTIONS[dialect]
        return body | {name: _before(rules, body.get(name))}
    messages = body.get("messages")
    if not rules or not isinstance(messages, list) or dialect not in ("chat", "count"):
        return body
    first = messages[0] if messages else None
    if not isinstance(first, dict) or first.get("role") not in ("system", "developer"):
        return body | {"messages": [{"role": "system", "content": rules}, *messages]}
    return body | {"messages": [first | {"content": _before(rules, first.get("content"))}, *messages[1:]]}


_INSTRUCTIONS = {"responses": "instructions", "messages": "system", "count_tokens": "system"}


def _before(rules: str, content: Json) -> Json:
    """Text with the rules and a blank line before it; parts with a text part of the rules as their first."""
    if isinstance(content, list):
        return [{"type": "text", "text": rules}, *content]
    return f"{rules}\n\n{content}" if isinstance(content, str) and content else rules


def _plain(entry: Entry) -> Json:
    return {"id": entry.id, "kind": entry.kind, "config": entry.config}


def _bytes(value: Json) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
