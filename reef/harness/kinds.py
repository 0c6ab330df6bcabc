"""The kinds of entries a harness tree can hold: what each asks of its config, and what of it acts on a machine.

Knows: five kinds, their fields and limits. Does not know: trees, clients' files, or who may add what.

A kind more is one `Kind` in KINDS, and a `place` for it in the agents that can show it. Every config may also have
`needs`, a list of the ids of entries without which this one is left out (see `cordis.composition`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from reef.core.nouns import Json

NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
"""What agents take for the name of a skill or command, at most 64 characters (agentskills.io/specification)."""
MAX_DESCRIPTION: Final = 1024
MAX_NEEDS: Final = 16


@dataclass(frozen=True, slots=True)
class Field:
    """One key of a config. `most`: characters of a text, or members of an object."""

    type: type
    most: int
    required: bool = True
    check: Callable[[Any], str | None] | None = None  # what is wrong with it, as the end of a sentence


@dataclass(frozen=True, slots=True)
class Kind:
    """`acts`: entries of this kind run code or change what a client may do, so a person must agree to new ones."""

    fields: Mapping[str, Field]
    acts: bool = False


def _name(value: str) -> str | None:
    right = len(value) <= 64 and NAME.fullmatch(value)
    return None if right else "must be 1 to 64 of a-z and 0-9 with single dashes between"


def _agent(value: str) -> str | None:
    return None if NAME.fullmatch(value) and len(value) <= 64 else "must be an agent's name, such as pi"


def _file(value: str) -> str | None:
    right = re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,62}\.(?:ts|js|mjs|md|json|py|toml)", value)
    return None if right else "must be a plain file name that ends in .ts, .js, .mjs, .py, .md, .json or .toml"


_TEXT = Field(str, 64 * 1024)
_SHORT = {"name": Field(str, 64, check=_name), "description": Field(str, MAX_DESCRIPTION)}

KINDS: Final[Mapping[str, Kind]] = {
    "rules": Kind({"text": _TEXT}),  # sentences that stand in the system prompt, always
    "skill": Kind(_SHORT | {"text": _TEXT}),  # read when its description fits the task
    "command": Kind(_SHORT | {"text": _TEXT}),  # a prompt that a user calls by name, /NAME
    # settings of one client
    "config": Kind({"agent": Field(str, 64, check=_agent), "values": Field(dict, 64)}, acts=True),
    "extension": Kind(  # code that a client loads
        {"agent": Field(str, 64, check=_agent), "file": Field(str, 64, check=_file), "text": _TEXT}, acts=True
    ),
}


def flaw(kind: str, config: Json) -> str | None:
    """What is wrong with a config of this kind, as the end of a sentence that begins with the entry; None: nothing."""
    fields = KINDS[kind].fields
    if not isinstance(config, dict):
        return f"needs a config with the keys {', '.join(fields)}"
    given = {name: value for name, value in config.items() if name != "needs"}
    if strange := sorted(set(given) - set(fields)):
        return f"has a config with the unknown key {strange[0]!r}; {kind} has {', '.join(fields)}"
    for name, field in fields.items():
        if name not in given:
            if field.required:
                return f"needs the key {name!r}; {kind} has {', '.join(fields)}"
            continue
        value = given[name]
        if not isinstance(value, field.type):
            return f"has a config whose {name} is not {'a text' if field.type is str else 'an object'}"
        if isinstance(value, str) and not value.strip():
            return f"has an empty {name}"
        if len(value) > field.most:  # type: ignore[arg-type]  # a text or an object, by now
            return f"has a {name} of {len(value)}; the limit is {field.most}"  # type: ignore[arg-type]
        if field.check is not None and (wrong := field.check(value)) is not None:
            return f"has a {name} that {wrong}"
    return _needs(config.get("needs", []))


def _needs(needs: Json) -> str | None:
    if not isinstance(needs, list) or not all(isinstance(each, str) and each for each in needs):
        return "has needs that are not a list of entries' ids"
    return f"has {len(needs)} needs; the limit is {MAX_NEEDS}" if len(needs) > MAX_NEEDS else None
