"""Mutations onto a tree: a new tree, or the reasons there is none. Whole or not at all.

Knows: the three operations and everything that makes an edit inadmissible.
Does not know: files, releases, recipes. Both outcomes are values; nothing here raises for a bad proposal.

- A refused proposal changes nothing: entries are frozen and the old tuple is never touched.
- Mutations apply in order, so a later one may update or remove what an earlier one created.
- The tree that results from any admissible sequence is the one a fresh build of its entries gives, byte for byte, and
  so are the files that it becomes in every agent (`live`).
- An edit answers for what it changes. What acts on a machine is no reason against it here: a person decides (`hold`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reef.cordis.live import Live
from reef.cordis.novel import SAME, Run, runs, share
from reef.cordis.screen import secret, taint
from reef.cordis.target import known as agents_known
from reef.core.errors import InputError
from reef.harness.agents import Agent
from reef.harness.kinds import quoted
from reef.harness.tree import Entry, Mutation, flaw, read, write

MAX_MUTATIONS = 64
_SAYS = ("rules", "skill")  # kinds whose text must say something new


@dataclass(frozen=True, slots=True)
class Proposal:
    """A candidate tree in `entries`, or None and every reason in `refused` (sentences for a person)."""

    entries: tuple[Entry, ...] | None
    refused: tuple[str, ...] = ()


def propose(
    entries: Sequence[Entry],
    mutations: Sequence[Mutation],
    *,
    known: Sequence[str] = (),
    agents: Mapping[str, Agent] | None = None,
) -> Proposal:
    """The tree that `mutations` make of `entries`, sorted by id, or every reason why they make none.

    `known`: texts that a client says by itself, such as its own system prompt: a rule or skill that only restates them
    is refused. `agents`: those it must render for, by name; default: all that Reef comes with.
    """
    if not mutations:
        return Proposal(None, ("the proposal is empty: it changes nothing",))
    if len(mutations) > MAX_MUTATIONS:
        return Proposal(None, (f"the proposal has {len(mutations)} changes; the limit is {MAX_MUTATIONS}",))
    agents = agents_known() if agents is None else agents
    tree = {entry.id: entry for entry in entries}
    refused = []
    for number, mutation in enumerate(mutations, 1):
        if (wrong := _apply(tree, mutation, agents)) is not None:
            refused.append(f"{_named(mutation, number)}: {wrong}")
    if refused:
        return Proposal(None, tuple(refused))
    new = tuple(tree[key] for key in sorted(tree))
    try:
        if (data := write(new)) == write(entries):
            return Proposal(None, ("the proposal is empty: it ends with the tree it started from",))
    except InputError as error:
        return Proposal(None, (error.message,))
    refused = _stale(entries, new, known)
    live = Live(agents, entries)
    refused += live.swap(new)
    live.dispose()
    return Proposal(None, tuple(refused)) if refused else Proposal(read(data))  # nobody else holds what it holds


def _apply(tree: dict[str, Entry], mutation: Mutation, agents: Mapping[str, Agent]) -> str | None:
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
        if mutation.kind not in (None, old.kind) or mutation.config:  # nothing would look at what stands there
            return "a removal takes the id alone; leave kind and config out"
        del tree[mutation.id]
        return None
    else:
        return "unknown operation; use create, update or remove"
    if (wrong := flaw(new)) is not None:
        return "the entry has a wrong form" if secret(wrong) else f"the entry {wrong}"
    if (wrong := taint([new.id, new.config])) is not None:
        return wrong
    agent = new.config.get("agent")
    if agent is not None and agent not in agents:
        return f"the entry is for the unknown agent {quoted(agent)}; known: {', '.join(sorted(agents))}"
    tree[new.id] = new
    return None


def _named(mutation: Mutation, number: int) -> str:
    """A mutation in a sentence; what is no id of an entry, or holds a secret, is not repeated."""
    op = mutation.op if mutation.op in ("create", "update", "remove") else "change"
    said = quoted(mutation.id)
    return f"{op} {said}" if not secret(said) else f"{op} {number}"


def _stale(before: Sequence[Entry], after: Sequence[Entry], known: Sequence[str]) -> list[str]:
    """Which new rules and skills say nothing new: against what stays, what is known, and each other."""
    old = {entry.id: entry for entry in before}
    texts = [entry for entry in after if entry.kind in _SAYS]
    fresh = [entry for entry in texts if entry.id not in old or old[entry.id].config["text"] != entry.config["text"]]
    if not fresh:
        return []
    new = {entry.id for entry in fresh}
    said = {"": frozenset[Run]().union(*map(runs, known))}
    said |= {entry.id: runs(entry.config["text"]) for entry in texts if entry.id not in new}
    stood = set().union(*said.values())
    refused = []
    for entry in fresh:
        own = runs(entry.config["text"])
        if own and share(own, [stood]) >= SAME:
            near = max(said, key=lambda name: len(own & said[name]))
            where = f"the entry {near!r}" if near else "what the client says by itself"
            refused.append(f"{entry.kind} {entry.id!r} says nothing new: most of it is in {where}; update that instead")
        said[entry.id] = own
        stood |= own
    return refused
