"""Whether a state folder is sound: the releases, the stores, and what each says of the other. `reef doctor` shows it.

Knows: what must agree with what, and which disagreement can be repaired without losing anything.
Does not know: how a repair works (chain, board and journal do that). Everything is only read; a server may be running.

- A finding is one line with what to do next. `fix` does it, where that is safe at any moment.
- The stores are opened read-only as files, so that a folder of an older Reef is looked at as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reef.cli.process import Boot
from reef.cli.show import count
from reef.config import Settings
from reef.core.errors import ChainError, MissingError, ReefError, TrainError
from reef.core.nouns import Release
from reef.records.queue import is_ask
from reef.releases import marker
from reef.releases.mend import broken, heads

if TYPE_CHECKING:
    from reef.records.board import Board
    from reef.releases.chain import GitChain

MOST = 20  # findings of one kind that are shown, for each scenario
_PATIENCE = 2.0  # seconds that a running server has to flip to a head


@dataclass(frozen=True, slots=True)
class Finding:
    """`ok` None: worth knowing, not needed. `missing`: something to install. `fix` repairs it and says what it did."""

    what: str
    ok: bool | None
    note: str
    missing: bool = False
    fix: Callable[[], str] | None = field(default=None, compare=False)


@dataclass(slots=True)
class _Site:
    """A state folder. `heads` are the scenarios whose head can be read, `damaged` those whose head cannot."""

    folder: Path
    settings: Settings
    boot: Boot
    chain: GitChain
    damaged: set[str] = field(default_factory=set)
    heads: dict[str, Release] = field(default_factory=dict)
    releases: dict[str, list[Release]] = field(default_factory=dict)

    @contextlib.contextmanager
    def store(self, name: str = "records.db") -> Iterator[sqlite3.Connection]:
        path = (self.folder / name).absolute()
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=10.0)) as base:
            yield base

    @contextlib.contextmanager
    def board(self) -> Iterator[Board]:
        """For a repair."""
        from reef.records.board import Board as Opened

        board = Opened(self.folder / "records.db")
        try:
            yield board
        finally:
            board.close()


def examine(settings: Settings, boot: Boot, *, running: bool) -> Iterator[Finding]:
    """Every check, in the order in which one needs the other. `boot` is what a server here would be told, with its
    model. `running`: a server is at work on the folder."""
    from reef.cli import assemble

    folder = settings.reef.state_dir
    stores = yield from _stores(folder)
    if not (folder / "releases.git").is_dir():
        yield Finding("releases", None, f"none in {folder} yet; `reef serve` makes the first")
        return
    site = _Site(folder, settings, boot, assemble.open_chain(folder))
    try:
        readable = yield from _repository(site)
    except ReefError as error:
        yield Finding("releases", False, f"{error.message}; restore the folder from a backup")
        return
    if not readable:
        return
    if "records.db" in stores:
        try:
            yield from _agreement(site, running)
        except sqlite3.Error as error:
            yield Finding(
                "records.db", None, f"it is of another version ({error}); the next start brings it up to date"
            )
    yield from _training(site)


# --- the stores -------------------------------------------------------------------------------------------------------


def _stores(folder: Path) -> Generator[Finding, None, set[str]]:
    """Each file's own check. Returns those that are sound."""
    remedy = {
        "records.db": "stop the server and restore it from a backup",
        "learn.db": "restart the server: it sets the file aside and learns again what releases and folders know",
        "gate.db": "restart the server: it sets the file aside and asks again what it had measured",
    }
    sound: set[str] = set()
    for name, advice in remedy.items():
        path = (folder / name).absolute()
        if not path.exists():
            continue
        try:
            with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=10.0)) as base:
                said = str(base.execute("PRAGMA quick_check(1)").fetchone()[0])
        except sqlite3.Error as error:
            said = str(error)
        if said == "ok":
            sound.add(name)
            yield Finding(name, True, "sound")
        else:
            yield Finding(name, False, f"damaged ({said}); {advice}")
    return sound


# --- the repository ---------------------------------------------------------------------------------------------------


