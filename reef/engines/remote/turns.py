"""Whose weights a server holds, among all who ask it: gateways and the learner, each a process of its own.

Knows: locks of files, who waits for which set of weights and since when. Does not know: HTTP, or what weights are.

- A set is used by any number of processes, and changed by one while nobody uses any: an answer comes from exactly the
  weights that were asked for, from its first token to its last.
- Turns are fair: once others wait, a set that had its turn takes no new users; who waited longest comes next.
- The locks are the kernel's (flock): of a process that dies nothing stays. What is written down are only hints of when
  a turn began; which weights a server holds, the server is asked (`holds`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from reef.core.errors import BusyError
from reef.engines.remote import BASE
from reef.engines.remote.staging import POLL, seized

Holds = Callable[[bool], Awaitable[str]]
"""Asks for the set that a server holds; True: anew, however lately it was asked."""
Change = Callable[[], Awaitable[None]]
_UNKNOWN = "?"  # no set's name: something went wrong on the way to one


@dataclass(slots=True)
class _Wait:
    """A note that this process waits for a set; locked while it does."""

    path: Path
    descriptor: int
    count: int = 0


class Turns:
    """One server's, in a folder that all processes share. Seconds: a set keeps its `turn` at least that long once
    others wait; whoever waits longer than `wait` is told that the server is busy."""

    def __init__(self, folder: Path, *, turn: float, wait: float, what: str) -> None:
        self._folder, self._waits = folder, folder / "waits"
        self._turn, self._wait, self._what = turn, wait, what
        self._users = 0
        self._descriptor: int | None = None
        self._mine: dict[str, _Wait] = {}
        self._changing: asyncio.Task[None] | None = None
        self._count = itertools.count()

    @contextlib.asynccontextmanager
    async def use(self, key: str, holds: Holds, change: Change) -> AsyncGenerator[None]:
        """In it the server holds the set `key`. `change` gives it to the server, and is called by one task of one
        process. BusyError; and whatever `change` and `holds` raise."""
        await self._enter(key, holds, change)
        try:
            yield
        finally:
            self._leave()

    def wanted(self) -> set[str]:
        """The sets that somebody waits for."""
        return {key for _, key in self._waiting()}

    @property
    def idle(self) -> bool:
        """Whether this process has nothing in work there."""
        return self._users == 0

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        for key in [*self._mine]:
            self._mine[key].count = 1
            self._done(key)

    async def _enter(self, key: str, holds: Holds, change: Change) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._wait
        waits = given = late = False
        try:
            while True:
                # Whoever a set was put there for gets in, however short its turn.
                if self.last() == key and (given or self._open(key)) and await self._join(key, holds):
                    return
                if not waits:
                    waits = True
                    self._await(key)
                given = self._next() == key and self._over() and await self._take(key, holds, change, end)
                if given and not late:
                    late = loop.time() > end
                    continue
                if loop.time() > end:
                    raise BusyError(
                        f"{self._what} is at work with other weights, and did not come to these within {self._wait:g} "
                        "s: one server answers with one set of full weights at a time. Try again; or give the engine "
                        "another server (engines.urls), or train a LoRA, of which a server answers with many"
                    )
                await asyncio.sleep(POLL)
        finally:
            if waits:
                self._done(key)

    async def _join(self, key: str, holds: Holds) -> bool:
        """Use the server, if it holds the set."""
        if not self._share():
            return False
        try:
            if await holds(False) == key:
                return True
        except BaseException:
            self._leave()
            raise
        self._leave()
        return False

    async def _take(self, key: str, holds: Holds, change: Change, end: float) -> bool:
        """Change the set, if nobody uses the server; whether it was this process's to do. Another's change is waited
        for until `end`."""
        if self._changing is not None and not self._changing.done():
            await asyncio.wait([self._changing], timeout=max(0.0, end - asyncio.get_running_loop().time()))
            return self._changing.done()
        if (descriptor := self._exclusive()) is None:
            return False
        self._changing = asyncio.create_task(self._change(key, holds, change, descriptor))
        self._changing.add_done_callback(lambda task: task.cancelled() or task.exception())
        # Shielded: a caller that goes away must not leave a server half changed.
        await asyncio.shield(self._changing)
        return True

    async def _change(self, key: str, holds: Holds, change: Change, descriptor: int) -> None:
        try:
            if await holds(True) != key or self.last() != key:  # also what is there, and failed its proof
                self._note(_UNKNOWN)  # in case this process dies on the way
                await change()
            self._note(key)
        finally:
            os.close(descriptor)

    # --- who waits ----------------------------------------------------------------------------------------------------

    def _open(self, key: str) -> bool:
        """Whether the set takes new users: nobody waits for another, or its turn is not over."""
        others = [each for _, each in self._waiting() if each != key]
        return not others or not self._over() or self._next() == key

    def _next(self) -> str | None:
        """The set that somebody waited for longest, other than the one whose turn it was last."""
        waiting = sorted(self._waiting())
        last = self.last()
        return next((key for _, key in waiting if key != last), waiting[0][1] if waiting else None)

    def _waiting(self) -> list[tuple[int, str]]:
        """Since when, and which sets, living processes wait for. Notes of dead ones go."""
        found = []
        try:
            names = os.listdir(self._waits)
        except FileNotFoundError:
            return []
        mine = {wait.path.name for wait in self._mine.values()}
        for name in names:
            since, _, rest = name.partition("-")
            key = rest.partition("-")[0]
            if name in mine or self._lives(self._waits / name):
                found.append((int(since), BASE if key == "base" else key))
        return found

    def _lives(self, path: Path) -> bool:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            if not seized(descriptor, fcntl.LOCK_EX):
                return True
            path.unlink(missing_ok=True)
            return False
        finally:
            os.close(descriptor)

    def _await(self, key: str) -> None:
        wait = self._mine.get(key)
        if wait is None:
            self._waits.mkdir(parents=True, exist_ok=True)
            name = f"{time.time_ns()}-{key or 'base'}-{os.getpid()}-{next(self._count)}"
            # Made under another name, so that nobody finds it before it is locked.
            hidden = self._folder / f".{name}"
            descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            hidden.rename(self._waits / name)
            wait = self._mine[key] = _Wait(self._waits / name, descriptor)
        wait.count += 1

    def _done(self, key: str) -> None:
        wait = self._mine.get(key)
        if wait is None:
            return
        wait.count -= 1
        if wait.count <= 0:
            del self._mine[key]
            wait.path.unlink(missing_ok=True)
            os.close(wait.descriptor)

    # --- whose turn it is ---------------------------------------------------------------------------------------------

    def last(self) -> str:
        """The set that was put there last, as far as it is written down; `BASE` when none was."""
        try:
            return (self._folder / "turn").read_text()
        except FileNotFoundError:
            return BASE

    def _over(self) -> bool:
        try:
            age = time.time() - (self._folder / "turn").stat().st_mtime
        except FileNotFoundError:
            return True
        return not 0 <= age < self._turn  # below zero: the clock was put back

    def _note(self, key: str) -> None:
        temp = self._folder / f".turn-{os.getpid()}"
        temp.write_text(key)
        temp.rename(self._folder / "turn")

    # --- locks --------------------------------------------------------------------------------------------------------

    def _share(self) -> bool:
        """One more user; the first of a process takes its share of the lock."""
        if self._users == 0:
            if self._descriptor is None:
                self._descriptor = self._file()
            if not seized(self._descriptor, fcntl.LOCK_SH):
                return False
        self._users += 1
        return True

    def _leave(self) -> None:
        self._users -= 1
        if self._users == 0 and self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _exclusive(self) -> int | None:
        """The lock for one alone, as a descriptor to close; None while anybody uses the server."""
        if self._users:
            return None
        descriptor = self._file()
        if seized(descriptor, fcntl.LOCK_EX):
            return descriptor
        os.close(descriptor)
        return None

    def _file(self) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        return os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
