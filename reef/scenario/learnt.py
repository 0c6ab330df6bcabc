"""Which releases learnt from which records, and the release before all of them.

Knows: that a release names the units it consumed, `<receipt>:<choice>`, and that a release is made from its base.
Does not know: records, or how a rollback is made (`serving`). Blocking: it reads the chain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from reef.core.nouns import Release
from reef.releases import ReleaseChain

PAGE = 200


@dataclass(frozen=True, slots=True)
class Learnt:
    """`releases` consumed some of the records, oldest first. `served`: what is served now comes from one of them.

    `before` is the newest release that what is served comes from and that knows nothing of them; None: there is none.
    """

    releases: tuple[Release, ...] = ()
    served: bool = False
    before: Release | None = None


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


def learnt(chain: ReleaseChain, scenario: str, receipts: Collection[str]) -> Learnt:
    """The releases of a scenario that learnt from any of these receipts, and where to go back to."""
    known = {release.id: release for release in history(chain, scenario)}
    wanted = frozenset(receipts)
    guilty = {name for name, release in known.items() if not wanted.isdisjoint(consumed(release))}
    line: list[Release] = []  # what is served, and what it was made from
    at = next(iter(known), None)
    while at is not None and at in known and known[at] not in line:
        line.append(known[at])
        at = known[at].base or known[at].parent
    first = max((place for place, release in enumerate(line) if release.id in guilty), default=None)
    before = None if first is None or first + 1 >= len(line) else line[first + 1]
    found = tuple(release for name, release in reversed(known.items()) if name in guilty)
    return Learnt(found, first is not None, before)
