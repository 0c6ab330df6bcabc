"""What a scenario serves: make its first release, keep the board at the chain's head, roll back, promote, pin, archive.

Knows: the order of things (verify, publish, flip, tell the journal) and how it is repaired when a process dies in
between.
Does not know: whether an engine holds the release already; a caller that wants no cold first answer loads it before.

- All but `Watch` block (git, SQLite): call them from a thread when in an event loop. None needs the learner.
- After a call that moves the head returns, the board named the chain's head at some moment during the call; of several
  processes that flip at once, the last to look again settles it.
- Nothing moves before every file of what would be served was read and matched its digest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from reef.core.errors import ConflictError, DigestError, InputError, MissingError, ReefError, StaleHead, StoreError
from reef.core.failpoint import failpoint
from reef.core.nouns import ActKind, Consumed, Evaluation, Operation, PartName, Release, Serving
from reef.records.board import Board
from reef.records.journal import Journal
from reef.releases import Draft, NewPart, ReleaseChain

TRIES = 16
"""Heads that a rollback or promotion without `expected` tries to follow; each miss means that somebody else's release
went in."""

LONGEST_REASON = 1000
"""Characters."""

PAGE = 100
"""Releases that are read at once where all are looked through."""

PERIOD = 0.05
"""Seconds between two looks of a Watch at the board."""

TOLD: Mapping[Operation, ActKind] = {
    "create": "create",
    "publish": "release",
    "promote": "promote",
    "rollback": "rollback",
}
"""How the journal calls what made a release; such an act's `ref` is the release."""

log = logging.getLogger("reef.scenario")


def ensure(name: str, chain: ReleaseChain, board: Board, base: NewPart, recipe: str | None) -> Serving:
    """A scenario that exists: publishes seq 0 with the base weights when there is no chain, then aligns the board."""
    if chain.head(name) is None:
        failpoint("scenario.before_create")
        draft = Draft("create", {"weights": base}, recipe=recipe, actor="reef", reason="the base model")
        with contextlib.suppress(StaleHead):  # another process created it first, from other settings: that one counts
            tell(chain.publish(name, draft, None), board)
        failpoint("scenario.created")
    return resume(name, chain, board)


def resume(name: str, chain: ReleaseChain, board: Board) -> Serving:
    """`align`, unless the head's files are not whole and what is served has all of its own: that goes on, and the
    learner, or another start, flips when the files are back. For a start, where nobody has read them yet."""
    serving = board.get(name)
    if serving is not None and (why := broken(name, serving.release_id, chain)) is not None:
        log.error("%s goes on with release %s: %s", name, serving.release_id[:12], why)
        return serving
    return align(name, chain, board)


def broken(name: str, served: str, chain: ReleaseChain) -> str | None:
    """Why the head is not served and this older release is: files of the head are not there as they were recorded. May
    take long: files are read, and asked of the remote."""
    head = chain.head(name)
    if head is None or served == head.id:
        return None
    try:
        whole(chain, head)
    except ReefError as error:  # also that the remote, which would have them, cannot be asked
        log.warning("%s", error.message)
    else:
        return None
    try:
        whole(chain, chain.get(served))
    except ReefError:
        return None  # neither can be used: the head is at least what was decided
    return (
        f"files of release {head.seq} ({head.id[:12]}), the newest, are missing or damaged; it is served as soon as "
        "they are back. `reef doctor` names them: fetch them from the remote, restore them from a backup, or roll back"
    )


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


def tell(release: Release, board: Board) -> bool:
    """Write into the journal how a release came to be, once. False: it is there already."""
    detail = {"seq": release.seq, "base": release.base, "parent": release.parent, "step": release.step}
    if release.operation in ("publish", "promote") and release.evaluation is not None:
        detail["candidate"] = release.evaluation.candidate_id
    kind = TOLD[release.operation]
    said = Journal(board).tell(
        release.scenario, kind, release.id, actor=release.actor, reason=release.reason, detail=detail
    )
    return said is not None


