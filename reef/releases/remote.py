"""A remote for the chain: an ordinary git repository with git-lfs that holds every release a second time.

Knows: what is there already, and the order in which a push is safe (large files first, then refs, each only from the
very value that was seen there).
Does not know: how the remote is reached (`transport`), when to push, whom to tell, records, or which candidates wait
for a person (`marks` come from outside).

- A branch of the remote moves only forward along our own releases. Where it holds another release, nothing is written.
- What a push needs to know is asked of the remote each time, so one that was killed anywhere is repaired by the next.
- `reef/remote.json` is what `reef status` shows; `reef/pushed` has the large files the remote took, one digest a line.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from reef.core import disk
from reef.core.errors import ChainError, ReefError
from reef.core.failpoint import failpoint
from reef.core.ids import is_scenario
from reef.core.nouns import Json, Release
from reef.releases import lfs
from reef.releases.chain import GitChain
from reef.releases.git import settle
from reef.releases.transport import NAME, Transport, hide

HEADS, OURS = "refs/heads/", "refs/reef/"
_MANY = 200  # names on one command line
_PAGE = 100
LINE = re.compile(r"([0-9a-f]{40})\s+(refs/\S+)")
_T = TypeVar("_T")

Condition = Literal["waiting", "in step", "unreachable", "refused", "other releases"]


class State(msgspec.Struct):
    """What is known of the remote. `heads` and `marks` are what it was last seen to hold of ours."""

    url: str  # without a password
    condition: Condition = "waiting"
    heads: dict[str, str] = {}  # scenario -> release
    numbers: dict[str, int] = {}  # scenario -> that release's number
    marks: dict[str, str] = {}  # other refs -> what they point to
    others: dict[str, str] = {}  # scenario -> the release there that is none of ours
    at: float | None = None  # when everything was there last
    error: str | None = None  # what to do about it, too
    since: float | None = None  # the outage's begin
    tries: int = 0  # failures in a row
    told: bool = False  # whoever is to be told of the outage was
    absent: int = 0  # large files of old releases that are not on this disk and not known to be there
    adopt: bool = False  # this chain came from the remote, and the record store does not know of it yet


@dataclass(frozen=True, slots=True)
class Move:
    """A ref of the remote: from what was seen there to what it is to be (None: not there)."""

    ref: str
    old: str | None
    new: str | None


class Remote:
    """The remote at `url` of the chain at `path`. Blocking; pushes of several processes wait for each other."""

    def __init__(self, path: Path, url: str) -> None:
        self._path = path.absolute()
        self.url = url
        self.chain = GitChain(self._path)
        self.transport = Transport(self._path, url)
        self._kept: dict[bytes, str] = {}
        self._known: tuple[tuple[int, int, int] | None, set[str]] = (None, set())

    # --- pushing ------------------------------------------------------------------------------------------------------

    def push(
        self,
        marks: Mapping[str, str],
        *,
        tell: Callable[[Release], None] = lambda release: None,
        sure: bool = False,
    ) -> State:
        """Bring the remote to every scenario's head, and `marks` (refs below refs/reef/) to what they are to be.

        `tell` hears of each release that is there now and was not before; after a crash it may hear of it again.
        Without `sure` a remote that was in step is not asked when nothing changed here. Never raises what the remote
        did: that is in the state, which is on disk.
        """
        with self._alone():
            state = read(self._path) or State("")
            if state.url != hide(self.url):
                self._forget()  # before the state names the new address: the old one's list would be taken for its own
                state = State(hide(self.url))
            try:
                heads = self._local()
                same = (heads, dict(marks)) == (state.heads, state.marks)
                if state.condition == "in step" and same and not sure:
                    return state
                self._push(state, heads, marks, tell)
            except ReefError as error:
                state.error = error.message
                if state.condition not in ("unreachable", "other releases"):
                    state.condition = "refused"
            failed = state.condition != "in step"
            state.tries = state.tries + 1 if failed else 0
            state.since = (state.since or time.time()) if failed else None
            state.told = state.told and failed
            self.save(state)
            return state

    def pushed(self, digest: str) -> bool:
        """Whether the remote took the large file with this sha256. Only what it confirmed counts."""
        state = read(self._path)
        return state is not None and state.url == hide(self.url) and digest in self._taken()

    def stop(self) -> None:
        """End what is running, from another thread; the next push, of another process, begins anew."""
        self.transport.stop()

    def at(self, ref: str) -> str | None:
        """What a ref points to here."""
        return self.chain.git.read_ref(ref)

    def keep(self, text: bytes) -> str:
        """Store a text here as a blob that a mark can point to; its id."""
        if text not in self._kept:
            self._kept = {**self._kept, text: self.chain.git.line("hash-object", "-w", "--stdin", data=text)}
        return self._kept[text]

    def kept(self, blob: str) -> bytes | None:
        """A text that was kept; None when there is none."""
        found = self.chain.git.objects([blob])[0] if blob else None
        return found[1] if found else None

    def save(self, state: State) -> None:
        """Write the state down, as `push` does."""
        place = self._path / "reef" / "remote.json"
        temporary = place.with_name(f"remote-{os.getpid()}.json")
        try:
            temporary.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=1) + b"\n")
            settle(temporary)
            temporary.replace(place)
        except OSError as error:
            raise ChainError(f"cannot write {place}: {error.strerror}; {disk.advice(error)}") from None

    def _push(
        self, state: State, heads: Mapping[str, str], marks: Mapping[str, str], tell: Callable[[Release], None]
    ) -> None:
        state.condition = "unreachable"
        there = self.there()
        state.condition = "refused"
        news = self._news(state, heads, there)
        mine = {ref: to for ref, to in marks.items() if _scenario(ref) not in state.others}
        fresh = [to for ref, to in mine.items() if state.marks.get(ref) != to and "/candidates/" in ref]
        needed_there = [found[0] for found in news.values() if found] + [self.chain.get(to) for to in fresh]
        absent = self._send(needed_there, [release for found in news.values() for release in found[1:]])
        failpoint("remote.after_lfs")
        moves = [Move(HEADS + name, there.get(HEADS + name), heads[name]) for name in news]
        for ref in dict.fromkeys((*mine, *state.marks)):
            if state.marks.get(ref) != mine.get(ref) and _scenario(ref) not in state.others:
                moves.append(Move(ref, there.get(ref), mine.get(ref)))
        refused = self._move([move for move in moves if move.old != move.new])
        failpoint("remote.after_refs")
        wrong: list[str] = []
        for name in news:
            if (why := refused.get(HEADS + name)) is None:
                for release in reversed(news[name]):
                    tell(release)
                state.heads[name] = heads[name]
                state.numbers[name] = news[name][0].seq if news[name] else state.numbers[name]
            elif "stale info" in why or "fetch first" in why:  # somebody was faster, since we looked
                state.others[name] = "a newer one"
            else:
                wrong.append(f"{name}: {why}")
        for move in moves:
            if move.ref.startswith(OURS):
                if (why := refused.get(move.ref)) is not None and move.new is not None:
                    wrong.append(f"{move.ref}: {why}")
                    continue
                state.marks.pop(move.ref, None)  # one that it will not delete stays there, which does no harm
                if move.new is not None:
                    state.marks[move.ref] = move.new
        state.absent += absent
        if wrong:
            raise ChainError(f"the remote {state.url} refused {'; '.join(wrong)}")
        if state.others:
            state.condition, state.error = "other releases", _others(state)
        else:
            state.condition, state.error, state.at = "in step", None, time.time()

    def _news(self, state: State, heads: Mapping[str, str], there: Mapping[str, str]) -> dict[str, list[Release]]:
        """The releases of each scenario that the remote is not known to hold whole, newest first. Fills `others`."""
        state.others = {}
        news: dict[str, list[Release]] = {}
        for name, head in heads.items():
            known, theirs = state.heads.get(name), there.get(HEADS + name)
            found = list(self.back(name, head, known))
            if theirs in (known, *(release.id for release in found)) or (known is None and theirs is None):
                news[name] = found
            elif theirs is None or theirs in {release.id for release in self.back(name, head, None)}:
                # It held more than it does now: what else it lost cannot be known, so everything is offered again.
                state.heads, state.marks, state.absent = {}, {}, 0
                self._forget()
                return self._news(state, heads, there)
            else:
                state.others[name] = theirs
        return news

    def back(self, scenario: str, head: str, known: str | None) -> Iterator[Release]:
        """From a head back to the release before all, or to the one after `known`."""
        if head == known:
            return
        yield self.chain.get(head)
        before = head
        while page := self.chain.history(scenario, _PAGE if known is None else 4, before):
            for release in page:
                if release.id == known:
                    return
                yield release
            before = page[-1].id

    def _send(self, newest: Sequence[Release], older: Iterable[Release]) -> int:
        """Large files first: a ref is never there before what it needs. What the server has, it is not sent again.

        Returns how many of the older releases' are not here (they were pruned, or never fetched) and so are not sent.
        """
        taken = self._taken()
        wanted = [digest for digest in dict.fromkeys(large_files([*newest, *older])) if digest not in taken]
        here = [digest for digest in wanted if self.chain.objects.place(digest).exists()]
        for release in newest:
            if lost := set(large_files([release])) - taken - set(here):
                raise ChainError(f"release {release.id} is not pushed: its large file {min(lost)} is missing here")
        for some in chunks(here):
            self.transport.run("lfs", "push", "--object-id", NAME, *some, what="send large files to")
        self.took(here)
        return len(wanted) - len(here)

    def _move(self, moves: Sequence[Move]) -> dict[str, str]:
        """Move refs of the remote, each from the value that was seen there. Returns why those that failed did."""
        refused: dict[str, str] = {}
        for some in chunks(moves):
            leases = [f"--force-with-lease={move.ref}:{move.old or ''}" for move in some]
            specs = [f"{move.new or ''}:{move.ref}" for move in some]
            command = ("push", "--porcelain", "--no-verify", *leases, NAME, *specs)
            said = self.transport.run(*command, what="push to", partly=True)
            results = [line.split("\t") for line in said.splitlines() if line.count("\t") == 2]
            refused |= {spec.partition(":")[2]: why for flag, spec, why in results if flag == "!"}
        return {ref: hide(why) for ref, why in refused.items()}

    def _local(self) -> dict[str, str]:
        """Every scenario's head here, without starting git where the refs are plain files."""
        found: dict[str, str] = {}
        for file in sorted((self._path / "refs/heads").glob("*")):
            with contextlib.suppress(OSError):
                if is_scenario(file.name) and LINE.match(f"{file.read_text().strip()} refs/x"):
                    found[file.name] = file.read_text().strip()
        if (self._path / "packed-refs").exists():
            listing = self.transport.run(
                "for-each-ref", "--format=%(objectname) %(refname)", HEADS, what="list the refs of"
            )
            found |= {ref.removeprefix(HEADS): to for to, ref in LINE.findall(listing)}
        return found

    def there(self) -> dict[str, str]:
        """The remote's refs that concern us."""
        listing = self.transport.run("ls-remote", NAME, f"{HEADS}*", f"{OURS}*", what="reach")
        return {ref: to for to, ref in LINE.findall(listing)}

    # --- pieces -------------------------------------------------------------------------------------------------------

    @property
    def _pushed_path(self) -> Path:
        return self._path / "reef" / "pushed"

    def _taken(self) -> set[str]:
        """What the remote took. Another process may have added to it, or begun anew."""
        try:
            stat = self._pushed_path.stat()
            stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if self._known[0] != stamp:
                self._known = stamp, set(self._pushed_path.read_text().split())
            return self._known[1]
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise ChainError(f"cannot read {self._pushed_path}: {error.strerror}; {disk.advice(error)}") from None

    def took(self, digests: Iterable[str]) -> None:
        """Note that the remote has these. ChainError when it cannot be written down."""
        new = [digest for digest in dict.fromkeys(digests) if digest not in self._taken()]
        if not new:
            return
        try:
            with self._pushed_path.open("a") as file:
                file.write("".join(f"\n{digest}\n" for digest in new))  # a line that was cut off before is none
        except OSError as error:
            raise ChainError(f"cannot write {self._pushed_path}: {error.strerror}; {disk.advice(error)}") from None
        settle(self._pushed_path)

    def _forget(self) -> None:
        """Begin anew: of what the remote took nothing is known."""
        try:
            self._pushed_path.unlink(missing_ok=True)
        except OSError as error:
            raise ChainError(f"cannot remove {self._pushed_path}: {error.strerror}; {disk.advice(error)}") from None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One push at a time. Git's children do not hold the lock: some of them (ssh, credential caches) stay."""
        lock = self._path / "reef" / "push.lock"
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ChainError(f"cannot open {lock}: {error.strerror}; {disk.advice(error)}") from None
        try:
            while True:
                if self.transport.stopped:
                    raise ChainError("the push was stopped")
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(0.1)
            yield
        finally:
            os.close(descriptor)


