"""The learner process: a task for each scenario, woken by messages, by the board, and by new events.

Knows: which scenarios there are, when to look again, and what to say about them.
Does not know: what an update does. A scenario that fails rests; no other scenario notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterable
from typing import Any

from reef.core import rpc
from reef.core.errors import ReefError, WireError
from reef.core.nouns import PartName
from reef.core.wire import Done, Look, Looked, Message, Ping, Pong, Wake
from reef.loop.binding import Binding, Tools, Work
from reef.loop.recover import recover
from reef.loop.update import LONGEST_REST, activate, update_once
from reef.recipe import Recipe

POLL = 0.25
"""Seconds between two looks at the event log of a scenario that nobody wakes."""

log = logging.getLogger(__name__)


class Learner:
    """`bindings` says how a scenario learns; `names` which scenarios there are (default: those on the board)."""

    def __init__(
        self,
        tools: Tools,
        bindings: Callable[[str], Binding],
        *,
        names: Callable[[], Iterable[str]] | None = None,
        poll: float = POLL,
    ) -> None:
        self._tools = tools
        self._bindings = bindings
        self._names = names or (lambda: {**tools.board.scenarios(), **tools.board.all()})
        self._poll = poll
        self._stop = asyncio.Event()
        self._seats: dict[str, _Seat] = {}

    async def run(self, listener: socket.socket) -> None:
        """Learn, and answer Wake, Look and Ping on `listener`, until SIGTERM or `stop`.

        Work in progress is simply left: whatever is not durable yet is done again by the next learner.
        """
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):  # not in the main thread: a test
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.stop)
        server = await rpc.serve(listener, self.answer)
        try:
            while not self._stop.is_set():
                self._discover()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), self._poll)
        finally:
            server.close()
            tasks = [seat.task for seat in self._seats.values() if seat.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        self._stop.set()

    def wake(self, scenario: str) -> None:
        """Look at this scenario now, and again if it was just being looked at."""
        if scenario not in self._seats:
            self._discover()
        if (seat := self._seats.get(scenario)) is not None:
            seat.called.set()

    def look(self, scenario: str | None = None) -> dict[str, dict[str, Any]]:
        """What the learner of each scenario (or of one) is doing."""
        return {name: seat.shown() for name, seat in self._seats.items() if scenario in (None, name)}

    def answer(self, message: Message) -> Any:
        return self._answer(message)

    async def _answer(self, message: Message) -> Message:
        if isinstance(message, Wake):
            self.wake(message.scenario)
            return Done()
        if isinstance(message, Look):
            return Looked(scenarios=self.look(message.scenario))
        if isinstance(message, Ping):
            return Pong(pid=os.getpid(), kind="learner", detail={"scenarios": len(self._seats)})
        raise WireError(f"a learner does not answer {type(message).__name__}")

    def _discover(self) -> None:
        """A seat for each scenario there is; none for one that was archived."""
        try:
            names = set(self._names())
        except ReefError as error:
            log.warning("the scenarios cannot be listed now: %s", error)
            return
        for name in names - self._seats.keys():
            seat = self._seats[name] = _Seat(self._tools, self._bindings, name, self._poll)
            seat.task = asyncio.create_task(seat.follow(), name=f"learner {name}")
        for name in self._seats.keys() - names:
            task = self._seats.pop(name).task
            if task is not None:
                task.cancel()


class _Seat:
    """The learner's place for one scenario."""

    def __init__(self, tools: Tools, bindings: Callable[[str], Binding], name: str, poll: float) -> None:
        self.called = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._tools = tools
        self._bindings = bindings
        self._name = name
        self._poll = poll
        self._works: dict[PartName, Work] = {}
        self._recipes: dict[PartName, Recipe] = {}
        self._error: str | None = None
        self._failures = 0

    async def follow(self) -> None:
        while True:
            self.called.clear()
            wait = self._poll
            try:
                if await self._turn():
                    wait = 0.0
                self._failures, self._error = 0, None
            except Exception as error:
                self._failures += 1
                wait = min(LONGEST_REST, 0.25 * 2**self._failures)
                said, known = str(error) or type(error).__name__, isinstance(error, ReefError)
                if said != self._error:  # once, not at each try: it may last for days
                    level = logging.WARNING if known else logging.ERROR
                    log.log(level, "%s: %s", self._name, said, exc_info=not known)
                self._error = said
            if wait:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.called.wait(), wait)
            else:
                await asyncio.sleep(0)

    async def _turn(self) -> bool:
        binding = self._bindings(self._name)
        if not binding.recipes:
            await activate(self._tools, binding)
            return False
        for part in binding.recipes:
            if part not in self._works or self._recipes.get(part) != binding.recipes[part]:
                await recover(self._tools, self._name, part)
                self._works[part] = Work.open(self._tools, binding, part)
                self._recipes[part] = binding.recipes[part]
        return await update_once(self._tools, binding, self._works)

    def shown(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"parts": {part: work.shown() for part, work in self._works.items()}}
        if self._error is not None:
            shown["error"] = self._error
        return shown
