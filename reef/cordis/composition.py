"""A live composition of a tree: each entry's effects are in place exactly while the entry and what it needs are.

After the idea of cordiverse/cordis (MIT) and its paper "A Programming Paradigm for Spatiotemporal Composability": in
space, a part says what it needs and comes and goes with it. Written fresh.

Knows: entries by id, their needs and states. Does not know: what the effects are (`target`), or whether the tree that
results is a good one, as a whole (`live`).

- An update is a difference by id: an entry that stays as it was, byte for byte, and so do those it needs, is not
  touched. One that changed is undone, then applied.
- An entry waits (pending) until all it needs are active, and is undone before the first of them goes.
- An entry that fails has its effects so far undone and keeps its error; its siblings go on, what needs it waits.
- Whatever the history, states and effects are those of a fresh composition of the same entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from reef.cordis.context import Context
from reef.harness.tree import Entry, needs, settled, waiting, write

State = Literal["pending", "active", "failed", "disposed"]
Apply = Callable[[Context, Entry], None]
"""Puts an entry's effects in place, through the context that it is handed. It may raise: the entry has failed."""


@dataclass(slots=True)
class Plug:
    """One entry in a composition. `why`: what a pending one waits for, as the end of a sentence; of a failed one, its
    error."""

    entry: Entry
    state: State = "pending"
    why: str = ""
    error: Exception | None = None
    context: Context | None = None


class Composition:
    """Entries plugged by id. Not safe for threads; nothing in it waits."""

    def __init__(self, apply: Apply, root: Context | None = None) -> None:
        self.root = root if root is not None else Context()
        self.plugs: dict[str, Plug] = {}
        self._apply = apply
        self._done: dict[str, None] = {}  # active or failed, each after those it needs

    def update(self, entries: Sequence[Entry]) -> tuple[Exception, ...]:
        """Become these entries, which have different ids. The errors of inverses, which stop nothing."""
        new = {entry.id: entry for entry in entries}
        if len(new) < len(entries):
            raise ValueError("two entries have the same id")
        gone = {name for name, plug in self.plugs.items() if name not in new or not same(plug.entry, new[name])}
        leaving = set(gone)
        for name in self._done:
            if not leaving.isdisjoint(needs(self.plugs[name].entry)):
                leaving.add(name)
        errors: list[Exception] = []
        for name in [name for name in reversed(self._done) if name in leaving]:
            errors += self._undo(name)
        for name in gone:
            self.plugs.pop(name).state = "disposed"
        for name, entry in new.items():
            if name not in self.plugs:
                self.plugs[name] = Plug(entry)
        for entry in settled(new.values()):
            plug = self.plugs[entry.id]
            if plug.state == "pending" and all(self.plugs[need].state == "active" for need in needs(entry)):
                errors += self._do(plug)
        failed = self.failed
        for name, why in waiting(new.values(), failed).items():
            self.plugs[name].why = why
        return tuple(errors)

    @property
    def failed(self) -> Mapping[str, Exception]:
        return {name: plug.error for name, plug in self.plugs.items() if plug.error is not None}

    def dispose(self) -> tuple[Exception, ...]:
        """Undo everything, dependents before what they need. The errors of inverses."""
        errors = self.root.dispose()  # contexts of entries are its children, in the order of `_done`
        for plug in self.plugs.values():
            plug.state = "disposed"
        self._done.clear()
        return errors

    def _do(self, plug: Plug) -> tuple[Exception, ...]:
        context = self.root.child()
        self._done[plug.entry.id] = None
        try:
            self._apply(context, plug.entry)
        except BaseException as error:
            errors = context.dispose()
            if not isinstance(error, Exception):  # somebody ends the program: the entry is as if it was never tried
                del self._done[plug.entry.id]
                raise
            plug.state, plug.error, plug.why = "failed", error, str(error) or type(error).__name__
            return errors
        plug.state, plug.context, plug.why = "active", context, ""
        return ()

    def _undo(self, name: str) -> tuple[Exception, ...]:
        plug = self.plugs[name]
        del self._done[name]
        errors = plug.context.dispose() if plug.context is not None else ()
        plug.state, plug.context, plug.error, plug.why = "pending", None, None, ""
        return errors


def same(one: Entry, other: Entry) -> bool:
    """Byte for byte: `==` takes 1, 1.0 and true for the same, files do not."""
    return one is other or (one == other and (one.config is other.config or write([one]) == write([other])))