def _repository(site: _Site) -> Generator[Finding, None, bool]:
    """Format, locks, heads, every release with all its files. Returns whether it is worth looking further."""
    chain = site.chain
    number = marker.read(chain.path)
    if number is None:
        yield Finding(
            "releases", False, "half made: a start was killed; the next completes it", fix=partial(_open, chain)
        )
        return False
    if number < marker.FORMAT:
        yield Finding("releases", None, f"format {number}; the next start brings it to {marker.FORMAT}")
    with chain.git.mutex():
        locks = chain.git.locks()
    for lock in locks:
        note = f"{lock} was left by a process that was killed; `reef doctor --repair` or a start removes it"
        yield Finding("releases", False, note, fix=partial(_open, chain))
    damaged = broken(chain.git)
    site.damaged |= damaged.keys()
    for name, head in sorted(damaged.items()):
        note = (
            f"the head of {name} ({head or 'unreadable'}) is damaged; `reef doctor --repair` or a start goes back to "
        )
        yield Finding(f"releases {name}", False, note + "the last good release", fix=partial(_open, chain))
    for name in sorted(heads(chain.git).keys() - damaged.keys()):
        wrong = chain.verify(name, remote=site.settings.releases.remote is not None)
        for sentence in wrong[:MOST]:
            yield _spoilt(site, name, sentence)
        if len(wrong) > MOST:
            yield Finding(f"releases {name}", False, f"and {len(wrong) - MOST} more like these")
        try:
            yield from _whole(site, name, bool(wrong))
        except ChainError as error:
            yield Finding(f"releases {name}", False, f"{error.message}; restore the folder from a backup")
    return True


def _whole(site: _Site, name: str, wrong: bool) -> Iterator[Finding]:
    chain = site.chain
    head = chain.head(name)
    if head is None:
        return
    site.heads[name] = head
    found: list[Release] = []
    while page := chain.history(name, 200, found[-1].id if found else None):
        found += page
    site.releases[name] = found
    pruned = sum(_pruned(chain, release) for release in found)
    if not wrong:
        why = "at the remote" if site.settings.releases.remote is not None else "by policy"
        gone = f", {pruned} of them without their large files ({why})" if pruned else ""
        said = f"{count(len(found), 'release')}{gone} and {count(len(chain.candidates(name)), 'candidate')}"
        yield Finding(f"releases {name}", True, f"{said}, each file verified")


def _pruned(chain: GitChain, release: Release) -> bool:
    from reef.releases.lfs import large

    files = [(name, *held) for part in release.parts.values() for name, held in part.files.items()]
    return any(large(name, size) and not chain.objects.place(digest).exists() for name, digest, size in files)


def _spoilt(site: _Site, name: str, sentence: str) -> Finding:
    """What `GitChain.verify` said, with what follows from it and what to do next."""
    what, named = f"releases {name}", _RELEASE.search(sentence)
    if named is None or (lies := _OBJECT.search(sentence)) is None:
        known = ("fetch it with", "roll back", "remove")
        advised = any(word in sentence for word in known)
        return Finding(what, False, sentence if advised else f"{sentence}; restore it from a backup or a remote")
    release_id, digest = named[1], lies[1]
    if site.settings.releases.remote is not None:
        note = f"{sentence.partition('; ')[0]}; `reef doctor --repair` fetches it again from releases.remote"
        return Finding(what, False, note, fix=partial(_fetch, site, release_id, digest))
    head = site.chain.head(name)
    place = site.folder / "releases.git" / site.chain.objects.place(digest).relative_to(site.chain.path)
    note = sentence if "fetch it with" in sentence else f"{sentence}; restore {place} from a backup"
    if head is not None and head.id == release_id:
        return Finding(what, False, note if "roll back" in note else f"{note}, or roll back to another release")
    return Finding(
        what, False, f"{note}; until then a rollback to {release_id[:12]} is refused, what is served goes on"
    )


_RELEASE = re.compile(r" of release ([0-9a-f]{40})\b")
_OBJECT = re.compile(r"(?:/lfs/objects/[0-9a-f]{2}/[0-9a-f]{2}/|: its object )([0-9a-f]{64})\b")


def _fetch(site: _Site, release_id: str, digest: str) -> str:
    """Put the damaged object aside and ask the remote for it; one that does not come changes nothing."""
    from reef.cli import remote

    fetch, place = remote.fetcher(site.settings), site.chain.objects.place(digest)
    assert fetch is not None
    aside = site.chain.path / "reef" / "tmp" / f"{os.getpid()}-{digest}"
    there = place.exists()
    if there:
        place.replace(aside)
    try:
        fetch(release_id)
    except BaseException:
        if there and not place.exists():
            aside.replace(place)
        raise
    aside.unlink(missing_ok=True)
    return f"fetched {digest[:12]} again"


def _open(chain: GitChain) -> str:
    return "; ".join(chain.open())


# --- agreement --------------------------------------------------------------------------------------------------------


def _agreement(site: _Site, running: bool) -> Iterator[Finding]:
    yield from _serving(site, running)
    yield from _base(site)
    yield from _cited(site)
    yield from _consumed(site)
    yield from _journal(site)
    yield from _forgotten(site)