# --- what a person does -----------------------------------------------------------------------------------------------


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
    release or one of another scenario, PrunedError for one without its large files; ConflictError when the scenario is
    pinned elsewhere; InputError for a candidate, and for a reason that is longer than LONGEST_REASON or not printable
    in one line.
    """
    check(reason)
    head = _follow(lambda: _roll(name, release_id, chain, board, actor, reason, expected), expected)
    return _serve(name, head, chain, board)


def promote(
    name: str,
    candidate_id: str,
    chain: ReleaseChain,
    board: Board,
    *,
    actor: str,
    reason: str,
    expected: str | None = None,
    force: bool = False,
    evaluation: Evaluation | None = None,
) -> Release:
    """Put the part that a candidate changes on the present head, and serve it. Returns the new release.

    The head's other parts stay. The release carries the candidate's units and cursor, so that nothing trains twice,
    and `evaluation` (what the gate found; else one that says a person decided). A candidate that the head's part came
    from already is answered with that release, so a retry after a lost reply is safe. ConflictError when the head's
    part is no longer the one the candidate was made from and measured against (`force` promotes it all the same), and
    when the scenario is pinned. `expected` and the other errors are those of `rollback`.
    """
    check(reason)
    candidate = _own(name, candidate_id, chain)
    if candidate.operation != "candidate":
        raise InputError(f"{candidate_id} is a release, not a candidate: roll back to it instead", param="candidate_id")
    found = evaluation or Evaluation("person", "accept", reason or f"promoted by {actor}", candidate.id, "")
    said = _both(reason, candidate.reason)
    made = replace(candidate, actor=actor, reason=said, evaluation=replace(found, candidate_id=candidate.id))
    head = _follow(lambda: _lift(made, chain, board, expected, force), expected)
    return _serve(name, head, chain, board)


def pin(name: str, release_id: str, chain: ReleaseChain, board: Board, *, actor: str, reason: str) -> Release:
    """Keep a scenario at a release: it is rolled back to that release where it serves another, and what the gate
    accepts from now on is held. Returns the head. A pin that is there already is replaced. Errors as for `rollback`."""
    check(reason)
    wanted = target(name, release_id, chain)
    whole(chain, wanted)
    journal = Journal(board)
    there = journal.pinned(name)
    if there is None or there.release_id != wanted.id:
        journal.pin(name, wanted.id, actor=actor, reason=reason)
    failpoint("scenario.pinned")  # before the rollback: from here on nobody publishes, so the rollback stays
    return _serve(name, keep_pin(name, chain, board) or _head(name, chain), chain, board)


def keep_pin(name: str, chain: ReleaseChain, board: Board) -> Release | None:
    """Bring a pinned scenario back to its pin: a publish may have been on its way when the pin came, or a process that
    pinned may have died. Returns the head; None when there is no pin. Cheap where there is nothing to do."""
    if (held := Journal(board).pinned(name)) is None:
        return None
    head = _head(name, chain)
    if _restored(head, held.release_id):
        return head
    reason = f"pinned: {held.reason}"[:LONGEST_REASON] if held.reason else "pinned"
    head = _follow(lambda: _roll(name, held.release_id, chain, board, held.actor, reason, None), None)
    return _serve(name, head, chain, board)


def unpin(name: str, board: Board, *, actor: str, reason: str) -> bool:
    """Let a scenario go on. False: it was not pinned."""
    check(reason)
    return Journal(board).unpin(name, actor=actor, reason=reason)


def archive(name: str, chain: ReleaseChain, board: Board, *, actor: str, reason: str) -> None:
    """Hide a scenario and stop its learning; its chain, records and settings stay. MissingError when there is none."""
    check(reason)
    head = chain.head(name)
    board.archive(name)
    failpoint("scenario.archived")
    Journal(board).tell(name, "archive", head.id if head else "", actor=actor, reason=reason, once=False)


def restore(name: str, chain: ReleaseChain, board: Board, *, actor: str, reason: str) -> Serving:
    """Bring an archived scenario back as it was, at its chain's head. MissingError when none of that name is."""
    check(reason)
    head = _head(name, chain)
    board.restore(name)
    failpoint("scenario.restored")
    Journal(board).tell(name, "restore", head.id, actor=actor, reason=reason, once=False)
    return resume(name, chain, board)


