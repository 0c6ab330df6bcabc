"""What arrived and waits to be loaded: a few buffers of bounded size, found by the digests of what is in them.

Knows: buffers, which are on their way, whole, being read, or free to be used again.
Does not know: process groups, releases, or how a file becomes weights.

- All buffers together are never larger than the limit. For a new arrival the oldest one that nobody reads goes; what is
  larger than the limit, or would push out one that is being read, is refused, and its files are read instead.
- An arrival that was loaded leaves at once: the engine has the weights now. Its buffer stays for the next one, since
  fresh memory costs more than the transfer (every page is touched for the first time).
- Whoever wants something that is on its way waits for it, but not for long.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from reef.engines.local.broadcast.group import buffer
from reef.engines.local.broadcast.held import Held, plain
from reef.engines.local.broadcast.talk import Carried, places

KEPT = 4  # arrivals that wait to be loaded, at most
KNOWN = 64  # digests of what was loaded, which need not come again
PATIENCE = 30.0  # seconds that a load waits for what is on its way
ROOMY = 2  # a buffer this many times as large as what comes is too good for it


@dataclass(slots=True, eq=False)
class Space:
    """Room for the files of one offer."""

    files: tuple[Carried, ...]
    whole: Tensor  # the buffer, perhaps larger than what is in it
    flat: Tensor  # [size] uint8: where the files lie
    arrived: bool = False
    users: int = 0
    digests: frozenset[str] = field(default=frozenset())

    def held(self, name: str, digest: str) -> Held:
        starts, _ = places(self.files)
        place = next(number for number, file in enumerate(self.files) if file.sha256 == digest)
        return Held(name, self.flat[starts[place] : starts[place] + self.files[place].size])


class Arrivals:
    """Safe to use from several threads. `limit` is in bytes."""

    def __init__(
        self,
        limit: int,
        device: torch.device | None = None,
        make: Callable[[torch.device, int], Tensor] = buffer,
    ) -> None:
        self._limit, self._make = limit, make
        self.device = device or torch.device("cpu")
        self._changed = threading.Condition()
        self._spaces: list[Space] = []  # oldest first
        self._free: list[Tensor] = []
        self._known: deque[frozenset[str]] = deque(maxlen=KNOWN)
        self._counts = {"received": 0, "loaded": 0, "read": 0, "lost": 0, "refused": 0}

    def offer(self, files: Sequence[Carried]) -> Space | str:
        """Room for what is to come, or why there is none. Follow it by `keep` or `drop`."""
        if not plain(files):
            return "the offer is none"
        digests = frozenset(file.sha256 for file in files)
        _, size = places(files)
        with self._changed:
            if any(digests == space.digests for space in self._spaces) or digests in self._known:
                return "it is here"
            if size > self._limit:
                return self._refuse(f"{size} bytes, and room for {self._limit}")
            whole = self._room(size)
            if whole is None:
                return self._refuse("all the room is in use")
            space = Space(tuple(files), whole, whole[:size], digests=digests)
            self._spaces.append(space)
            return space

    def keep(self, space: Space) -> None:
        """It is whole and verified."""
        with self._changed:
            space.arrived = True
            self._counts["received"] += 1
            self._changed.notify_all()

    def drop(self, space: Space) -> None:
        """It will not come."""
        with self._changed:
            if space in self._spaces and not space.arrived:
                self._counts["lost"] += 1
                self._release(space)
            self._changed.notify_all()

    @contextlib.contextmanager
    def take(self, wanted: Mapping[str, tuple[str, int]]) -> Iterator[dict[str, Held] | None]:
        """The wanted files, by name with sha256 and size, from one arrival that has them all; None when there is none.
        Waits for one that is on its way. Leave without an exception, and the arrival has served its purpose."""
        space = self._find(wanted)
        if space is None:
            with self._changed:
                self._counts["read"] += 1
            yield None
            return
        loaded = False
        try:
            yield {name: space.held(name, digest) for name, (digest, _) in wanted.items()}
            loaded = True
        finally:
            with self._changed:
                space.users -= 1
                self._counts["loaded" if loaded else "read"] += 1
                if loaded and not space.users:
                    self._known.append(space.digests)
                    self._release(space)
                self._changed.notify_all()

    def shown(self) -> dict[str, Any]:
        """Counts since the start, and what is in memory now."""
        with self._changed:
            waiting = [space for space in self._spaces if space.arrived]
            return {
                **self._counts,
                "coming": len(self._spaces) - len(waiting),
                "waiting": [sorted(digest[:12] for digest in space.digests) for space in waiting],
                "bytes": self._size(),
            }

    def _find(self, wanted: Mapping[str, tuple[str, int]]) -> Space | None:
        digests = {digest for digest, _ in wanted.values()}
        deadline = time.monotonic() + PATIENCE
        with self._changed:
            while True:
                found = [space for space in self._spaces if digests and digests <= space.digests]
                here = next((space for space in found if space.arrived), None)
                if here is not None:
                    here.users += 1
                    return here
                if not found or not self._changed.wait(deadline - time.monotonic()):
                    return None

    def _room(self, size: int) -> Tensor | None:
        """A buffer for `size` bytes: one that is free, else a new one, for which others make way."""
        self._crowded()
        fitting = [whole for whole in self._free if size <= whole.numel() <= ROOMY * size]
        if fitting:
            best = min(fitting, key=Tensor.numel)
            self._free = [whole for whole in self._free if whole is not best]
            return best
        while self._size() + size > self._limit:
            if self._free:
                self._free.pop(0)
            elif (idle := self._idle()) is not None:
                self._release(idle)
            else:
                return None
        return self._make(self.device, size)

    def _crowded(self) -> None:
        while len(self._spaces) >= KEPT and (idle := self._idle()) is not None:
            self._release(idle)

    def _idle(self) -> Space | None:
        return next((space for space in self._spaces if space.arrived and not space.users), None)

    def _release(self, space: Space) -> None:
        self._spaces.remove(space)
        self._free.append(space.whole)

    def _size(self) -> int:
        return sum(space.whole.numel() for space in self._spaces) + sum(whole.numel() for whole in self._free)

    def _refuse(self, why: str) -> str:
        self._counts["refused"] += 1
        return why
