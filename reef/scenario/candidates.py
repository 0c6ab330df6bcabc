"""The candidates of a scenario: which there are, what was said of each, and which wait for a person.

Knows: the chain's candidates, the audit's rows on them, and whether one still fits what is served.
Does not know: how one was judged, or how it is promoted (`decide`). Blocking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reef.core.errors import MissingError, StoreError
from reef.core.nouns import PartName, Release
from reef.releases import ReleaseChain
from reef.scenario.audit import Audit, Ruling
from reef.scenario.learnt import Family, Node
from reef.scenario.serving import changed
from reef.scenario.why import became_of, state_of

HELD = 100  # held rows that are looked at


@dataclass(frozen=True, slots=True)
class Proposal:
    """A candidate and its state (see `why.state_of`). `look`: the newest row on it; None: there is none, or unknown.

    `fits`: what it would replace is still what it was made from and measured against, so it can be promoted as it is.
    """

    candidate: Release
    part: PartName
    state: str
    fits: bool
    look: Ruling | None = None
    looks: int = 0
    became: Node | None = None


@dataclass(frozen=True, slots=True)
class Proposals:
    """Newest first. `known`: the audit could be read; without it, the states are unknown."""

    found: tuple[Proposal, ...]
    known: bool


def listed(chain: ReleaseChain, audit: Audit, family: Family, scenario: str) -> Proposals:
    """The candidates that are kept, and those that are held however old they are."""
    kept = {item.id: item for item in getattr(chain, "candidates", lambda name: [])(scenario)}
    rows: dict[str, list[Ruling]] = {}
    known = True
    try:
        names = [*kept, *(look.candidate for look in audit.newest(scenario, HELD, ("hold",)) if look.candidate)]
        for row in audit.about(scenario, list(dict.fromkeys(names))) if names else ():
            rows.setdefault(row.candidate or "", []).append(row)
    except StoreError:
        known = False
    for name in rows.keys() - kept.keys():
        if rows[name][0].verdict == "hold":
            try:
                kept[name] = chain.get(name)
            except MissingError:  # its ref is gone, and so are its files
                continue
    found = [_proposal(chain, family, item, rows.get(item.id, []), known) for item in kept.values()]
    found.sort(key=lambda item: (item.look.number if item.look else 0, item.candidate.created_at), reverse=True)
    return Proposals(tuple(found), known)


def waiting(chain: ReleaseChain, audit: Audit, family: Family, scenario: str) -> list[Proposal]:
    """Those that are held and still fit, the oldest first. StoreError when the audit cannot be read."""
    held = {look.candidate: look for look in audit.newest(scenario, HELD, ("hold",)) if look.candidate}
    found = []
    for name in held:
        rows = audit.about(scenario, [name])
        if rows and rows[0].verdict == "hold":
            try:
                item = _proposal(chain, family, chain.get(name), rows, True)
            except MissingError:
                continue
            if item.state == "held" and item.fits:
                found.append(item)
    return sorted(found, key=lambda item: item.look.at if item.look else 0.0)


def one(chain: ReleaseChain, audit: Audit, family: Family, candidate: Release) -> Proposal:
    """One candidate; its state is unknown when the audit cannot be read."""
    try:
        rows, known = audit.about(candidate.scenario, [candidate.id]), True
    except StoreError:
        rows, known = [], False
    return _proposal(chain, family, candidate, rows, known)


def _proposal(chain: ReleaseChain, family: Family, candidate: Release, rows: Sequence[Ruling], known: bool) -> Proposal:
    base = chain.get(candidate.base or "")
    head = chain.head(candidate.scenario)
    part = changed(candidate, base)
    fits = (
        head is not None
        and head.parts.get(part) == base.parts.get(part)
        and (part != "weights" or head.step == base.step)
    )
    became = became_of(candidate, family.of(candidate.scenario), rows)
    state = state_of(rows, (), became, known=known)
    return Proposal(candidate, part, state, fits, rows[0] if rows else None, len(rows), became)