# --- inside -----------------------------------------------------------------------------------------------------------


def whole(chain: ReleaseChain, release: Release) -> None:
    """Read and verify every file of a release: DigestError or PrunedError names what is not there as it was."""
    for part in release.parts:
        try:
            chain.files(release.id, part)
        except DigestError as error:
            advice = "nothing moved; `reef doctor` says how to mend it, `reef releases` which others there are"
            raise DigestError(f"{error.message.partition('; ')[0]}; {advice}") from None


def _follow(attempt: Callable[[], Release], expected: str | None) -> Release:
    """Try again on the new head when it moved, unless the caller said which head it must be."""
    for left in reversed(range(TRIES)):
        try:
            return attempt()
        except StaleHead:
            if expected is not None or not left:
                raise
    raise AssertionError("unreachable")


def _serve(name: str, head: Release, chain: ReleaseChain, board: Board) -> Release:
    """Serve what was made, and tell of it; both are repaired by a retry."""
    align(name, chain, board)
    failpoint("scenario.before_tell")
    tell(head, board)
    return head


def _roll(
    name: str, release_id: str, chain: ReleaseChain, board: Board, actor: str, reason: str, expected: str | None
) -> Release:
    """The chain's side of a rollback: the head that has the wanted parts."""
    head = _head(name, chain)
    wanted = target(name, release_id, chain)
    if _restored(head, wanted.id) and expected in (None, head.id, head.parent):
        return head
    _unpinned(name, board, besides=wanted.id)
    whole(chain, wanted)
    draft = Draft(
        "rollback",
        {},
        base=wanted.id,
        step=wanted.step,
        recipe=wanted.recipe,
        consumed=_consumed(head),
        actor=actor,
        reason=reason,
    )
    made = chain.publish(name, draft, expected or head.id)
    failpoint("scenario.rolled_back")
    return made


def _restored(head: Release, target: str) -> bool:
    """Whether the head is this release, or a rollback to it."""
    return head.id == target or (head.operation == "rollback" and head.base == target)


def _lift(made: Release, chain: ReleaseChain, board: Board, expected: str | None, force: bool) -> Release:
    """The chain's side of a promotion. `made` is the candidate with the evaluation, actor and reason to publish."""
    name = made.scenario
    head, base = _head(name, chain), chain.get(made.base or "")
    part = changed(made, base)
    if (done := _lifted(made, head, part, chain)) is not None:
        return done
    _unpinned(name, board)
    stands = head.parts.get(part) == base.parts.get(part) and (part != "weights" or head.step == base.step)
    if not (stands or force):
        if (once := _promoted(made, head, chain)) is not None:
            raise ConflictError(
                f"candidate {made.id[:12]} is release {once.seq} ({once.id[:12]}) already, and {name} has other {part} "
                f"since; to serve it again: reef rollback {once.seq} -s {name}",
                param="candidate_id",
            )
        raise ConflictError(
            f"candidate {made.id[:12]} was made from the {part} of release {base.id[:12]} and measured against it; "
            f"{name} has other {part} since (its head is {head.id[:12]}). Promote it with --force, or wait for a new "
            "one",
            param="candidate_id",
        )
    whole(chain, made)
    # The other parts are the head's. The base is too, but for weights that were forced: theirs is where they come from.
    parts, onto = {part: _again(made, part, chain)}, head
    if not stands and part == "weights" and base.parts.keys() <= head.parts.keys():
        parts |= {other: _again(head, other, chain) for other in head.parts if other != part}
        onto = base
    own = made.consumed.get(part, Consumed())
    cursor = max(own.cursor, head.consumed.get(part, Consumed()).cursor)
    assert made.evaluation is not None
    draft = Draft(
        "promote",
        parts,
        base=onto.id,
        step=made.step if part == "weights" else head.step,
        line=made.line,
        evaluation=replace(made.evaluation, incumbent_id=made.evaluation.incumbent_id or head.id),
        recipe=made.recipe,
        consumed={**_consumed(head), part: Consumed(cursor, own.units)},
        actor=made.actor,
        reason=made.reason,
    )
    release = chain.publish(name, draft, expected or head.id)
    failpoint("scenario.promoted")
    return release


