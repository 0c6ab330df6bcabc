"""Heads that cannot be read any more: find them, and put each back to the last good release of its log.

Knows: loose and packed refs, git's ref log, and when a release is sound (its commit, `release.json` and all its blobs
can be read).
Does not know: LFS objects (a missing one is an error of that file, not of the chain), or what is being served.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
import zlib
from collections.abc import Iterable
from pathlib import Path

from reef.core.errors import ChainError
from reef.core.ids import is_scenario
from reef.releases import form
from reef.releases.git import ZERO, Git, settle

_ID = re.compile(r"[0-9a-f]{40}")
_DEPTH = 200  # log entries looked at


def mend(git: Git) -> list[str]:
    """Check every scenario's head; repair those that are broken. The caller holds the mutex. Returns what was done."""
    damaged = broken(git)
    said = _set_aside(git.path) if damaged else []
    for scenario, head in sorted(damaged.items()):
        logged = _logged(git.path / "logs/refs/heads" / scenario)
        usable = sound(git, logged)
        last = next((release_id for release_id in logged if release_id in usable), None)
        if last is None:
            said.append(f"the head of {scenario} ({head or 'unreadable'}) is damaged and its log names no good release")
        else:
            _restore(git.path, scenario, head or ZERO, last)
            said.append(
                f"the head of {scenario} ({head or 'unreadable'}) was damaged; back to the last good one, {last}"
            )
    return said


def broken(git: Git) -> dict[str, str | None]:
    """The scenarios whose head cannot be read, each with its id (None: unreadable or gone). Changes nothing."""
    found = heads(git)
    good = sound(git, [head for head in found.values() if head])
    return {scenario: head for scenario, head in found.items() if head not in good}


def sound(git: Git, ids: Iterable[str]) -> set[str]:
    """Those of the ids whose commit, `release.json` and blobs can all be read."""
    wanted = list(dict.fromkeys(ids))
    pages = git.objects([f"{release_id}:release.json" for release_id in wanted])
    blobs: dict[str, list[str]] = {}
    for release_id, page in zip(wanted, pages, strict=True):
        if page is None:
            continue
        try:
            release = form.read(release_id, None, page[1])
        except ChainError:
            continue
        names = [f"{part}/{name}" for part, held in release.parts.items() for name in held.files]
        blobs[release_id] = [f"{release_id}:{name}" for name in names]
    named = [(release_id, name) for release_id, names in blobs.items() for name in names]
    held = git.objects([name for _, name in named])
    return set(blobs) - {release_id for (release_id, _), blob in zip(named, held, strict=True) if blob is None}


def heads(git: Git) -> dict[str, str | None]:
    """Every scenario that has, or had, a branch, with its head's id (None: unreadable or gone)."""
    listing = git.run("for-each-ref", "--format=%(objectname) %(refname:lstrip=2)", "refs/heads", check=False)
    found: dict[str, str | None] = {}
    for line in listing.stdout.decode().splitlines():
        release_id, _, scenario = line.partition(" ")
        found[scenario] = release_id
    for folder in (git.path / "refs/heads", git.path / "logs/refs/heads"):
        if folder.is_dir():
            for entry in folder.iterdir():
                if entry.is_file() and is_scenario(
                    entry.name
                ):  # not a lock file; git deletes a branch's log with it, so a log without a branch is a lost branch
                    found.setdefault(entry.name, None)
    return found


def _logged(path: Path) -> list[str]:
    """The ids in a ref's log, newest first."""
    try:
        lines = path.read_bytes().splitlines()[-_DEPTH:]
    except FileNotFoundError:
        return []
    ids: list[str] = []
    for line in reversed(lines):
        old, new = line[:40].decode("ascii", "replace"), line[41:81].decode("ascii", "replace")
        ids += [release_id for release_id in (new, old) if _ID.fullmatch(release_id) and release_id != ZERO]
    return list(dict.fromkeys(ids))


def _set_aside(path: Path) -> list[str]:
    """Move damaged loose objects to reef/damaged/. Where one lies, git would never write the same content again."""
    said = []
    for file in sorted((path / "objects").glob("[0-9a-f][0-9a-f]/*")):
        name = file.parent.name + file.name
        try:
            content = zlib.decompress(file.read_bytes())
        except zlib.error:
            content = b""
        if _ID.fullmatch(name) and hashlib.sha1(content, usedforsecurity=False).hexdigest() != name:
            aside = path / "reef/damaged"
            aside.mkdir(exist_ok=True)
            file.replace(aside / name)
            said.append(f"set the damaged git object {name} aside, in {aside}")
    return said


def _restore(path: Path, scenario: str, broken: str, good: str) -> None:
    """Write the ref's file itself: git refuses to move a ref that it cannot read."""
    ref = path / "refs/heads" / scenario
    temporary = path / "reef/tmp" / f"{os.getpid()}-{scenario}"
    temporary.write_text(good + "\n")
    settle(temporary)
    with (path / "logs/refs/heads" / scenario).open("a") as file:
        file.write(f"{broken} {good} Reef <reef@localhost> {int(time.time())} +0000\trestore: the head was damaged\n")
    ref.parent.mkdir(parents=True, exist_ok=True)
    temporary.replace(ref)
    settle(ref.parent)
