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
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from reef.core import rpc
from reef.core.errors import MissingError, ReefError, StoreError, WireError
from reef.core.nouns import PartName
from reef.core.wire import Done, Look, Looked, Message, Ping, Pong, Wake
from reef.loop import asks, failures, tell
from reef.loop.binding import Binding, Tools, Work
from reef.loop.gain import Scales
from reef.loop.hook import Webhook
from reef.loop.recover import recover
from reef.loop.update import LONGEST_REST, activate, update_once
from reef.loop.watch import Vigil
from reef.recipe import Recipe

POLL = 0.25
"""Seconds between two looks at the event log of a scenario that nobody wakes."""
TIDY = 86400.0  # seconds between two looks for places of records that are gone
SLOW = 1.0
"""The same for what goes on beside learning."""
LAZY = 8
"""So many times longer after many looks that found nothing: nearly all there is to find wakes its scenario, and many
quiet scenarios should cost next to nothing."""

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
        webhook: Webhook | None = None,
    ) -> None:
        self._tools = tools
        self._bindings = bindings
        self._names = names or (lambda: {**tools.board.scenarios(), **tools.board.all()})
        self._poll = poll
        self._stop = asyncio.Event()
        self._seats: dict[str, _Seat] = {}
        self._unlisted = False  # whether that the scenarios cannot be listed was said
        self._hook = webhook
        self._sending = _Round("webhook", webhook.look, min(SLOW, 4 * poll)) if webhook is not None else None

    async def run(self, listener: socket.socket) -> None:
        """Learn, and answer Wake, Look and Ping on `listener`, until SIGTERM or `stop`.

        Work in progress is simply left: whatever is not durable yet is done again by the next learner.
        """
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):  # not in the main thread: a test
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.stop)
        server = await rpc.serve(listener, self.answer)
        if self._sending is not None:
            self._sending.sit()
        try:
            while not self._stop.is_set():
                self._discover()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), self._poll)
        finally:
            server.close()
            tasks = [task for seat in self._seats.values() for task in seat.leave()]
            tasks += self._sending.leave() if self._sending is not None else []
            await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        self._stop.set()

    def wake(self, scenario: str) -> None:
        """Look at this scenario now, and again if it was just being looked at."""
        if scenario not in self._seats:
            self._discover()
        if (seat := self._seats.get(scenario)) is not None:
            seat.call()

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
            return Looked(scenarios=self.look(message.scenario), webhook=self._hooked())
        if isinstance(message, Ping):
            return Pong(pid=os.getpid(), kind="learner", detail={"scenarios": len(self._seats)})
        raise WireError(f"a learner does not answer {type(message).__name__}")

    def _hooked(self) -> dict[str, Any] | None:
        if self._hook is None:
            return None
        return self._hook.shown() | {"error": self._sending.error if self._sending else None}

    def _discover(self) -> None:
        """A seat for each scenario there is; none for one that was archived."""
        try:
            names = set(self._names())
        except ReefError as error:
            if not self._unlisted:  # it is tried again many times a minute
                log.warning("the scenarios cannot be listed now: %s", error)
            self._unlisted = True
            return
        self._unlisted = False
        for name in names - self._seats.keys():
            seat = self._seats[name] = _Seat(self._tools, self._bindings, name, self._poll)
            seat.sit()
        for name in self._seats.keys() - names:
            self._seats.pop(name).leave()


class _Round:
    """Something that is done for a scenario again and again. When it fails it rests, longer each time, and `trouble`
    (which may block) is told what was said and how often in a row."""

    def __init__(
        self,
        name: str,
        turn: Callable[[], Awaitable[bool]],
        poll: float,
        trouble: Callable[[str, int], None] = lambda said, failures: None,
    ) -> None:
        self.name = name
        self._trouble = trouble
        self.called = asyncio.Event()
        self.error: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._turn, self._poll = turn, poll
        self._failures = 0
        self._quiet = 0  # looks in a row that nobody asked for and that found nothing

    def sit(self) -> None:
        self._task = asyncio.create_task(self._follow(), name=f"learner {self.name}")

    def leave(self) -> list[asyncio.Task[None]]:
        """Cancel what is going on; returns what to wait for."""
        if self._task is None:
            return []
        self._task.cancel()
        return [self._task]

    async def _follow(self) -> None:
        while True:
            woken = self.called.is_set()
            self.called.clear()
            try:
                moved = await self._turn()
                self._quiet = 0 if moved or woken else self._quiet + 1
                wait = 0.0 if moved else self._poll * min(LAZY, 1 + self._quiet // LAZY)
                self._failures, self.error = 0, None
            except Exception as error:
                self._failures += 1
                wait = min(LONGEST_REST, 0.25 * 2**self._failures)
                said, known = str(error) or type(error).__name__, isinstance(error, ReefError)
                if isinstance(error, MissingError) and self._failures == 1:
                    said = ""  # a scenario that is just being made has no release for a moment: the next look tells
                elif said != self.error:  # once, not at each try: it may last for days
                    level = logging.WARNING if known else logging.ERROR
                    log.log(level, "%s: %s", self.name, said, exc_info=not known)
                self.error = said or None
                with contextlib.suppress(StoreError):  # the store may be the trouble
                    await asyncio.to_thread(self._trouble, said, self._failures)
            if wait:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.called.wait(), wait)
            else:
                await asyncio.sleep(0)