def _forgotten(site: _Site) -> Iterator[Finding]:
    """Harness entries that are served although what they came from was erased on request."""
    from reef.cli import assemble, forget

    audit = assemble.open_audit(site.folder)
    for name, head in site.heads.items():
        with site.store() as base, contextlib.suppress(ChainError, MissingError):  # what is not whole is told above
            if said := forget.standing(site.chain, audit, head, partial(_erased, base)):
                yield Finding(f"harness {name}", None, said)


def _erased(base: sqlite3.Connection, ids: Iterable[str]) -> list[str]:
    return [name for name in ids if base.execute("SELECT 1 FROM erased WHERE id = ?", (name,)).fetchone()]


def _serving(site: _Site, running: bool) -> Iterator[Finding]:
    """The board names each chain's head; a pinned scenario is at its pin."""
    from reef.scenario import serving

    deadline = time.monotonic() + (_PATIENCE if running else 0.0)
    while behind := _behind(site):
        if time.monotonic() >= deadline:
            break
        time.sleep(0.1)
        site.heads |= {name: head for name in behind if (head := site.chain.head(name)) is not None}

    def align(name: str) -> str:
        with site.board() as board:
            return f"{name} serves {serving.resume(name, site.chain, board).release_id[:12]}"

    for name, (served, wanted) in behind.items():
        if served is not None and (why := serving.broken(name, served, site.chain)) is not None:
            yield Finding(f"serving {name}", False, f"release {served[:12]} goes on: {why}")
            continue
        note = (
            f"the board says {served or 'nothing'} and the chain's head is {wanted}; `reef doctor --repair` or a start"
        )
        yield Finding(f"serving {name}", False, f"{note} makes it the head", fix=partial(align, name))
    with site.store() as db:
        names = {str(name) for (name,) in db.execute("SELECT name FROM scenarios WHERE archived_at IS NULL")}
        pins = {str(name): str(at) for name, at in db.execute("SELECT scenario, release_id FROM pins")}
    for name in sorted(names - site.heads.keys() - site.damaged):
        if site.chain.head(name) is None:
            yield Finding(
                f"serving {name}", None, "it has no release yet; the next request to it, or a start, makes it"
            )

    def pinned(name: str) -> str:
        with site.board() as board:
            head = serving.keep_pin(name, site.chain, board)
        return f"{name} is back at its pin" if head else "the pin is gone"

    for name, at in sorted(pins.items()):
        head = site.heads.get(name)
        if head is not None and at not in (head.id, head.base if head.operation == "rollback" else None):
            note = f"it is pinned to {at[:12]} and its head is {head.id[:12]}; `reef doctor --repair` brings it back"
            yield Finding(f"serving {name}", False, note, fix=partial(pinned, name))
    if not behind:
        yield Finding("serving", True, f"the board and the {count(len(site.heads), 'head')} agree")


def _behind(site: _Site) -> dict[str, tuple[str | None, str]]:
    with site.store() as db:
        served = {str(name): str(at) for name, at in db.execute("SELECT scenario, release_id FROM serving")}
        live = {str(name) for (name,) in db.execute("SELECT name FROM scenarios WHERE archived_at IS NULL")}
        hidden = {str(name) for (name,) in db.execute("SELECT name FROM scenarios")} - live
    wanted = {name: head.id for name, head in site.heads.items() if name not in hidden}
    return {name: (served.get(name), head) for name, head in wanted.items() if served.get(name) != head}


def _base(site: _Site) -> Iterator[Finding]:
    """Each scenario's releases belong to the model that its engine has."""
    from reef.cli import assemble
    from reef.cli.route import scenario_of

    with site.store() as db:
        rows = db.execute("SELECT name, settings FROM scenarios WHERE archived_at IS NULL").fetchall()
    for name, created in rows:
        with contextlib.suppress(ReefError):  # settings that no longer fit, a head that is damaged: told elsewhere
            engine = scenario_of(site.settings, name, json.loads(created)).engine
            if (why := assemble.trouble(site.boot, site.settings, site.chain, name, engine)) is not None:
                yield Finding(f"serving {name}", False, why)


def _cited(site: _Site) -> Iterator[Finding]:
    """The chain has every release that a record names."""
    with site.store() as db:
        rows = db.execute("SELECT scenario, release_id, count(*) FROM records GROUP BY scenario, release_id").fetchall()
    lost = 0
    for scenario, release_id, number in rows:
        if scenario in site.damaged:
            continue
        try:
            site.chain.get(release_id)
        except (MissingError, ChainError):
            lost += 1
            if lost <= MOST:
                note = (
                    f"{count(number, 'record')} cannot train: answered by release {release_id}, which the chain does "
                )
                yield Finding(f"records {scenario}", False, note + "not have. Restore releases.git from a backup")
    if not lost:
        yield Finding("records", True, f"each release that records name is there ({len(rows)})")


