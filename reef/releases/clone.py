"""A chain that begins from its remote, and large files that are fetched from it when they are needed.

Knows: which large files come at once (of heads, of candidates that are held, of the full weights below them), and that
a chain appears in its place whole or not at all.
Does not know: records, or what becomes of the marks it brings (`State.adopt` says that nobody looked at them yet).

- A release that is here is never replaced. What else lies at the remote stays out, and stays there.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from reef.core import disk
from reef.core.errors import ChainError, MissingError, ReefError
from reef.core.failpoint import failpoint
from reef.core.nouns import Release
from reef.releases.git import settle
from reef.releases.prune import needed
from reef.releases.remote import HEADS, LINE, OURS, Remote, State, chunks, large_files
from reef.releases.transport import NAME, hide

_MARK = re.compile(r"refs/reef/([^/]+)/(candidates|held|pinned|archived|settings)(?:/[0-9a-f]{40})?")


def begin(path: Path, url: str) -> list[str]:
    """Where there is no chain at `path`, make one from the remote; returns its scenarios. Killed anywhere, it begins
    anew. ChainError when the remote cannot be reached: a chain of its own could never be pushed there."""
    if (path / "reef" / "format").exists() or (path / "packed-refs").exists() or any(path.glob("refs/heads/*")):
        return []
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        scenarios = _clone(Remote(partial, url))
    except ReefError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ChainError(
            f"there are no releases here, and they cannot be had from releases.remote: {error.message}; start again "
            "when that is repaired, or without releases.remote for a life of its own"
        ) from None
    failpoint("remote.cloned")
    try:
        if path.exists():
            shutil.rmtree(path)
        partial.rename(path)
        disk.sync(path.parent)
    except OSError as error:
        raise ChainError(f"cannot put the releases at {path}: {error.strerror}; {disk.advice(error)}") from None
    return scenarios


def _clone(remote: Remote) -> list[str]:
    """Fill a new chain from the remote: every scenario, what is marked, the large files of heads and candidates.

    Those of older releases are fetched when they are needed. Returns the scenarios (none: the remote is empty).
    ChainError when a head cannot be served from what the remote holds.
    """
    remote.chain.open()
    state = State(hide(remote.url), adopt=True)
    if there := remote.there():
        both = (f"+{HEADS}*:{HEADS}*", f"+{OURS}*:{OURS}*")
        remote.transport.run("fetch", "--quiet", "--no-tags", "--no-write-fetch-head", NAME, *both, what="fetch from")
        there = _refs(remote)
    scenarios = sorted(ref.removeprefix(HEADS) for ref in there if ref.startswith(HEADS))
    for name in scenarios:
        with contextlib.suppress(ChainError):  # another repository's branch, or one that was moved aside
            if (head := remote.chain.head(name)) is not None and head.scenario == name:
                state.heads[name], state.numbers[name] = head.id, head.seq
                continue
        remote.chain.git.run("update-ref", "-d", HEADS + name)
    if scenarios and not state.heads:
        raise ChainError(f"the branches of {state.url} ({', '.join(scenarios)}) hold no releases of Reef")
    held: list[Release] = []
    for ref, to in there.items():
        if (found := _MARK.fullmatch(ref)) is None or found[1] not in state.heads:
            continue
        with contextlib.suppress(MissingError):
            held += [remote.chain.get(to)] if found[2] == "candidates" else []
            state.marks[ref] = to
    whole = list(needed(remote.chain, [*(remote.chain.get(to) for to in state.heads.values()), *held]))
    why = ""
    for some in chunks([release.id for release in whole if list(large_files([release]))]):
        try:
            remote.transport.run("lfs", "fetch", NAME, *some, what="fetch large files from")
        except ChainError as error:  # what is missing is said below, by its name
            why = error.message
    for release in whole:
        _whole(remote, release, why)
    remote.took(large_files(whole))
    _leave(remote, state.heads)
    state.condition, state.at = "in step", time.time()
    remote.save(state)
    return sorted(state.heads)


def _leave(remote: Remote, heads: Mapping[str, str]) -> None:
    """Large files that stay at the remote are noted, as those that were pruned: nobody takes them for lost ones."""
    every = {digest for name, head in heads.items() for digest in large_files(remote.back(name, head, None))}
    remote.chain.objects.remove(sorted(each for each in every if not remote.chain.objects.place(each).exists()))


def fetch(remote: Remote, release_id: str) -> None:
    """Bring a release's large files here. ChainError when the remote does not give them."""
    remote.transport.run("lfs", "fetch", NAME, release_id, what="fetch large files from")
    _whole(remote, remote.chain.get(release_id))


def _whole(remote: Remote, release: Release, why: str = "") -> None:
    """A release's files are here, right, and on disk."""
    for part in release.parts:
        try:
            files = remote.chain.files(release.id, part)
        except ChainError as error:
            raise ChainError(
                f"the remote {hide(remote.url)} does not hold all of release {release.id} of {release.scenario}: "
                f"{why or error.message}; push it again from where it was made, with `reef push`"
            ) from None
        for file in files.values():
            if file.is_relative_to(remote.chain.path / "lfs"):
                for place in (file, file.parent, file.parent.parent):
                    settle(place)


def _refs(remote: Remote) -> dict[str, str]:
    """All refs here."""
    listing = remote.transport.run("for-each-ref", "--format=%(objectname) %(refname)", what="list the refs of")
    return {ref: to for to, ref in LINE.findall(listing)}