class _Seat:
    """The learner's place for one scenario: it learns, and beside that, never waiting for it, watches and measures."""

    def __init__(self, tools: Tools, bindings: Callable[[str], Binding], name: str, poll: float) -> None:
        self._tools = tools
        self._bindings = bindings
        self._name = name
        self._works: dict[PartName, Work] = {}
        self._recipes: dict[PartName, Recipe] = {}
        self._binding: Binding | None = None  # as it last could be had
        self._vigil: Vigil | None = None
        self._tidied = -TIDY
        self._scales = Scales(tools)
        slow = min(SLOW, 4 * poll)
        self._learning = _Round(name, self._learn, poll, self._told("learner"))
        self._watching = _Round(f"{name}: the watch", self._watch, slow, self._told("watch"))
        self._measuring = _Round(f"{name}: measuring again", self._measure, slow)
        self._joining = _Round(f"{name}: sessions", self._join, slow)
        self._rounds = (self._learning, self._watching, self._measuring, self._joining)

    def _told(self, what: str) -> Callable[[str, int], None]:
        return lambda said, failures: tell.trouble(self._tools, self._name, what, said, failures)

    def sit(self) -> None:
        for one in self._rounds:
            one.sit()

    def call(self) -> None:
        for one in self._rounds:
            one.called.set()

    def leave(self) -> list[asyncio.Task[None]]:
        """Cancel what is going on; returns what to wait for."""
        searches = [task for work in self._works.values() for task in work.leave()]
        return searches + [task for one in self._rounds for task in one.leave()]

    async def _learn(self) -> bool:
        binding = self._binding = asks.whole(self._tools, self._bindings(self._name))
        if not binding.recipes:
            await activate(self._tools, binding)
            return False
        for part in binding.recipes:
            if part not in self._works or self._recipes.get(part) != binding.recipes[part]:
                if (old := self._works.get(part)) is not None:
                    old.leave()
                await recover(self._tools, self._name, part)
                self._works[part] = Work.open(self._tools, binding, part)
                self._recipes[part] = binding.recipes[part]
        return await update_once(self._tools, binding, self._works)

    async def _watch(self) -> bool:
        if self._binding is None:
            return False
        bound = self._binding
        if self._vigil is None or self._vigil.rule != bound.watching or self._vigil.past is not bound.past:
            self._vigil = Vigil(self._tools, self._name, bound.watching, bound.past)
        more = await failures.asked(self._tools, self._name)
        return await self._vigil.look() or more

    async def _measure(self) -> bool:
        return self._binding is not None and await self._scales.look(self._binding)

    async def _join(self) -> bool:
        """Sessions are joined for whoever looks at them, also where nothing learns from them."""
        if (sessions := self._tools.sessions) is not None:
            await sessions.read(self._name, self._tools.store)
            if time.monotonic() >= self._tidied + TIDY:  # records were removed by age or on request
                await sessions.tidy(self._name, self._tools.store)
                self._tidied = time.monotonic()
        return False

    def shown(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"parts": {part: work.shown() for part, work in self._works.items()}}
        if self._vigil is not None:
            shown["watch"] = self._vigil.shown()
            if self._watching.error is not None:
                shown["watch"]["error"] = self._watching.error
        joining = f"sessions: {self._joining.error}" if self._joining.error is not None else None
        if (error := self._learning.error or joining) is not None:
            shown["error"] = error
        return shown
