"""The texts of a tree that are rewritten, and the tree that new texts make.

Knows: which entries have a text, their ids, what a new text must not be. Does not know: what makes a text better.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from reef.cordis.compose import propose
from reef.harness.tree import Entry, Mutation

OWN = "gepa-rules"
"""The entry that is made where there is none to rewrite."""


def read(tree: Sequence[Entry], kinds: Collection[str]) -> dict[str, str]:
    """Texts by the ids of their entries; one that is empty, to begin with, where the tree has none of these kinds."""
    found = {entry.id: str(entry.config["text"]) for entry in tree if entry.kind in kinds}
    return found or {OWN: ""}


def mutations(tree: Sequence[Entry], texts: Mapping[str, str]) -> tuple[Mutation, ...]:
    """What makes the tree have these texts."""
    known = {entry.id: entry for entry in tree}
    made = []
    for name, text in texts.items():
        old = known.get(name)
        if old is None and text:
            made.append(Mutation("create", name, "rules", {"text": text}))
        elif old is not None and old.config["text"] != text:
            made.append(Mutation("update", name, old.kind, {**old.config, "text": text}))
    return tuple(made)


def grown(tree: Sequence[Entry], texts: Mapping[str, str]) -> Sequence[Entry]:
    """The tree with these texts. ValueError where there is no such tree, with the reasons."""
    changes = mutations(tree, texts)
    if not changes:
        return tree
    made = propose(tree, changes)
    if made.entries is None:
        raise ValueError("; ".join(made.refused))
    return made.entries


def flaw(tree: Sequence[Entry], texts: Mapping[str, str], component: str, most: int) -> str | None:
    """Why these texts, of which `component` is new, cannot be tried; None: they can."""
    text = texts[component]
    if not text.strip():
        return "the text is empty"
    if len(text) > most:
        return f"the text has {len(text)} characters; the limit is {most}"
    try:
        grown(tree, texts)
    except ValueError as error:
        return str(error)
    return None
