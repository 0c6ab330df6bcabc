"""Bounded disk: which large files stay, by policy, and the removal of the others.

Knows: which objects a release or candidate needs, that digests are shared, and what nobody may need any more.
Does not know: who pinned what, which candidates wait for a person, or how a remote is asked; it is handed all three.

- Commits and `release.json` are never removed, so history, evidence and descent stay readable for ever.
- Everything is decided again under the repository's mutex, which a publish holds when it looks that its files are there
  and moves its ref. So no release appears whose files are going.
- A process killed anywhere leaves files that are gone and named in `reef/pruned`; the next run goes on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from reef.core.errors import ChainError, MissingError
from reef.core.failpoint import failpoint
from reef.core.nouns import Release
from reef.releases.chain import GitChain
from reef.releases.lfs import ABANDONED
from reef.releases.mend import broken

LEAST = 2
"""Releases and candidates of a scenario that stay whatever the policy: the head and what it would be rolled back to;
the candidate that is being measured."""

_PAGE = 200


@dataclass(frozen=True, slots=True)
class Policy:
    """`releases`: how many of the newest of each scenario keep their large files; None: all. `candidates`: how many of
    the newest keep their ref and files. `pinned` and `held` are ids of releases and candidates that always stay."""

    releases: int | None = None
    candidates: int = 20
    pinned: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Pruned:
    """What goes, or went. `waiting` are the bytes that stay only because the remote does not have them yet."""

    releases: tuple[Release, ...] = ()  # those that lose a large file
    candidates: tuple[Release, ...] = ()  # those that lose their ref
    objects: tuple[tuple[str, int], ...] = ()  # digest and size
    copies: tuple[tuple[str, int], ...] = ()  # of small files, which git has
    waiting: int = 0
    kept: int = 0  # bytes of large files that stay

    @property
    def freed(self) -> int:
        return sum(size for _, size in (*self.objects, *self.copies))


def prune(chain: GitChain, policy: Policy, *, pushed: Callable[[str], bool] | None = None, dry: bool = False) -> Pruned:
    """Remove what the policy lets go; `dry`: only say what that is. The large files of releases go only when `pushed`
    says of their digest that the remote has them (None: there is no remote, the policy alone decides).

    ChainError when a head or a release cannot be read: what it needs cannot be known, so nothing is removed.
    """
    found = _plan(chain, policy, pushed)  # reads the whole history once, while others publish
    if dry or not (found.objects or found.candidates or found.copies):
        return found
    with chain.git.mutex() as mutex:
        found = _plan(chain, policy, pushed)
        if found.candidates:
            deletes = "".join(f"delete {_ref(candidate)}\n" for candidate in found.candidates)
            chain.git.run("update-ref", "--stdin", data=deletes.encode(), keep=[mutex])
            failpoint("releases.refs_pruned")
        chain.objects.remove([digest for digest, _ in found.objects])
        for digest, _ in found.copies:
            chain.objects.drop_copy(digest)
    return found


def _plan(chain: GitChain, policy: Policy, pushed: Callable[[str], bool] | None) -> Pruned:
    if damaged := broken(chain.git):
        raise ChainError(f"nothing is pruned while the head of {', '.join(sorted(damaged))} is damaged; restart Reef")
    keep: set[str] = set()  # digests
    released: dict[str, list[Release]] = {}  # digest -> the releases that go without it
    dropped: list[Release] = []
    for scenario in chain.scenarios():
        releases = list(_history(chain, scenario))
        count = None if policy.releases is None else max(LEAST, policy.releases)
        stay = [release for place, release in enumerate(releases) if count is None or place < count]
        candidates = chain.candidates(scenario)
        young = candidates[: max(LEAST, policy.candidates)]
        for each in needed(chain, [*stay, *young]):
            keep |= _digests(each) | _bases(each)
        dropped += [found for found in candidates if found not in young and found.id not in policy.held]
        for release in releases:
            for digest in _digests(release):
                released.setdefault(digest, []).append(release)
    for name in policy.pinned | policy.held:
        with contextlib.suppress(MissingError):
            for each in needed(chain, [chain.get(name)]):
                keep |= _digests(each) | _bases(each)
    loose = {digest for candidate in dropped for digest in _digests(candidate)}
    now, held = time.time(), dict(chain.objects.held())
    objects, waiting = [], 0
    for digest, stat in held.items():
        if digest in keep:
            continue
        if digest in released and pushed is not None and not pushed(digest):
            waiting += stat.st_size
        elif digest in released or digest in loose or now - stat.st_mtime > ABANDONED:
            objects.append((digest, stat.st_size))
    copies = [
        (digest, stat.st_size)
        for digest, stat in chain.objects.copies()
        if digest not in keep and now - stat.st_mtime > ABANDONED
    ]
    losing = {release.id: release for digest, _ in objects for release in released.get(digest, ())}
    gone = sum(size for _, size in objects)
    return Pruned(
        releases=tuple(sorted(losing.values(), key=lambda release: (release.scenario, release.seq))),
        candidates=tuple(dropped),
        objects=tuple(objects),
        copies=tuple(copies),
        waiting=waiting,
        kept=sum(stat.st_size for stat in held.values()) - gone,
    )


def _history(chain: GitChain, scenario: str) -> Iterator[Release]:
    before: str | None = None
    while page := chain.history(scenario, _PAGE, before):
        yield from page
        before = page[-1].id


def needed(chain: GitChain, releases: Collection[Release]) -> Iterator[Release]:
    """These, and the full weights that a LoRA among them was trained on."""
    seen: set[str] = set()
    for release in releases:
        yield release
        node = release
        while (part := node.parts.get("weights")) and part.kind == "lora" and node.id not in seen:
            seen.add(node.id)
            if (before := node.base or node.parent) is None:
                break
            try:
                node = chain.get(before)
            except MissingError as error:
                raise ChainError(f"nothing is pruned: {error.message}") from None
            if (made := node.parts.get("weights")) and made.kind == "full":
                yield node


def _digests(release: Release) -> set[str]:
    """All files of a release by digest; small ones too, for their copies."""
    return {digest for part in release.parts.values() for digest, _ in part.files.values()}


def _bases(release: Release) -> set[str]:
    """What a part says it was made on, by digest."""
    bases = [part.meta.get("base") for part in release.parts.values()]
    return {str(base["digest"]) for base in bases if isinstance(base, dict) and base.get("digest")}


def _ref(candidate: Release) -> str:
    return f"refs/reef/{candidate.scenario}/candidates/{candidate.id}"