def changed(candidate: Release, base: Release) -> PartName:
    """The one part that a candidate changes."""
    other = [part for part, held in candidate.parts.items() if held != base.parts.get(part)]
    trained = [part for part, consumed in candidate.consumed.items() if consumed.units]
    return next(iter(other or trained), "weights")


def _lifted(candidate: Release, head: Release, part: PartName, chain: ReleaseChain) -> Release | None:
    """The promotion of this candidate that the head's part still comes from."""
    node: Release | None = head
    while node is not None and node.parts.get(part) == candidate.parts.get(part):
        if node.operation == "promote" and node.evaluation and node.evaluation.candidate_id == candidate.id:
            return node
        node = chain.get(node.parent) if node.operation == "publish" and node.parent else None
    return None


def _promoted(candidate: Release, head: Release, chain: ReleaseChain) -> Release | None:
    """The newest release that this candidate was made into, however long ago its part was replaced."""
    page = [head]
    while page:
        for node in page:
            if node.operation == "promote" and node.evaluation and node.evaluation.candidate_id == candidate.id:
                return node
        page = chain.history(head.scenario, PAGE, page[-1].id)
    return None


def _both(reason: str, proposed: str) -> str:
    """Why a person promoted a candidate, and why it was proposed: neither is lost."""
    if not reason or not proposed or proposed in reason:
        return reason or proposed
    return f"{reason} (proposed: {proposed})"


def _again(release: Release, part: PartName, chain: ReleaseChain) -> NewPart:
    """A part of one release, to be put into another; its large files are there already."""
    held = release.parts[part]
    return NewPart(held.kind, dict(chain.files(release.id, part)), held.meta)


def check(reason: str) -> None:
    """InputError for a reason that no decision may have."""
    if len(reason) > LONGEST_REASON:
        raise InputError(f"reason has {len(reason)} characters; the limit is {LONGEST_REASON}", param="reason")
    if not reason.isprintable():  # it is shown in terminals, which would act on control characters
        raise InputError("reason must be one line of printable characters", param="reason")


def _unpinned(name: str, board: Board, besides: str | None = None) -> None:
    held = Journal(board).pinned(name)
    if held is not None and held.release_id != besides:
        why = f" ({held.reason})" if held.reason else ""
        raise ConflictError(
            f"{held.actor} pinned {name} to release {held.release_id[:12]}{why}; take the pin off first: "
            f"reef pin --off -s {name}"
        )


def _head(name: str, chain: ReleaseChain) -> Release:
    head = chain.head(name)
    if head is None:
        raise MissingError(f"no scenario {name}", param="scenario")
    return head


def _own(name: str, release_id: str, chain: ReleaseChain) -> Release:
    _head(name, chain)
    return chain.get(release_id, [name])


def target(name: str, release_id: str, chain: ReleaseChain) -> Release:
    """A release that can be served."""
    found = _own(name, release_id, chain)
    if found.operation == "candidate":
        raise InputError(f"{release_id} is a candidate, which was never served: promote it instead", param="release_id")
    return found


def _consumed(head: Release) -> Mapping[PartName, Consumed]:
    """The head's cursors, without units: what a new line has learnt since its base is nothing."""
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