def _consumed(site: _Site) -> Iterator[Finding]:
    """The store has every record that a release learnt from, but for those that were forgotten on request."""
    foreign = (site.chain.path / "reef" / "remote.json").exists()
    missing: Counter[str] = Counter()
    total = 0
    with site.store() as db:
        for name, releases in site.releases.items():
            for receipt in {unit.partition(":")[0] for release in releases for unit in _units(release)}:
                if is_ask(receipt):
                    continue  # what a person asked for is no record, and old asks are not kept
                total += 1
                row = db.execute(
                    "SELECT EXISTS (SELECT 1 FROM records WHERE id = ?1 UNION SELECT 1 FROM erased WHERE id = ?1)",
                    (receipt,),
                ).fetchone()
                missing[name] += not row[0]
    for name, lost in sorted(missing.items()):
        if lost:
            note = f"{count(lost, 'record')} that releases learnt from: not in records.db, and not forgotten; "
            note += "look where these releases were made" if foreign else "restore records.db from a backup"
            yield Finding(f"records {name}", None if foreign else False, note)
    if not sum(missing.values()):
        yield Finding("records", True, f"each record that releases learnt from is there, or was forgotten ({total})")


def _units(release: Release) -> Iterable[str]:
    return (unit for consumed in release.consumed.values() for unit in consumed.units)


def _journal(site: _Site) -> Iterator[Finding]:
    """Every release was told."""
    from reef.scenario import serving

    with site.store() as db:
        told = {(str(kind), str(ref)) for kind, ref in db.execute("SELECT DISTINCT kind, ref FROM acts")}

    def tell(releases: list[Release]) -> str:
        with site.board() as board:
            return f"told of {count(sum(serving.tell(release, board) for release in releases), 'release')}"

    silent = False
    for name, releases in sorted(site.releases.items()):
        untold = [found for found in releases[::-1] if (serving.TOLD[found.operation], found.id) not in told]
        if untold:
            silent = True
            note = f"no entry for {count(len(untold), 'release')} (the first is {untold[0].seq}); "
            note += "`reef doctor --repair` adds what is missing"
            yield Finding(f"journal {name}", False, note, fix=partial(tell, untold))
    if not silent:
        yield Finding("journal", True, "every release has its entry")


# --- the training folder ----------------------------------------------------------------------------------------------


def _training(site: _Site) -> Iterator[Finding]:
    """Each step is whole and stands on a release."""
    from reef.cli import assemble

    steps, wrong = 0, 0
    for place in sorted((site.folder / "training").glob("*/*/*/[0-9]*")):
        scenario, _, line = place.parts[-4:-1]
        if scenario in site.damaged:
            continue
        try:
            state = assemble.read_step(place)
            if state is None:
                continue
            steps += 1
            base = site.chain.get(state.base_release)
            if base.scenario != scenario or not line.startswith(base.id[:12]):
                raise TrainError(f"{place} says it stands on release {base.id[:12]} of {base.scenario}; remove it")
        except MissingError:
            if not place.exists():
                continue  # its line has ended meanwhile
            wrong += 1
            lost = state.base_release[:12] if state else "?"
            note = f"{place} stands on release {lost}, which the chain does not have; "
            yield Finding(f"training {scenario}", None, note + "nothing uses it: remove it")
        except TrainError as error:
            if place.exists():
                wrong += 1
                yield Finding(f"training {scenario}", False, error.message)
    if steps and not wrong:
        yield Finding("training", True, f"{count(steps, 'step')}, each whole and on a release")


def repaired(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Each finding, after its repair where it has one. One repair may mend several; then it says so once."""
    for item in findings:
        if item.ok is not False or item.fix is None:
            yield item
            continue
        try:
            did = item.fix()
            said = f"repaired: {did}" if did else "repaired with what is above"
            yield Finding(item.what, True, f"{said} (it was: {item.note.partition(';')[0]})")
        except ReefError as error:
            yield Finding(item.what, False, f"{item.note} (the repair failed: {error.message})")


def shown(item: Finding) -> Mapping[str, Any]:
    return {
        "what": item.what, "ok": item.ok, "note": item.note, "missing": item.missing,
        "repairable": item.fix is not None,
    }  # fmt: skip
