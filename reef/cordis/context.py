"""Effects that can be taken back: each is registered with its inverse, and a context takes back all of its own.

After the idea of cordiverse/cordis (MIT) and its paper "A Programming Paradigm for Spatiotemporal Composability": in
time, whatever is done is done together with how it is undone. Written fresh.

Knows: the order of inverses. Does not know: what an effect is, or when one is wanted (`composition`).

- An inverse runs once. The last effect is undone first, and a child context counts as an effect of its parent.
- An inverse that fails stops none of the others; the errors are collected.
"""

from __future__ import annotations

from collections.abc import Callable

Inverse = Callable[[], object]


class Context:
    """A stack of effects. `live` is false once it is disposed: it then takes no effect any more."""

    __slots__ = ("_leave", "_next", "_stack", "live")

    def __init__(self) -> None:
        self.live = True
        self._stack: dict[int, Inverse | Context] = {}
        self._next = 0
        self._leave: Inverse = lambda: None  # takes this context off its parent's stack

    def effect(self, do: Callable[[], Inverse]) -> None:
        """Do it now; what `do` returns undoes it. An error of `do` is the caller's, and leaves nothing to undo."""
        self._check()
        self._push(do())

    def child(self) -> Context:
        """A context that can be disposed by itself, and is with this one."""
        self._check()
        made = Context()
        key = self._push(made)
        made._leave = lambda: self._stack.pop(key, None)
        return made

    def dispose(self) -> tuple[Exception, ...]:
        """Undo everything, last first. The errors of inverses; nothing is left either way. Again: nothing happens."""
        self.live = False
        self._leave()
        errors: list[Exception] = []
        while self._stack:
            _, held = self._stack.popitem()
            try:
                if isinstance(held, Context):
                    errors += held.dispose()
                else:
                    held()
            except Exception as error:
                errors.append(error)
        return tuple(errors)

    def __len__(self) -> int:
        return sum(len(held) if isinstance(held, Context) else 1 for held in self._stack.values())

    def _check(self) -> None:
        if not self.live:
            raise RuntimeError("a disposed context takes no effects")

    def _push(self, held: Inverse | Context) -> int:
        self._next += 1
        self._stack[self._next] = held
        return self._next
