"""The release chain in a bare git repository: publish, read, verify.

Knows: the order in which a release becomes durable (large files, git objects, then one compare-and-swap of the branch),
and how a retried publish is recognised.
Does not know: who serves what (`records.board`), how a candidate was made or judged, HTTP.

- The branch `refs/heads/<scenario>` moves only under the repository's mutex, from exactly the expected release.
- A process killed anywhere leaves the old head or the new one; what it wrote without a ref is never a release.
- Ids come from content and time, so a retry is recognised by the draft's digest, not by its id.
- Large files are removed by policy only (`prune`), under the mutex; a publish looks under the mutex that all it needs
  are there. Commits and `release.json` are never removed.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from reef.core.disk import advice
from reef.core.errors import ChainError, DigestError, InputError, MissingError, PrunedError, StaleHead
from reef.core.failpoint import failpoint
from reef.core.ids import is_scenario
from reef.core.nouns import Part, PartName, Release
from reef.releases import Draft, form, lfs, marker
from reef.releases.git import ZERO, Git, settle
from reef.releases.mend import mend

_PREFIX = re.compile(r"[0-9a-f]{7,40}")
_CACHED = 4096  # releases kept in memory
_UNSYNCED = ("HEAD", "config")
"""Files without which there is no repository, and which git itself does not sync."""
_SETTINGS = {
    "core.logAllRefUpdates": "always",
    "core.fsync": "all",
    "gc.auto": "0",  # unreferenced candidates are history too
    "maintenance.auto": "false",
    "receive.autogc": "false",
    "receive.denyDeletes": "true",
    "receive.denyNonFastForwards": "true",
}

log = logging.getLogger("reef.releases")


class GitChain:
    """A ReleaseChain at `path`. Call `open()` first. Blocking; safe from several threads and processes at once."""

    def __init__(self, path: Path, fetch: Callable[[str], None] | None = None) -> None:
        """`fetch` brings a release's large files here from where they were pushed to; None: there is no such place."""
        self._fetch = fetch
        self.git = Git(path)
        self.path = self.git.path
        self.objects = lfs.Objects(self.path)
        self._known: dict[str, Release] = {}

    # --- opening ------------------------------------------------------------------------------------------------------

    def open(self) -> list[str]:
        """Create the repository if it is missing, clear what killed processes left, and re-check every head.

        A head that cannot be read goes back to the last good release of its log. Returns what was repaired, in
        sentences (also logged). ChainError when the folder cannot be written or git is missing.
        """
        try:
            (self.path / "reef").mkdir(parents=True, exist_ok=True)
            self.git.adapt()
            with self.git.mutex() as mutex:
                said = [f"removed {name}, left by a process that was killed" for name in self.git.unlock()]
                said += self._create(mutex)
                self.objects.prepare()
                said += [sentence] if (sentence := marker.settle(self.path)) else []
                said += mend(self.git)
        except OSError as error:
            raise ChainError(f"the release chain at {self.path} cannot be opened: {error}; {advice(error)}") from error
        for sentence in said:
            log.warning("%s", sentence)
        return said

    def _create(self, mutex: int) -> list[str]:
        """Make the repository, or what a power cut took of it. Returns what was repaired."""
        hollow = [self.path / name for name in _UNSYNCED if _hollow(self.path / name)]
        made = marker.read(self.path) is not None
        if made and not hollow:
            return []
        for file in hollow:
            file.unlink(missing_ok=True)  # else `git init` takes it for one that somebody wrote
        # It may be half made by a killed process, or a clone: `git init` completes it and changes nothing else.
        init = ("init", "--quiet", "--bare", "--template=", "--initial-branch=default", str(self.path))
        self.git.run(*init, keep=[mutex])
        for name, value in _SETTINGS.items():
            self.git.run("config", name, value, keep=[mutex])
        for name in _UNSYNCED:
            settle(self.path / name)
        settle(self.path)
        if not made:
            return []
        for name in self.scenarios()[:1]:
            self._show(name, mutex)
        return [f"made {', '.join(file.name for file in hollow)} of {self.path} again, empty after a power cut"]

    # --- reading ------------------------------------------------------------------------------------------------------

    def head(self, scenario: str) -> Release | None:
        """The newest release of a scenario; None when it has no chain yet."""
        release_id = self._head(scenario)
        if release_id is None:
            return None
        try:
            return self.get(release_id)
        except MissingError:
            raise ChainError(f"the head of {scenario} is damaged; restarting Reef restores the last good one") from None

    def get(self, release_id: str, within: Collection[str] | None = None) -> Release:
        """A release or candidate by id (or unique prefix of 7 or more digits). MissingError when there is none.

        `within`: scenarios beside which there are no others, for whoever may not see those.
        """
        known = self._known.get(release_id)
        if known is not None and (within is None or known.scenario in within):
            return known
        if not _PREFIX.fullmatch(release_id):
            raise MissingError(f"{release_id!r} is not a release id: 7 to 40 digits of 0-9 and a-f", param="release_id")
        names = [release_id]
        if len(release_id) < 40:
            names = self.git.run("rev-parse", f"--disambiguate={release_id}", check=False).stdout.decode().split()
        loaded = [each for each in self._load(names) if each and (within is None or each.scenario in within)]
        found = [release for release in loaded if self._stands(release)]
        if len(found) > 1:
            raise MissingError(f"more than one release begins with {release_id}; give more digits", param="release_id")
        if not found:
            raise MissingError(f"no release {release_id}; `reef releases` lists them", param="release_id")
        return self._remember(found[0])

    def history(self, scenario: str, limit: int = 50, before: str | None = None) -> list[Release]:
        """Releases newest first, beginning at the head, or at the parent of `before`.

        MissingError when `before` is unknown or of another scenario.
        """
        start = self._own(scenario, before).parent if before else self._head(scenario)
        if start is None or limit < 1:
            return []
        ids = self.git.run("rev-list", "--first-parent", f"--max-count={limit}", start).stdout.decode().split()
        loaded = dict(zip(ids, self._load(ids), strict=True))
        if lost := [release_id for release_id, release in loaded.items() if release is None]:
            raise ChainError(f"release {lost[0]} of {scenario} cannot be read; the chain is damaged there")
        return [self._remember(release) for release in loaded.values() if release]

    def scenarios(self) -> list[str]:
        """Every scenario that has a branch."""
        listing = self.git.run("for-each-ref", "--format=%(refname:lstrip=2)", "refs/heads").stdout.decode()
        return sorted(listing.split())

    def candidates(self, scenario: str) -> list[Release]:
        """The candidates that still have a ref, newest first. Others stay readable by id: no commit is collected."""
        ids = [release_id for release_id, _ in self._candidates(scenario)]
        found = [self._remember(release) for release in self._load(ids) if release]
        return sorted(found, key=lambda release: release.created_at, reverse=True)

    def files(self, release_id: str, part: PartName) -> dict[str, Path]:
        """The part's files on disk, verified against their digests. DigestError names a file that does not match,
        PrunedError one that was removed to bound the disk. Large files not here are fetched, where they can be."""
        release = self.get(release_id)
        wanted = release.parts[part].files if part in release.parts else {}
        if self._fetch is not None and any(
            lfs.large(name, size) and not self.objects.place(sha256).exists() for name, (sha256, size) in wanted.items()
        ):
            self._fetch(release.id)
        return self._files(release, part)

    def _files(self, release: Release, part: PartName) -> dict[str, Path]:
        if part not in release.parts:
            raise MissingError(f"release {release.id} has no part {part}", param="part")
        wanted = release.parts[part].files
        found: dict[str, Path | None] = {}
        for name, (sha256, size) in wanted.items():
            label = f"{part}/{name} of release {release.id}"
            seek = self.objects.find if lfs.large(name, size) else self.objects.cached
            found[name] = seek(label, sha256, size)
        unread = [name for name, path in found.items() if path is None]
        stored = self.git.objects([f"{release.id}:{part}/{name}" for name in unread])
        for name, blob in zip(unread, stored, strict=True):
            label = f"{part}/{name} of release {release.id}"
            if blob is None:
                raise DigestError(f"{label} is missing from git; roll back to another release")
            found[name] = self.objects.small(label, blob[1], *wanted[name])
        return {name: path for name, path in found.items() if path is not None}

    def verify(self, scenario: str, *, remote: bool = False) -> list[str]:
        """Read every release of a scenario and all its files. Returns what is wrong, in sentences; empty: all good.

        Large files that were removed on purpose are not wrong; with a `remote`, neither are those of releases before
        the head that are not here.
        """
        wrong: list[str] = []
        start = self._head(scenario)
        ids = self.git.run("rev-list", "--first-parent", start).stdout.decode().split() if start else []
        for place, release_id in enumerate(ids):
            try:
                (release,) = self._load([release_id])
            except ChainError as error:
                wrong.append(error.message)
                continue
            if release is None:
                wrong.append(f"release {release_id} cannot be read")
                continue
            if release.seq != len(ids) - 1 - place or release.scenario != scenario:
                wrong.append(f"release {release_id} says it is {release.scenario} {release.seq}")
            wrong += self._spoilt(release, absent=remote and place > 0)
        for release_id, _ in self._candidates(scenario):
            try:
                (candidate,) = self._load([release_id])
                wrong += self._spoilt(candidate) if candidate else [f"candidate {release_id} cannot be read"]
            except ChainError as error:
                wrong.append(error.message)
        return wrong

    def _spoilt(self, release: Release, *, absent: bool = False) -> list[str]:
        """What is wrong with the files of one release. Small ones are read from git itself, not from their copies.
        `absent`: large ones need not be here."""
        wrong = []
        files = [(part, name, *held) for part in release.parts for name, held in release.parts[part].files.items()]
        stored = self.git.objects([f"{release.id}:{part}/{name}" for part, name, _, _ in files])
        for (part, name, sha256, size), blob in zip(files, stored, strict=True):
            label = f"{part}/{name} of release {release.id}"
            try:
                if blob is None:
                    raise DigestError(f"{label} is missing from git; roll back to another release")
                if lfs.large(name, size):
                    if absent and not self.objects.place(sha256).exists():
                        continue
                    self.objects.find(label, sha256, size)
                else:
                    lfs.match(label, blob[1], sha256, size)
            except PrunedError:
                continue
            except ChainError as error:
                wrong.append(error.message)
        return wrong

    # --- publishing ---------------------------------------------------------------------------------------------------

    def publish(self, scenario: str, draft: Draft, expected: str | None) -> Release:
        """Make a release. `expected` is the head it must replace (None: the chain must not exist yet).

        With operation `candidate` the commit goes under refs/reef/<scenario>/candidates/<id>, its parent is
        `draft.base`, `expected` is not looked at and the head does not move.

        A draft that was published on this parent before is answered with that release, which need not be the head any
        more: what to serve is what `head` says. Raises StaleHead (with the present head) when the head is not the
        expected one; InputError for a part that may not enter the chain; MissingError for an unknown base; ChainError
        when the disk is full or git fails, and then the head has not moved.
        """
        if not is_scenario(scenario):
            raise InputError(f"{scenario!r} cannot name a scenario", param="scenario")
        candidate = draft.operation == "candidate"
        if candidate and not (draft.base and len(draft.parts) == 1):
            raise InputError("a candidate changes exactly one part of the release it is based on", param="base")
        parts = _measure(draft)
        base = self._own(scenario, draft.base) if draft.base else None
        try:
            parent = base if candidate else self.get(expected) if expected else None
        except MissingError:
            raise self._stale(scenario, expected) from None
        release = form.compose(scenario, draft, parent, base, parts, time.time())
        if not candidate and self._head(scenario) != expected:
            return self._again(scenario, release, expected)
        if candidate and (again := self._proposed(scenario, release)):
            return again
        page = form.write(release)
        form.read("", release.parent, page)  # what would not be read again must not become a head
        for part, new in draft.parts.items():
            for name, source in new.files.items():
                sha256, size = parts[part].files[name]
                if lfs.large(name, size):
                    self.objects.store(f"{part}/{name}", source, sha256, size)
        commit = self._commit(draft, release, (base or parent), page)
        failpoint("releases.after_objects")
        made = form.read(commit, release.parent, page)
        ref = _candidate(scenario, commit) if candidate else f"refs/heads/{scenario}"
        with self.git.mutex() as mutex:
            self._secure(release, draft)
            failpoint("releases.before_ref")
            moved = self.git.move_ref(
                ref, commit, ZERO if candidate else expected or ZERO, f"{release.operation} {release.seq}", mutex
            )
            failpoint("releases.after_ref")
            if moved and not candidate and expected is None:
                self._show(scenario, mutex)
        return self._remember(made) if moved else self._again(scenario, release, expected)

    def _secure(self, release: Release, draft: Draft) -> None:
        """Every large file of a release is there; the caller holds the mutex, so that none goes before the ref moves.

        One that was pruned since this publish began is stored again. PrunedError or DigestError for a part that was
        carried over and is not whole.
        """
        for part, name, size in _all(release.parts):
            sha256 = release.parts[part].files[name][0]
            if not lfs.large(name, size) or self.objects.place(sha256).exists():
                continue
            if part in draft.parts:
                self.objects.store(f"{part}/{name}", draft.parts[part].files[name], sha256, size)
            else:
                self.objects.find(f"{part}/{name}, which this release carries over,", sha256, size)

    def _commit(self, draft: Draft, release: Release, source: Release | None, page: bytes) -> str:
        """Write the blobs, trees and commit of a release; returns the commit's id. No ref points to it yet."""
        entries: dict[PartName, dict[str, int]] = {}  # folder -> file name -> place in `blobs`
        blobs = [page, form.attributes(_all(release.parts))]
        for part, new in draft.parts.items():
            entries[part] = {}
            for name, origin in new.files.items():
                sha256, size = release.parts[part].files[name]
                if lfs.large(name, size):
                    data = lfs.pointer(sha256, size)
                else:
                    data = origin if isinstance(origin, bytes) else origin.read_bytes()
                    if lfs.measure(name, data) != (sha256, size):
                        raise ChainError(f"{part}/{name} changed while it was being published; publish it again")
                entries[part][name] = len(blobs)
                blobs.append(data)
        ids = self.objects.blobs(self.git, blobs)
        failpoint("releases.blobs_written")
        top = [f"100644 blob {ids[0]}\trelease.json", f"100644 blob {ids[1]}\t.gitattributes"]
        for part, files in entries.items():
            tree = self.git.tree([f"100644 blob {ids[place]}\t{name}" for name, place in files.items()])
            top.append(f"040000 tree {tree}\t{part}")
        if source and (carried := [part for part in release.parts if part not in draft.parts]):
            # A part without files has no entry to find: git keeps no empty folders.
            top += self.git.run("ls-tree", source.id, *carried).stdout.decode().splitlines()
        tree = self.git.tree(top)
        failpoint("releases.trees_written")
        date = f"@{int(release.created_at)} +0000"
        parent = ("-p", release.parent) if release.parent else ()
        return self.git.line(
            "commit-tree",
            tree,
            *parent,
            data=form.message(release),
            env={"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date},
        )

    def _again(self, scenario: str, release: Release, expected: str | None) -> Release:
        """The release that followed `expected`, if it came of this same draft; else raises StaleHead."""
        head = self._head(scenario)
        if head is None:
            raise self._stale(scenario, expected)
        after = ("--ancestry-path", f"{expected}..{head}") if expected else ("--max-parents=0", head)
        later = self.git.run("rev-list", "--first-parent", *after, check=False).stdout.decode().split()
        if later and form.digest(made := self.get(later[-1])) == form.digest(release):
            return made
        raise self._stale(scenario, expected)

    def _stale(self, scenario: str, expected: str | None) -> StaleHead:
        head = self._head(scenario)
        now = head or "not there yet"
        was = f"not {expected}" if expected else "so the chain cannot be created"
        return StaleHead(f"the head of {scenario} is {now}, {was}; look at it and decide again", head=head)

    # --- candidates ---------------------------------------------------------------------------------------------------

    def _candidates(self, scenario: str) -> list[tuple[str, str | None]]:
        """(id, draft's digest) of the candidates that have a ref, oldest first as far as seconds tell."""
        listing = self.git.run(
            "for-each-ref",
            "--sort=creatordate",
            "--format=%(objectname) %(contents:body)%00",
            f"refs/reef/{scenario}/candidates",
        ).stdout.decode()
        entries = [entry.strip() for entry in listing.split("\0") if entry.strip()]
        return [(entry[:40], form.drafted(entry[41:])) for entry in entries]

    def _proposed(self, scenario: str, release: Release) -> Release | None:
        """The candidate that this same draft has made already."""
        digest = form.digest(release)
        return next((self.get(known) for known, drafted in self._candidates(scenario) if drafted == digest), None)

    # --- pieces -------------------------------------------------------------------------------------------------------

    def _head(self, scenario: str) -> str | None:
        return self.git.read_ref(f"refs/heads/{scenario}") if is_scenario(scenario) else None

    def _own(self, scenario: str, release_id: str) -> Release:
        return self.get(release_id, [scenario])

    def _load(self, ids: Iterable[str]) -> list[Release | None]:
        """The releases with these full ids, None for one that is no release or cannot be read."""
        wanted = list(ids)
        fresh = [release_id for release_id in wanted if release_id not in self._known]
        names = [name for release_id in fresh for name in (f"{release_id}^{{commit}}", f"{release_id}:release.json")]
        stored = self.git.objects(names)
        loaded: dict[str, Release | None] = {}
        for release_id, commit, page in zip(fresh, stored[::2], stored[1::2], strict=True):
            loaded[release_id] = None
            if commit and page:
                found = re.search(rb"^parent ([0-9a-f]{40})$", commit[1].partition(b"\n\n")[0], re.MULTILINE)
                loaded[release_id] = form.read(release_id, found[1].decode() if found else None, page[1])
        return [self._known.get(release_id) or loaded[release_id] for release_id in wanted]

    def _stands(self, release: Release) -> bool:
        """Whether this is a release, not what a lost race or a killed publish left behind."""
        if release.operation == "candidate" or release.id == self._head(release.scenario):
            return True
        branch = f"refs/heads/{release.scenario}"
        return self.git.run("merge-base", "--is-ancestor", release.id, branch, check=False).returncode == 0

    def _remember(self, release: Release) -> Release:
        if len(self._known) >= _CACHED:
            self._known = {}
        self._known[release.id] = release
        return release

    def _show(self, scenario: str, mutex: int) -> None:
        """Let an ordinary clone check out the first scenario, when HEAD names none that exists."""
        if self.git.run("rev-parse", "--verify", "--quiet", "HEAD", check=False).returncode:
            self.git.run("symbolic-ref", "HEAD", f"refs/heads/{scenario}", keep=[mutex], check=False)
            settle(self.path / "HEAD")
            settle(self.path)


def _hollow(file: Path) -> bool:
    """Whether a power cut took a file's bytes, or all of it."""
    return not file.exists() or not file.read_bytes().strip(b"\0 \n")


def _measure(draft: Draft) -> dict[PartName, Part]:
    parts: dict[PartName, Part] = {}
    for part, new in draft.parts.items():
        form.check(part, new)
        files = {name: lfs.measure(f"{part}/{name}", source) for name, source in sorted(new.files.items())}
        parts[part] = Part(new.kind, files, new.meta)
    return parts


def _all(parts: Mapping[PartName, Part]) -> list[tuple[PartName, str, int]]:
    return [(part, name, size) for part, held in parts.items() for name, (_, size) in held.files.items()]


def _candidate(scenario: str, release_id: str) -> str:
    return f"refs/reef/{scenario}/candidates/{release_id}"
