"""Where each entry of a harness tree comes from, and each line of it: the release that brought it as it is now.

Knows: which release's tree another one was made from, entries and lines that did not change between the two (as git
blame does it), and what a release learnt from. Reads the tree's file as plain JSON; its rules are `harness.tree`'s.
Does not know: records and reports beyond their ids, HTTP, or what an entry means.

- A rollback brings nothing: what it restores keeps its origin. A promotion brings what its candidate changed.
- An entry that was removed and made again is new. Lines are compared with those of the same entry only.
- Blocking: it reads the chain. What was found for a release never changes, so the last of it is kept.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from reef.core.errors import ChainError, MissingError, StoreError
from reef.core.nouns import Consumed, Json, Release
from reef.releases import ReleaseChain
from reef.scenario.audit import Audit
from reef.scenario.learnt import history

FILE: Final = "harness.json"
"""The tree in a release's harness part: `harness.tree.FILE`, of a room above this one."""
KEPT: Final = 32  # releases whose origins are remembered
MOST: Final = 500  # units of a release whose reports are looked up
PAIRS: Final = 20_000  # pairs of equal lines that are weighed; texts with more are told as new where they changed


@dataclass(frozen=True, slots=True)
class Line:
    """A line of an entry, and the release that brought it."""

    text: str
    release_id: str
    seq: int


@dataclass(frozen=True, slots=True)
class Origin:
    """An entry of a tree. `release_id` to `units` are of the release that brought it as it is now.

    `since`: every release that made it or changed it, oldest first. `unsure`: why it may be older than told; empty: it
    is as told. What follows `unsure` is filled in by who knows more than the chain (`why`).
    """

    id: str
    kind: str
    release_id: str
    seq: int
    operation: str
    actor: str
    reason: str
    at: float
    units: tuple[str, ...]  # <receipt>:<choice> that the release learnt from, for this part
    lines: tuple[Line, ...]
    since: tuple[str, ...]
    unsure: str = ""
    reports: tuple[str, ...] = ()  # by which those units were judged
    people: tuple[str, ...] = ()  # whose tokens the answers were given to, and who proposed what was promoted
    forgotten: bool = False  # a release of `since` learnt from records or reports that were erased on request


@dataclass(frozen=True, slots=True)
class Flag:
    """An entry that came from some releases: those are `brought`, oldest first; `held` are the seqs of all releases
    that hold it. `lines` are those of the newest release's tree that still come from them; None: it is not there."""

    id: str
    kind: str
    brought: tuple[tuple[str, int], ...]  # (release id, seq)
    held: tuple[int, ...]
    lines: tuple[Line, ...] | None


def entries(chain: ReleaseChain, release: Release) -> list[Origin]:
    """The origin of each entry of a release's (or candidate's) tree, in the tree's order. Empty without a tree.

    ChainError or PrunedError when the release's own tree cannot be read.
    """
    return [held.origin for held in _tree(chain, release).values()]


def learners(chain: ReleaseChain, scenario: str, receipts: Collection[str]) -> list[str]:
    """The releases whose harness learnt from any of these records, oldest first."""
    wanted = frozenset(receipts)
    return [release.id for release in history(chain, scenario) if not wanted.isdisjoint(_receipts(release))][::-1]


def flags(chain: ReleaseChain, scenario: str, releases: Collection[str]) -> list[Flag]:
    """What came into a scenario's trees by any of these releases, and has not been made anew since."""
    if not releases:
        return []
    past = list(history(chain, scenario))[::-1]
    first = min((place for place, one in enumerate(past) if one.id in releases), default=len(past))
    brought: dict[tuple[str, str], dict[str, int]] = {}
    held: dict[tuple[str, str], list[int]] = {}
    newest: dict[tuple[str, str], tuple[Line, ...]] = {}
    for release in past[first:]:
        newest, origins = {}, list[Origin]()
        with contextlib.suppress(ChainError, MissingError):  # nothing is known of a tree that cannot be read
            origins = entries(chain, release)
        for origin in origins:
            if mine := [name for name in origin.since if name in releases]:
                key = (origin.id, origin.kind)
                brought.setdefault(key, {}).update(dict.fromkeys(mine, 0))
                held.setdefault(key, []).append(release.seq)
                newest[key] = tuple(line for line in origin.lines if line.release_id in releases)
    seqs = {release.id: release.seq for release in past}
    return [
        Flag(*key, tuple((name, seqs[name]) for name in brought[key]), tuple(held[key]), newest.get(key))
        for key in sorted(brought)
    ]


