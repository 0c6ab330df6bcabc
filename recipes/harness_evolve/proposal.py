"""A proposer's answer as mutations of a tree, or what is wrong with it in sentences it can act on.

Knows: the strict form, which kinds may be used, ids that name this method, what was turned down before.
Does not know: who answered, or whether the edit is any good. Nothing here raises for what an answer says, and no
sentence quotes it: reasons end in logs.

The form: {"reason": "…", "mutations": [{"op": "create", "id": "…", "kind": "rules", "config": {"text": "…"}}]}.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reef.cordis.compose import propose
from reef.core.nouns import Json
from reef.harness.tree import Entry, Mutation
from reef.recipe.answers import objects
from reef.recipe.bench import Refusal

PREFIX = "evolve-"
MOST = 16  # mutations of one proposal
FAULTS = 12  # that are told of one answer
REASON = 240  # characters of a proposer's reason that are kept
_KEYS = {"op", "id", "kind", "config"}


@dataclass(frozen=True, slots=True)
class Edit:
    """Mutations that cordis admits; none: the proposer wants no edit. `reason` is its own."""

    mutations: tuple[Mutation, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Faults:
    said: tuple[str, ...]


def read(
    answer: str, tree: Sequence[Entry], *, kinds: Collection[str], most: int, rejected: Sequence[Refusal] = ()
) -> Edit | Faults:
    """`most` characters of one text. An edit changes something, composes onto the tree and was not turned down."""
    found = _mutations(answer)
    if found is None:
        return Faults(('there is no JSON object with the keys "reason" and "mutations" in it',))
    given, reason = found
    if not given:
        return Edit((), reason)
    if len(given) > MOST:
        return Faults((f"there are {len(given)} mutations; the limit is {MOST}",))
    faults: list[str] = []
    named = _names(given)
    made = []
    for place, one in enumerate(given, 1):
        if (wrong := _flaw(one, tree, named, kinds, most)) is None:
            made.append(_mutation(one, named))
        else:
            faults.append(f"mutation {place} {wrong}")
    if faults:
        return Faults(tuple(faults[:FAULTS]))
    composed = propose(tree, made)
    if composed.entries is None:
        return Faults(tuple(composed.refused[:FAULTS]))
    same = next((one for one in rejected if _bare(one.mutations) == _bare(made)), None)
    if same is not None:
        return Faults((f"this edit was proposed before and turned down ({same.why}); propose another or none",))
    return Edit(tuple(made), reason)


def _mutations(answer: str) -> tuple[list[Json], str] | None:
    """The last object with mutations and its reason; else the objects that are mutations by themselves."""
    found = objects(answer)
    for value in reversed(found):
        if isinstance(value, dict) and isinstance(value.get("mutations"), list):
            reason = value.get("reason")
            return value["mutations"], " ".join(reason.split())[:REASON] if isinstance(reason, str) else ""
    flat = [one for value in found for one in (value if isinstance(value, list) else [value])]
    bare = [one for one in flat if "op" in one and "id" in one]
    return (bare, "") if bare else None


def _names(given: Sequence[Json]) -> dict[str, str]:
    """The ids of entries that are created, as proposed, and as they will be: beginning with PREFIX."""
    made = [one["id"] for one in given if isinstance(one, dict) and one.get("op") == "create" and _text(one.get("id"))]
    return {name: name if name.startswith(PREFIX) else f"{PREFIX}{name}"[:64] for name in made}


def _flaw(one: Json, tree: Sequence[Entry], named: Mapping[str, str], kinds: Collection[str], most: int) -> str | None:
    """What is wrong with one mutation, beyond what cordis refuses, as the end of a sentence."""
    if not isinstance(one, dict):
        return "is not an object"
    if strange := sorted(set(one) - _KEYS):
        return f"has the unknown key {re.sub('[^a-z_]', '', strange[0].lower())[:32]!r}; use op, id, kind and config"
    if one.get("op") not in ("create", "update", "remove"):
        return "needs an op: create, update or remove"
    if not _text(one.get("id")):
        return "needs an id, a text"
    kind = one.get("kind")
    known = {entry.id: entry.kind for entry in tree}
    of = known.get(one["id"]) or (kind if one["op"] == "create" or one["id"] in named else None)
    if one["op"] == "create" and kind not in kinds:
        return f"needs a kind that may be used here: {', '.join(kinds)}"
    if of is not None and of not in kinds:
        return f"is of an entry of kind {of}, which may not be changed here; use {', '.join(kinds)}"
    if one["op"] == "remove":
        return None
    config = one.get("config")
    if not isinstance(config, dict):
        return "needs a config, an object"
    long = [name for name, value in config.items() if isinstance(value, str) and len(value) > most]
    return f"has a text of more than {most} characters; shorten it" if long else None


def _mutation(one: Mapping[str, Any], named: Mapping[str, str]) -> Mutation:
    name, config = named.get(one["id"], one["id"]), one.get("config")
    if one["op"] == "remove":
        return Mutation("remove", name)
    if isinstance(config, dict) and isinstance(config.get("needs"), list):
        config = {**config, "needs": [named.get(each, each) if _text(each) else each for each in config["needs"]]}
    return Mutation(one["op"], name, one.get("kind") if one["op"] == "create" else None, config)


def _bare(mutations: Sequence[Mutation]) -> list[tuple[str, str, str]]:
    """What two proposals of one edit have in common, whatever their ids are."""
    return sorted((one.op, one.id if one.op != "create" else one.kind or "", repr(one.config)) for one in mutations)


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)
