"""Which releases learnt from which records, what each release was made from, and the release before all of them.

Knows: that a release names the units it consumed, `<receipt>:<choice>`, and that its parts come from its base (for a
promotion also from what the candidate was made from). Does not know: records, or how a rollback is made (`serving`).
Blocking: it reads the chain. A `Family` keeps what it read, so a long chain is walked once and then only grows.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from reef.core.errors import MissingError, StoreError
from reef.core.nouns import PartName, Release, Report
from reef.releases import ReleaseChain
from reef.scenario.audit import Audit

PAGE = 200


@dataclass(frozen=True, slots=True)
class Learnt:
    """`releases` consumed some of the records, oldest first. `served`: what is served now comes from one of them.

    `before` is the newest release that what is served comes from and that knows nothing of them; None: there is none.
    """

    releases: tuple[Release, ...] = ()
    served: bool = False
    before: Release | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A release as its family needs it. `origins` are the places of the releases that its parts come from.

    `trained`: how many units each part learnt from since its base. `candidate`: what was judged to make it.
    """

    id: str
    seq: int
    operation: str
    parent: str | None
    base: str | None
    candidate: str | None
    actor: str
    reason: str
    created_at: float
    line: str | None
    step: int
    trained: Mapping[PartName, int]
    origins: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Descent:
    """All releases of a scenario, oldest first, and who comes from whom. A place is an index into `nodes`."""

    nodes: tuple[Node, ...] = ()
    places: Mapping[str, int] = field(default_factory=dict)  # by id
    lines: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (part, line) -> the release it became

    @property
    def head(self) -> Node | None:
        return self.nodes[-1] if self.nodes else None

    def ancestry(self, place: int) -> list[int]:
        """What a release comes from, itself first, then older and older down to the base."""
        found, marked = [], {place}
        for at in range(place, -1, -1):
            if at in marked:
                found.append(at)
                marked.update(self.nodes[at].origins)
        return found

    def descendants(self, places: Collection[int]) -> list[int]:
        """Every release that comes from any of these, themselves included, oldest first."""
        found = set(places)
        for at in range(min(found, default=len(self.nodes)), len(self.nodes)):
            if not found.isdisjoint(self.nodes[at].origins):
                found.add(at)
        return sorted(found)


class Family:
    """The descent of each scenario, kept and brought up to date. May be used from any thread."""

    def __init__(self, chain: ReleaseChain) -> None:
        self._chain = chain
        self._lock = threading.Lock()
        self._known: dict[str, Descent] = {}

    def of(self, scenario: str) -> Descent:
        with self._lock:
            known = self._known.get(scenario, Descent())
            head = self._chain.head(scenario)
            if head is None or (known.head is not None and known.head.id == head.id):
                return known if head is not None else Descent()
            new: list[Release] = []
            for release in history(self._chain, scenario):
                if release.id in known.places:  # a repaired chain may have gone back: what lay above is no more
                    known = _cut(known, known.places[release.id] + 1)
                    break
                new.append(release)
            else:
                known = Descent()
            self._known[scenario] = _grown(self._chain, known, reversed(new))
            return self._known[scenario]


def history(chain: ReleaseChain, scenario: str) -> Iterator[Release]:
    """Every release of a scenario, newest first."""
    before: str | None = None
    while page := chain.history(scenario, PAGE, before):
        yield from page
        before = page[-1].id


def consumed(release: Release) -> Iterator[str]:
    """The receipts a release learnt from since its base."""
    for part in release.consumed.values():
        for unit in part.units:
            yield unit.partition(":")[0]


def cited(chain: ReleaseChain, scenarios: Iterable[str]) -> Iterator[str]:
    """The receipts that any release or candidate cites; some more than once."""
    for scenario in scenarios:
        for release in history(chain, scenario):
            yield from consumed(release)
        for candidate in getattr(chain, "candidates", lambda name: [])(scenario):
            yield from consumed(candidate)


def consumers(chain: ReleaseChain, scenario: str, receipts: Collection[str]) -> list[Release]:
    """The releases that learnt from any of these records, oldest first. Reads every release."""
    wanted = frozenset(receipts)
    found = [item for item in history(chain, scenario) if not wanted.isdisjoint(consumed(item))]
    return found[::-1]


def learnt(chain: ReleaseChain, scenario: str, receipts: Collection[str]) -> Learnt:
    """The releases of a scenario that learnt from any of these receipts, and where to go back to."""
    return influence(chain, scenario, consumers(chain, scenario, receipts))


def judged(chain: ReleaseChain, audit: Audit, scenario: str, reports: Iterable[Report]) -> list[Release]:
    """The releases that learnt by any of these reports, oldest first. Without an audit to tell by which report a
    record was learnt: those that learnt from any record they quote."""
    descent, places = Family(chain).of(scenario), set[int]()
    for report in reports:
        for receipt in report.references:
            try:
                fates = [
                    one for one in audit.fates(scenario, receipt) if (one.report, one.fate) == (report.id, "trained")
                ]
            except StoreError:
                places |= {descent.places[one.id] for one in consumers(chain, scenario, report.references)}
                break
            for one in fates:
                place = descent.lines.get((one.part, one.line or ""))
                held = None if place is None else chain.get(descent.nodes[place].id).consumed.get(one.part)
                if place is not None and held is not None and one.unit in held.units:
                    places.add(place)
    return [chain.get(descent.nodes[place].id) for place in sorted(places)]


def influence(chain: ReleaseChain, scenario: str, found: Sequence[Release]) -> Learnt:
    """What these releases (oldest first) mean for what is served, and where to go back to."""
    if not found:
        return Learnt()
    descent = Family(chain).of(scenario)
    touched = set(descent.descendants([descent.places[release.id] for release in found]))
    line = descent.ancestry(len(descent.nodes) - 1)
    if line[0] not in touched:
        return Learnt(tuple(found))
    clean = next((place for place in line if place not in touched), None)
    return Learnt(tuple(found), True, None if clean is None else chain.get(descent.nodes[clean].id))


def _grown(chain: ReleaseChain, known: Descent, releases: Iterable[Release]) -> Descent:
    nodes, places, lines = list(known.nodes), dict(known.places), dict(known.lines)
    for release in releases:
        trained = {part: len(held.units) for part, held in release.consumed.items() if held.units}
        judged = release.evaluation.candidate_id if release.evaluation else None
        place = len(nodes)
        nodes.append(
            Node(
                release.id, release.seq, release.operation, release.parent, release.base, judged, release.actor,
                release.reason, release.created_at, release.line, release.step, trained,
                _origins(chain, release, places, judged),
            )
        )  # fmt: skip
        places[release.id] = place
        if release.line is not None:
            lines.update(((part, release.line), place) for part in trained)
    return Descent(tuple(nodes), places, lines)


def _origins(
    chain: ReleaseChain, release: Release, places: Mapping[str, int], candidate: str | None
) -> tuple[int, ...]:
    """A rollback comes from what it restored, a publish from its parent; a promotion puts a candidate's part, which
    comes from that one's base, beside its parent's."""
    found = [release.base if release.base in places else release.parent]
    if release.operation == "promote" and candidate is not None:
        found.append(release.parent)
        with contextlib.suppress(MissingError):
            found.append(chain.get(candidate).base)
    return tuple(dict.fromkeys(places[name] for name in found if name is not None and name in places))


def _cut(known: Descent, length: int) -> Descent:
    if length == len(known.nodes):
        return known
    return Descent(
        known.nodes[:length],
        {name: place for name, place in known.places.items() if place < length},
        {line: place for line, place in known.lines.items() if place < length},
    )
