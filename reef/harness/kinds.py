"""The kinds of entries a harness tree can hold: what each asks of its config, and what of it acts on a machine.

Knows: five kinds, their fields and limits. Does not know: trees, clients' files, or who may add what.

A kind more is one `Kind` in KINDS, and a `place` for it in the agents that can show it. Every config may also have
`needs`, a list of the ids of entries without which this one is left out (see `tree.settled`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from reef.core.nouns import Json

ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
"""What agents take for the name of a skill or command, at most 64 characters (agentskills.io/specification)."""
MAX_DESCRIPTION: Final = 1024
MAX_NEEDS: Final = 16
MAX_DEPTH: Final = 16  # of objects and lists in a config
MAX_WHOLE: Final = 2**53  # beyond it JavaScript clients read another number

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BREAK = re.compile(r"[\t\n\u2028\u2029]")
_RESERVED = re.compile(r"(?:con|prn|aux|nul|conin\$|conout\$|(?:com|lpt)[0-9¹²³])(?:\..*)?", re.IGNORECASE | re.DOTALL)


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


def reserved(name: str) -> bool:
    """Whether Windows takes a file of this name for a device, or cannot keep it: such trees could not be installed."""
    return bool(_RESERVED.fullmatch(name)) or name.endswith((".", " "))


def quoted(value: object) -> str:
    """A value of unknown origin inside a sentence: short, and nothing in it but printable ASCII."""
    if not isinstance(value, str):
        return f"({type(value).__name__})"
    said = ascii(value[:64])
    return said if len(said) <= 66 else said[:63] + "…"


def _name(value: str) -> str | None:
    right = len(value) <= 64 and NAME.fullmatch(value)
    if not right:
        return "must be 1 to 64 of a-z and 0-9 with single dashes between"
    return "is a device on Windows; choose another" if reserved(value) else None


def _agent(value: str) -> str | None:
    return None if NAME.fullmatch(value) and len(value) <= 64 else "must be an agent's name, such as pi"


def _file(value: str) -> str | None:
    right = re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,62}\.(?:ts|js|mjs|md|json|py|toml)", value)
    if not right:
        return "must be a plain file name that ends in .ts, .js, .mjs, .py, .md, .json or .toml"
    return "is a device on Windows; choose another" if reserved(value) else None


def _line(value: str) -> str | None:
    return "must be one line, without tabs" if _BREAK.search(value) else None


_TEXT = Field(str, 64 * 1024)
_SHORT = {"name": Field(str, 64, check=_name), "description": Field(str, MAX_DESCRIPTION, check=_line)}

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
    if (wrong := _plain(config)) is not None:
        return wrong
    given = {name: value for name, value in config.items() if name != "needs"}
    if strange := sorted(set(given) - set(fields)):
        return f"has a config with the unknown key {quoted(strange[0])}; {kind} has {', '.join(fields)}"
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
    if not isinstance(needs, list) or not all(isinstance(each, str) and ID.fullmatch(each) for each in needs):
        return "has needs that are not a list of entries' ids"
    if len(set(needs)) < len(needs):
        return "has the same id twice in its needs"
    return f"has {len(needs)} needs; the limit is {MAX_NEEDS}" if len(needs) > MAX_NEEDS else None


def _plain(config: Json) -> str | None:
    """What in a config would not be the same JSON everywhere, or acts on a terminal. Without recursion: depth is one
    of the things it looks at."""
    held: list[tuple[Json, int]] = [(config, 0)]
    while held:
        value, depth = held.pop()
        if depth > MAX_DEPTH:
            return f"has a config that is nested more than {MAX_DEPTH} deep"
        if type(value) is dict:
            if not all(type(key) is str for key in value):
                return "has a config that is not plain JSON (a key that is no text)"
            held += ((item, depth + 1) for pair in value.items() for item in pair)
        elif type(value) is list:
            held += ((item, depth + 1) for item in value)
        elif type(value) is str:
            if (wrong := _letters(value)) is not None:
                return wrong
        elif type(value) is int:
            if abs(value) > MAX_WHOLE:
                return "has a whole number beyond 2^53 in its config; write it as a text"
        elif type(value) is float:
            if not math.isfinite(value):
                return "has a config that is not plain JSON (a number that is not finite)"
        elif value is not None and type(value) is not bool:
            return f"has a config that is not plain JSON (a {type(value).__name__})"
    return None


def _letters(text: str) -> str | None:
    if _CONTROL.search(text):
        return "has control characters in its config; only tab and newline may stand in a text"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "has a config that is not plain JSON (half of a surrogate pair)"
    return None
