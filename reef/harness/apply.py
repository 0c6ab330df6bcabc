"""Rules and skills of a tree, put into a request: for plain applications, which have no client to install them in.

Knows: how rules join what else instructs the model, in each dialect. Does not know: when that is wanted.

`Applied` is made once for each release and applied to many requests; it never changes its argument.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reef.harness.tree import Entry, apply_rules, render_rules, write


@dataclass(frozen=True, slots=True)
class Applied:
    """What a release adds to a request. `key` is the same for two that answer alike, as far as the harness goes.
    `entries` is the whole tree, which an agent's episode installs instead."""

    rules: str | None = None
    entries: tuple[Entry, ...] = ()

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> Applied:
        return cls(render_rules(entries), tuple(entries))

    @property
    def key(self) -> str:
        return json.dumps([self.rules, hashlib.sha256(write(self.entries)).hexdigest()])

    def __bool__(self) -> bool:
        return self.rules is not None

    def apply(self, body: dict[str, Any], dialect: str = "chat") -> dict[str, Any]:
        return apply_rules(body, self.rules, dialect)


NOTHING = Applied()
