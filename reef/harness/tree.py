"""A harness tree: entries, their canonical file `harness.json`, and rules applied to a chat request.

Knows: entries and mutations, the limits of a tree, the one byte form each tree has, how rules join a system message.
Does not know: where the file is stored, who changes the tree, or what a good rule is.

- Same tree, same bytes: entries sorted by id, keys sorted, compact UTF-8 JSON, one newline at the end.
- What `write` wrote, `read` reads back equal. `read` refuses anything `write` would not have written an entry for.
- `apply_rules` never changes its argument and touches nothing but the leading system message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reef.core.errors import ChainError, InputError
from reef.core.nouns import Json
from reef.harness import kinds

FILE = "harness.json"
MAX_ENTRIES = 1024
MAX_ENTRY = 64 * 1024  # bytes of one entry's canonical JSON
MAX_TREE = 1024 * 1024  # bytes of the whole file

_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


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
    if not isinstance(entry.id, str) or not _ID.fullmatch(entry.id):
        return "is not a valid id: use 1 to 64 of a-z, 0-9, '.', '_', '-', beginning with a letter or digit"
    if not isinstance(entry.kind, str) or entry.kind not in kinds.KINDS:
        return f"has the unknown kind {entry.kind!r}; known: {', '.join(sorted(kinds.KINDS))}"
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
            raise InputError(f"harness entry {entry.id!r} {wrong}", param="entries")
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
