"""What a scenario serves: make its first release, keep the board at the chain's head, roll back, follow flips.

Knows: the order of things (publish, then flip) and how it is repaired when a process dies in between.
Does not know: whether an engine holds the release already; a caller that wants no cold first answer loads it before.

- `ensure`, `align` and `rollback` block (git, SQLite): call them from a thread when in an event loop.
- After any of them returns, the board named the chain's head at some moment during the call; of several processes that
  flip at once, the last to look again settles it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

from reef.core.errors import InputError, MissingError, StaleHead, StoreError
from reef.core.failpoint import failpoint
from reef.core.nouns import Consumed, PartName, Release, Serving
from reef.records.board import Board
from reef.releases import Draft, NewPart, ReleaseChain

TRIES = 16
"""Heads that a rollback without `expected` tries to follow; each miss means that somebody else's release went in."""

LONGEST_REASON = 1000
"""Characters."""

PERIOD = 0.05
"""Seconds between two looks of a Watch at the board."""

log = logging.getLogger("reef.scenario")


def ensure(name: str, chain: ReleaseChain, board: Board, base: NewPart, recipe: str | None) -> Serving:
    """A scenario that exists: publishes seq 0 with the base weights when there is no chain, then aligns the board."""
    if chain.head(name) is None:
        failpoint("scenario.before_create")
        draft = Draft("create", {"weights": base}, recipe=recipe, actor="reef", reason="the base model")
        with contextlib.suppress(StaleHead):  # another process created it first, from other settings: that one counts
            chain.publish(name, draft, None)
        failpoint("scenario.created")
    return align(name, chain, board)


def align(name: str, chain: ReleaseChain, board: Board) -> Serving:
    """Flip the board to the chain's head. MissingError when the scenario has no chain."""
    head = chain.head(name)
    while True:
        if head is None:
            raise MissingError(f"no scenario {name}", param="scenario")
        serving = board.get(name)
        if serving is None or serving.release_id != head.id:
            failpoint("scenario.before_flip")
            serving = board.flip(name, head.id)
            failpoint("scenario.after_flip")
        now = chain.head(name)  # it may have moved while we flipped, and the mover may have flipped before us
        if now is not None and now.id == head.id:
            return serving
        head = now


def rollback(
    name: str,
    release_id: str,
    chain: ReleaseChain,
    board: Board,
    *,
    actor: str,
    reason: str,
    expected: str | None = None,
) -> Release:
    """Make the parts of an earlier release the head again, and serve it. Returns the new head.

    `expected` is the head the caller saw; StaleHead when it has moved. None: whatever it is at that moment. Rolling
    back to what the head already is, or already restored, changes nothing, so a retry after a lost reply is safe. The
    events that were consumed stay consumed: a rollback never makes a unit train twice. MissingError for an unknown
    release or one of another scenario; InputError for a candidate, and for a reason that is longer than LONGEST_REASON
    or not printable in one line.
    """
    if len(reason) > LONGEST_REASON:
        raise InputError(f"reason has {len(reason)} characters; the limit is {LONGEST_REASON}", param="reason")
    if not reason.isprintable():  # it is shown in terminals, which would act on control characters
        raise InputError("reason must be one line of printable characters", param="reason")
    for left in reversed(range(TRIES)):
        try:
            head = _roll(name, release_id, chain, actor, reason, expected)
            break
        except StaleHead:
            if expected is not None or not left:
                raise
    align(name, chain, board)
    return head


def _roll(name: str, release_id: str, chain: ReleaseChain, actor: str, reason: str, expected: str | None) -> Release:
    """The chain's side of a rollback: the head that has the wanted parts."""
    head = chain.head(name)
    if head is None:
        raise MissingError(f"no scenario {name}", param="scenario")
    target = chain.get(release_id)
    if target.scenario != name:
        raise MissingError(f"{name} has no release {release_id}", param="release_id")
    if target.operation == "candidate":
        raise InputError(f"{release_id} is a candidate, which was never served: promote it instead", param="release_id")
    restored = head.id == target.id or (head.operation == "rollback" and head.base == target.id)
    if not (restored and expected in (None, head.id, head.parent)):
        draft = Draft(
            "rollback",
            {},
            base=target.id,
            step=target.step,
            recipe=target.recipe,
            consumed=_consumed(head),
            actor=actor,
            reason=reason,
        )
        head = chain.publish(name, draft, expected or head.id)
        failpoint("scenario.rolled_back")
    return head


def _consumed(head: Release) -> Mapping[PartName, Consumed]:
    """The head's cursors, without units: what a rollback's line has learnt since its base is nothing."""
    return {part: Consumed(consumed.cursor) for part, consumed in head.consumed.items()}


class Watch:
    """What every scenario serves, as a snapshot in memory that follows the board within PERIOD.

    `get` is a dictionary look-up, for the hot path. A board that cannot be read for a while leaves the last snapshot
    in place: serving goes on.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._snapshot: dict[str, Serving] = {}
        self._version: int | None = None
        self._task: asyncio.Task[None] | None = None
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call it at every refresh: at the start, and after any change of the board. It may block as briefly as the
        board's own calls. One that raises is called again at the next look."""
        self._listeners.append(listener)

    def get(self, name: str) -> Serving | None:
        return self._snapshot.get(name)

    def all(self) -> Mapping[str, Serving]:
        return self._snapshot

    async def start(self) -> None:
        """Read the board once, then follow it. StoreError when it cannot be read at all."""
        self.refresh()
        self._task = asyncio.create_task(self._follow(), name="reef-watch")

    def refresh(self) -> None:
        """Read the board now; a process that has just flipped it need not wait for the next look."""
        version = self._board.version()
        self._snapshot = self._board.all()
        for listener in self._listeners:
            listener()
        self._version = version  # read before the rows: a flip in between is seen at the next look, never missed

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _follow(self) -> None:
        broken = False
        while True:
            await asyncio.sleep(PERIOD)
            try:
                if self._board.version() != self._version:
                    self.refresh()
                broken = False
            except StoreError as error:
                if not broken:
                    log.warning("the board cannot be read; serving goes on with what was known: %s", error)
                broken = True
