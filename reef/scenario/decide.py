"""A person's decision on a candidate: promote it, or turn it down. One excludes the other, in every process.

Knows: what is looked at before either (the audit, the chain), and that neither needs the learner.
Does not know: how a promotion is made (`serving`), or how an audit row is written.

Both may be asked again after a lost reply: the same decision is answered as it was, another one is a ConflictError.
"""

from __future__ import annotations

from reef.core.errors import ConflictError, InputError, MissingError, StaleHead, StoreError
from reef.core.nouns import Release
from reef.records.board import Board
from reef.records.journal import Journal
from reef.releases import ReleaseChain
from reef.scenario import serving
from reef.scenario.audit import Audit, Ruling
from reef.scenario.learnt import Family
from reef.scenario.why import became_of


def promote(
    name: str,
    candidate_id: str,
    chain: ReleaseChain,
    board: Board,
    audit: Audit,
    *,
    actor: str,
    reason: str,
    expected: str | None = None,
    force: bool = False,
) -> Release:
    """Serve a candidate; returns the new release (see `serving.promote` for what it is, and the errors).

    One that was turned down is promoted with `force` only. Without a readable audit the chain alone decides.
    """
    candidate = own(name, candidate_id, chain)
    with audit.deciding():
        try:
            looks = audit.about(name, [candidate.id])
        except StoreError:
            looks = []
        last = looks[0] if looks else None
        if last is not None and last.verdict == "reject" and not force:
            raise ConflictError(
                f"candidate {candidate.id[:12]} was turned down by {_who(last)}: {last.reason}. "
                "Promote it with --force if it is meant all the same",
                param="candidate_id",
            )
        if last is not None and last.verdict == "accept" and last.release is not None:
            _released(candidate, last.release, chain)
        return serving.promote(
            name,
            candidate.id,
            chain,
            board,
            actor=actor,
            reason=reason,
            expected=expected,
            force=force,
            evaluation=last.evaluation if last is not None and last.verdict in ("hold", "accept") else None,
        )


def reject(
    name: str,
    candidate_id: str,
    chain: ReleaseChain,
    board: Board,
    audit: Audit,
    family: Family,
    *,
    actor: str,
    reason: str,
    expected: str | None = None,
) -> Ruling:
    """Turn a held candidate down: its line ends, and the next one begins from the head. Returns the audit row."""
    if len(reason) > serving.LONGEST_REASON or not reason.isprintable():
        raise InputError(
            f"reason must be one line of at most {serving.LONGEST_REASON} printable characters", param="reason"
        )
    candidate = own(name, candidate_id, chain)
    reason = reason or f"turned down by {actor}"
    with audit.deciding():
        head = chain.head(name)
        if expected is not None and head is not None and head.id != expected:
            raise StaleHead(
                f"the head of {name} is {head.id}, not {expected}; look at it and decide again", head=head.id
            )
        looks = audit.about(name, [candidate.id])
        if (became := became_of(candidate, family.of(name), looks)) is not None:
            raise ConflictError(
                f"candidate {candidate.id[:12]} is release {became.seq} ({became.id[:12]}) already; to take it back: "
                f"reef rollback {became.parent or became.id} -s {name}",
                param="candidate_id",
            )
        if not looks or looks[0].verdict not in ("hold", "reject"):
            raise ConflictError(
                f"candidate {candidate.id[:12]} is not held, so there is nothing to turn down; "
                "`reef candidates` lists what waits",
                param="candidate_id",
            )
        if looks[0].verdict == "hold":
            audit.overrule(name, candidate.id, actor, reason)
            looks = audit.about(name, [candidate.id])
    Journal(board).tell(name, "reject", candidate.id, actor=looks[0].actor, reason=looks[0].reason)
    return looks[0]


def own(name: str, candidate_id: str, chain: ReleaseChain) -> Release:
    """A candidate of this scenario, by id or unique prefix."""
    missing = MissingError(
        f"{name} has no candidate {candidate_id[:80]!r}; `reef candidates` lists them", param="candidate_id"
    )
    try:
        found = chain.get(candidate_id, [name])
    except MissingError as error:
        if "more than one" in error.message:
            raise
        raise missing from None
    if found.operation != "candidate":
        raise InputError(
            f"{found.id[:12]} is release {found.seq}, not a candidate; `reef rollback {found.id[:12]}` serves it again",
            param="candidate_id",
        )
    return found


def _released(candidate: Release, release: str, chain: ReleaseChain) -> None:
    made = chain.get(release)
    if made.operation == "publish":
        raise ConflictError(
            f"candidate {candidate.id[:12]} is release {made.seq} already; to serve it: reef rollback {made.id[:12]}",
            param="candidate_id",
        )


def _who(look: Ruling) -> str:
    return "the gate" if look.actor == "learner" else look.actor
