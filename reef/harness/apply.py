"""Rules and skills of a tree, put into a request: for plain applications, which have no client to install them in.

Knows: which entries a request gets under a `Wish`, and how they join what else instructs the model, in each dialect.
Does not know: who wishes it, files, or what a good rule is.

- Rules first, in the order of their ids, whatever is asked; then the skills that match the request, the best first.
- All of it within a budget of tokens, four bytes of text for one: an entry that has no room left is left out whole, and
  counted. So is, without being counted, an entry whose `needs` are not met.
- No model is asked which skills match (`match`), so equal requests get equal entries.
- `Applied` is made once for each release and wish and applied to many requests; it never changes its argument.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final

from reef.core.nouns import Json
from reef.harness.match import Index
from reef.harness.tree import Entry, apply_rules, render_rules, settled, write

BYTES: Final = 4
"""Of text in a token: about right for English and code."""
LOOKED: Final = 4000
"""Characters at either end of the newest user text in which words are looked for."""
_RULES: Final = len((render_rules([Entry("x", "rules", {"text": "x"})]) or "").encode()) - len(b"\n- x")
"""Bytes that stand before the first rule."""
_SKILLS: Final = "Use what helps of these skills:"


@dataclass(frozen=True, slots=True)
class Wish:
    """What a scenario wants added to its requests: nothing unless `apply`; at most `skills` skills; `tokens` in all."""

    apply: bool = False
    skills: int = 3
    tokens: int = 1024


@dataclass(frozen=True, slots=True)
class Addition:
    """What one request gets: a text, the ids of its entries, of which the first `rules` are rules, and for how many
    more there was no room."""

    text: str
    ids: tuple[str, ...] = ()
    rules: int = 0
    left: int = 0


@dataclass(frozen=True, slots=True)
class Applied:
    """What a release adds to requests. `key` is the same for two that answer alike, as far as the harness goes.

    `rules` is the text that every request gets, of the entries `ids`; `left` rules had no room. `entries` is the whole
    tree, which an agent's episode installs instead.
    """

    rules: str | None = None
    entries: tuple[Entry, ...] = ()
    wish: Wish = Wish(apply=True)
    ids: tuple[str, ...] = ()
    left: int = 0
    skills: Index | None = None
    parts: tuple[bytes, ...] = ()  # each skill as it would stand in the text, in the order of the index

    @classmethod
    def of(cls, entries: Sequence[Entry], wish: Wish) -> Applied:
        entries = tuple(sorted(entries, key=lambda entry: entry.id))
        if not wish.apply:
            return cls(None, entries, wish)
        there = sorted(settled(entries), key=lambda entry: entry.id)
        rules: list[Entry] = []
        left, room = 0, wish.tokens * BYTES
        for entry in (one for one in there if one.kind == "rules"):
            size = len((render_rules([entry]) or "").encode())
            size -= _RULES if rules else 0
            if size > room:
                left += 1
                continue
            rules.append(entry)
            room -= size
        skills = [entry for entry in there if entry.kind == "skill"] if wish.skills else []
        index = Index([(one.id, one.config["name"], one.config["description"]) for one in skills]) if skills else None
        parts = tuple(_part(entry) for entry in skills)
        return cls(render_rules(rules), entries, wish, tuple(entry.id for entry in rules), left, index, parts)

    @property
    def key(self) -> str:
        wish = astuple(self.wish) if self.wish.apply else None
        return json.dumps([self.rules, hashlib.sha256(write(self.entries)).hexdigest(), wish])

    def __bool__(self) -> bool:
        """Whether a request may get something."""
        return bool(self.rules or self.skills or self.left)

    def apply(self, body: dict[str, Any], dialect: str = "chat") -> dict[str, Any]:
        """The request with what it gets."""
        return self.add(body, dialect)[0]

    def add(self, body: dict[str, Any], dialect: str = "chat") -> tuple[dict[str, Any], Addition | None]:
        """The request with what it gets, and what that is; the request itself and None when it takes nothing."""
        added = self.choose(newest(body, dialect) if self.skills is not None else "")
        made = apply_rules(body, added.text, dialect)
        return (body, None) if made is body and added.ids else (made, added)

    def choose(self, text: str) -> Addition:
        """What a request with this newest user text gets."""
        found = self.skills.best(text)[: self.wish.skills] if self.skills is not None else []
        if not found:
            return Addition(self.rules or "", self.ids, len(self.ids), self.left)
        said = (self.rules or "").encode()
        ids, left, room = list(self.ids), self.left, self.wish.tokens * BYTES - len(said)
        several: list[bytes] = []
        for place, name in found:
            part = self.parts[place]
            head = b"" if several else (b"\n\n" if said else b"") + _SKILLS.encode()
            if len(head) + len(part) > room:
                left += 1
                continue
            several += [head, part]
            ids.append(name)
            room -= len(head) + len(part)
        return Addition((said + b"".join(several)).decode(), tuple(ids), len(self.ids), left)


NOTHING = Applied()


def newest(body: dict[str, Any], dialect: str = "chat") -> str:
    """The last words of the user in a request, the middle of long ones left out; empty when there are none."""
    said = body.get("input" if dialect == "responses" else "messages")
    if isinstance(said, str) and dialect == "responses":
        return _ends(said)
    for message in reversed(said) if isinstance(said, list) else ():
        if isinstance(message, dict) and message.get("role") == "user" and (text := _text(message.get("content"))):
            return _ends(text)
    return ""


def _text(content: Json) -> str:
    if isinstance(content, list):
        words = (part.get("text") for part in content if isinstance(part, dict))  # tool results have no text of theirs
        return "\n".join(word for word in words if isinstance(word, str))
    return content if isinstance(content, str) else ""


def _ends(text: str) -> str:
    return text if len(text) <= 2 * LOOKED else f"{text[:LOOKED]} {text[-LOOKED:]}"


def _part(entry: Entry) -> bytes:
    skill = entry.config
    return f"\n\n## {skill['name']}: {skill['description'].strip()}\n\n{skill['text'].strip()}".encode()
