"""Mutations onto a tree: a new tree, or the reasons there is none. Whole or not at all.

Knows: the three operations and everything that makes an edit inadmissible.
Does not know: files, releases, recipes. Both outcomes are values; nothing here raises for a bad proposal.

- A refused proposal changes nothing: entries are frozen and the old tuple is never touched.
- Mutations apply in order, so a later one may update or remove what an earlier one created.
- The tree that results from any admissible sequence is the one a fresh build of its entries gives, byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reef.cordis.screen import screen
from reef.core.errors import InputError
from reef.harness.tree import Entry, Mutation, flaw, write

MAX_MUTATIONS = 64


@dataclass(frozen=True, slots=True)
class Proposal:
    """A candidate tree in `entries`, or None and every reason in `refused` (sentences for a person)."""

    entries: tuple[Entry, ...] | None
    refused: tuple[str, ...] = ()


def propose(entries: Sequence[Entry], mutations: Sequence[Mutation]) -> Proposal:
    """The tree that `mutations` make of `entries`, sorted by id, or every reason why they make none."""
    if not mutations:
        return Proposal(None, ("the proposal is empty: it changes nothing",))
    if len(mutations) > MAX_MUTATIONS:
        return Proposal(None, (f"the proposal has {len(mutations)} changes; the limit is {MAX_MUTATIONS}",))
    tree = {entry.id: entry for entry in entries}
    refused = []
    for mutation in mutations:
        if (wrong := _apply(tree, mutation)) is not None:
            refused.append(f"{mutation.op} {mutation.id!r}: {wrong}")
    if refused:
        return Proposal(None, tuple(refused))
    new = tuple(tree[key] for key in sorted(tree))
    try:
        same = write(new) == write(entries)
    except InputError as error:
        return Proposal(None, (error.message,))
    return Proposal(None, ("the proposal is empty: it ends with the tree it started from",)) if same else Proposal(new)


def _apply(tree: dict[str, Entry], mutation: Mutation) -> str | None:
    """Apply one mutation to the working tree; a sentence when it cannot be."""
    old = tree.get(mutation.id) if isinstance(mutation.id, str) else None
    if mutation.op == "create":
        if old is not None:
            return "there is an entry with this id already; use update"
        new = Entry(mutation.id, mutation.kind or "", mutation.config)
    elif mutation.op == "update":
        if old is None:
            return "there is no entry with this id; use create"
        if mutation.kind not in (None, old.kind):
            return f"the entry is of kind {old.kind!r}; a kind never changes, remove it and create another"
        new = Entry(mutation.id, old.kind, mutation.config)
    elif mutation.op == "remove":
        if old is None:
            return "there is no entry with this id"
        del tree[mutation.id]
        return None
    else:
        return "unknown operation; use create, update or remove"
    if (wrong := flaw(new)) is not None:
        return f"the entry {wrong}"
    if (wrong := screen(new.config)) is not None:
        return wrong
    tree[new.id] = new
    return None