def view(state: State, heads: Mapping[str, str]) -> dict[str, Json]:
    """For the status: `heads` are the scenarios somebody may see, with what they serve now. Who does not see all of
    them does not read what is wrong with others."""
    there = {
        name: {
            "release_id": state.heads.get(name),
            "seq": state.numbers.get(name),
            "behind": state.heads.get(name) != head,
            "other": state.others.get(name),
        }
        for name, head in sorted(heads.items())
    }
    return {
        "url": state.url,
        "state": state.condition,
        "in_step_at": state.at,
        "failing_since": state.since,
        "failures": state.tries,
        "error": state.error if state.heads.keys() | state.others.keys() <= heads.keys() else None,
        "absent_files": state.absent,
        "scenarios": there,
    }


def read(path: Path) -> State | None:
    """What is known of the remote of the chain at `path`; None when nothing is."""
    try:
        return msgspec.json.decode((path / "reef" / "remote.json").read_bytes(), type=State)
    except (OSError, msgspec.MsgspecError):
        return None


def _others(state: State) -> str:
    names = ", ".join(f"{name} (there: {release[:12]})" for name, release in sorted(state.others.items()))
    return (
        f"the remote {state.url} has other releases of {names}, and they stay: another Reef publishes there. Nothing "
        "of these scenarios is pushed. Stop one of the two; then either move those branches of the remote to another "
        "name, or go on from them: stop this server, move its state folder away, and start it"
    )


def large_files(releases: Iterable[Release]) -> Iterator[str]:
    """The digests of the large files of releases."""
    for release in releases:
        for part in release.parts.values():
            for name, (digest, size) in part.files.items():
                if lfs.large(name, size):
                    yield digest


def _scenario(ref: str) -> str:
    """Whose ref `refs/reef/<scenario>/…` is."""
    return ref.removeprefix(OURS).partition("/")[0]


def chunks(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    return (items[start : start + _MANY] for start in range(0, len(items), _MANY))