@dataclass(frozen=True, slots=True)
class Behind:
    """What a release's harness learnt from: units, and the reports they were judged by."""

    units: tuple[str, ...] = ()
    reports: tuple[str, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """Receipts and reports."""
        return frozenset(unit.partition(":")[0] for unit in self.units) | frozenset(self.reports)


def behind(chain: ReleaseChain, audit: Audit, origins: Iterable[Origin]) -> dict[str, Behind]:
    """What every release learnt from that had a hand in these entries. Reports as far as the audit can be read."""
    found: dict[str, Behind] = {}
    for name in dict.fromkeys(name for one in origins for name in one.since):
        release = chain.get(name)
        units = release.consumed.get("harness", Consumed()).units
        reports = dict[str, None]()
        with contextlib.suppress(StoreError):
            for unit in units[:MOST]:
                for fate in audit.fates(release.scenario, unit.partition(":")[0]):
                    mine = (fate.part, fate.unit, fate.fate, fate.line) == ("harness", unit, "trained", release.line)
                    reports |= {fate.report: None} if mine and fate.report else {}
        found[name] = Behind(units, tuple(reports))
    return found


def lost(behind: Mapping[str, Behind], gone: Iterable[str]) -> list[str]:
    """Those of these releases that learnt from records or reports which are gone."""
    names = frozenset(gone)
    return [release for release, each in behind.items() if not names.isdisjoint(each.names)]


def marked(origins: Iterable[Origin], releases: Collection[str]) -> tuple[Origin, ...]:
    """The same origins; those that one of these releases had a hand in are `forgotten`."""
    wanted = frozenset(releases)
    return tuple(one if wanted.isdisjoint(one.since) else replace(one, forgotten=True) for one in origins)


# --- inside -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Held:
    config: Json
    origin: Origin


_Tree = Mapping[str, _Held]
_kept: OrderedDict[str, _Tree] = OrderedDict()  # a release's id names its content, whichever chain it is in
_lock = threading.Lock()


class _Past:
    """Releases of a scenario by id, read in pages as far back as they are asked for."""

    def __init__(self, chain: ReleaseChain, scenario: str) -> None:
        self._chain = chain
        self._rest: Iterator[Release] = history(chain, scenario)
        self._found: dict[str, Release] = {}

    def get(self, name: str | None) -> Release | None:
        while name is not None and name not in self._found and (one := next(self._rest, None)) is not None:
            self._found[one.id] = one
        return self._found.get(name or "") or self.one(name)

    def one(self, name: str | None) -> Release | None:
        """One that need not be in the history, such as a candidate."""
        with contextlib.suppress(MissingError):
            return None if name is None else self._chain.get(name)
        return None


def _tree(chain: ReleaseChain, release: Release) -> _Tree:
    """Back to the nearest release that is known or has no tree, then forward again."""
    past, steps = _Past(chain, release.scenario), list[tuple[Release, bool]]()
    at: Release | None = release
    tree: _Tree = {}
    while at is not None and "harness" in at.parts:
        with _lock:
            if (found := _kept.get(at.id)) is not None:
                tree = found
                break
        source, same = _source(past, at)
        steps.append((at, same))
        at = source
    unsure = ""
    for one, same in reversed(steps):
        if same:
            continue
        try:
            now = _read(chain, one)
        except (ChainError, MissingError):  # a large tree may have been pruned
            if one.id == release.id:
                raise
            unsure = f"the tree of release {one.seq} cannot be read, so this may be older"
            continue
        tree, unsure = _grown(tree, one, now, unsure), ""
    with _lock:
        _kept[release.id] = tree
        _kept.move_to_end(release.id)
        while len(_kept) > KEPT:
            _kept.popitem(last=False)
    return tree


def _source(past: _Past, release: Release) -> tuple[Release | None, bool]:
    """The release whose tree this one's was made from, and whether it is the same tree."""
    if release.operation == "rollback":
        return past.get(release.base), True
    part, around = release.parts["harness"], [past.get(release.parent), past.get(release.base)]
    for one in around:
        if one is not None and one.parts.get("harness") == part:
            return one, True
    if release.operation == "promote" and release.evaluation is not None:
        candidate = past.one(release.evaluation.candidate_id)
        if candidate is not None and candidate.parts.get("harness") == part:
            return past.get(candidate.base), False
    return around[1] or around[0], False


def _grown(before: _Tree, release: Release, now: Mapping[str, tuple[str, Json]], unsure: str) -> _Tree:
    """The tree of a release, of which `before` is the one it was made from."""
    units = release.consumed.get("harness", Consumed()).units
    reason = release.reason or (release.evaluation.reason if release.evaluation else "")
    grown: dict[str, _Held] = {}
    for name, (kind, config) in now.items():
        old = before.get(name)
        if old is not None and (old.origin.kind, old.config) == (kind, config):
            grown[name] = old
            continue
        if old is not None and old.origin.kind != kind:
            old = None
        lines = _blame(old.origin.lines if old else (), written(config), release)
        since = (*(old.origin.since if old else ()), release.id)
        origin = Origin(
            name, kind, release.id, release.seq, release.operation, release.actor, reason, release.created_at,
            units, lines, since, unsure or (old.origin.unsure if old else ""),
        )  # fmt: skip
        grown[name] = _Held(config, origin)
    return grown


def _read(chain: ReleaseChain, release: Release) -> dict[str, tuple[str, Json]]:
    files = chain.files(release.id, "harness")
    try:
        tree = json.loads(files[FILE].read_bytes())
        return {item["id"]: (item["kind"], item["config"]) for item in tree["entries"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ChainError(f"{FILE} of release {release.id} cannot be read ({type(error).__name__})") from None


def written(config: Json) -> list[str]:
    """An entry's config in lines: what it has besides a text, by name, then the text."""
    if not isinstance(config, dict):
        return json.dumps(config, ensure_ascii=False).split("\n")
    lines = []
    for name in sorted(config):
        if name != "text":
            value = config[name]
            plain = isinstance(value, str) and "\n" not in value
            said = value if plain else json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
            lines += f"{name}: {said}".split("\n")
    text = config.get("text", "")
    return lines + (text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)).split("\n")


def _blame(old: Sequence[Line], new: Sequence[str], release: Release) -> tuple[Line, ...]:
    """The new lines, each with its origin: an old line's where it stands unchanged."""
    start, end = 0, 0
    shorter = min(len(old), len(new))
    while start < shorter and old[start].text == new[start]:
        start += 1
    while end < shorter - start and old[-1 - end].text == new[-1 - end]:
        end += 1
    lines = [Line(text, release.id, release.seq) for text in new]
    lines[:start] = old[:start]
    lines[len(new) - end :] = old[len(old) - end :]
    before, after = [line.text for line in old[start : len(old) - end]], new[start : len(new) - end]
    theirs = Counter(after)
    if before and after and sum(count * theirs[text] for text, count in Counter(before).items()) <= PAIRS:
        for here, there, size in difflib.SequenceMatcher(None, before, after, False).get_matching_blocks():
            lines[start + there : start + there + size] = old[start + here : start + here + size]
    return tuple(lines)


def _receipts(release: Release) -> Iterator[str]:
    return (unit.partition(":")[0] for unit in release.consumed.get("harness", Consumed()).units)
