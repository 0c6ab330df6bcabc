"""The chain's remote at work: follow the heads and push, begin from the remote alone, and `reef push`.

Knows: when to push, what waits for a person or is pinned or archived, whom to tell. Does not know: git.

- `follow` is a task of the learner's process. Serving and learning never wait for it.
- `begin` and `adopt` run before anything else does: a state folder without releases takes the remote's. Records do not
  travel, so the new store's event log goes on after every cursor in the chain: those count another store's events.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import logging
import math
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from reef.cli import options, show
from reef.config import Settings
from reef.core.errors import ConfigError, MissingError, ReefError, StoreError
from reef.core.nouns import Json, Release
from reef.releases import clone, remote
from reef.releases.remote import Remote, State
from reef.releases.transport import hide

if TYPE_CHECKING:
    from reef.records.board import Board
    from reef.releases.chain import GitChain
    from reef.scenario.audit import Audit, Ruling

HELD: Final = 100
"""Held candidates of a scenario that are pushed."""
LOOK: Final = 1.0
"""Seconds between two looks at the board; the remote is asked only when something changed."""
PAUSE: Final = 2.0
LONGEST: Final = 300.0
PATIENCE: Final = 3
"""Failures in a row until an outage is told: a short one is nobody's business."""

log = logging.getLogger(__name__)


def address(settings: Settings) -> str | None:
    """`releases.remote` as git is given it: a path does not depend on where git runs."""
    url = settings.releases.remote
    if url is None or "://" in url or re.match(r"[^/]+:", url):
        return url
    return str(Path(url).expanduser().absolute())


def fetcher(settings: Settings) -> Callable[[str], None] | None:
    """What brings a release's large files here when they are not; None without a remote."""
    url = address(settings)
    return functools.partial(clone.fetch, Remote(settings.reef.state_dir / "releases.git", url)) if url else None


def shown(settings: Settings) -> Callable[[Mapping[str, str]], dict[str, Json] | None]:
    """For the status: what is known of the remote, for scenarios and what they serve; None without a remote."""

    def look(serving: Mapping[str, str]) -> dict[str, Json] | None:
        if (url := address(settings)) is None:
            return None
        found = remote.read(settings.reef.state_dir / "releases.git")
        return remote.view(found if found is not None and found.url == hide(url) else State(hide(url)), serving)

    return look


# --- pushing ----------------------------------------------------------------------------------------------------------


async def follow(url: str, state: Path, board: Board) -> None:
    """Push what changed, until cancelled. A push that failed is made again after a pause that grows up to LONGEST."""
    one = Remote(state / "releases.git", url)
    seen, again, sure, blocked = -1, 0.0, True, False
    try:
        while True:
            try:
                version = await asyncio.to_thread(board.version)
                if (version != seen and not blocked) or time.monotonic() >= again:
                    found = await asyncio.to_thread(push, one, state, board, sure=sure)
                    seen, sure = version, found.condition != "in step"
                    blocked = found.condition in ("unreachable", "refused")
                    pause = min(LONGEST, PAUSE * 2.0 ** min(found.tries - 1, 16)) if sure else math.inf
                    again = time.monotonic() + pause
            except (ReefError, OSError) as error:
                log.warning("the remote is not looked after now: %s", error)
                blocked, sure, again = True, True, time.monotonic() + LONGEST / 10
            await asyncio.sleep(LOOK)
    finally:
        one.stop()


def push(one: Remote, state: Path, board: Board, *, sure: bool) -> State:
    """One push, told in the journal. See `Remote.push`."""
    from reef.cli import assemble
    from reef.records.journal import Journal

    journal = Journal(board)

    def tell(release: Release) -> None:
        detail = {"remote": hide(one.url), "seq": release.seq}
        journal.tell(release.scenario, "push", release.id, actor="reef", detail=detail)

    found = one.push(_marks(one, board, assemble.open_audit(state)), tell=tell, sure=sure)
    lasting = found.condition == "other releases" or found.tries >= PATIENCE
    if found.condition != "in step" and lasting and not found.told:
        log.warning("%s", found.error)
        serving = {name: at.release_id for name, at in board.all().items()}
        behind = [name for name, head in serving.items() if found.heads.get(name) != head]
        for name in behind or list(serving)[:1]:
            detail = {"state": found.condition, "since": found.since, "pushed": found.heads.get(name)}
            reason = found.error or found.condition
            journal.tell(name, "trouble", serving[name], actor="reef", reason=reason, detail=detail, once=False)
        found.told = True
        one.save(found)
    return found


def _marks(one: Remote, board: Board, audit: Audit) -> dict[str, str]:
    """What the remote is told besides heads: held candidates with the row that held them, pins, what is archived, and
    what a request set."""
    from reef.records.journal import Journal

    journal = Journal(board)
    with board.look() as db:
        rows = db.execute("SELECT name, settings, archived_at FROM scenarios").fetchall()
    marks: dict[str, str] = {}
    for name, settings, archived in rows:
        if (head := one.at(f"refs/heads/{name}")) is not None:
            marks |= {f"refs/reef/{name}/archived": head} if archived is not None else {}
            marks |= {f"refs/reef/{name}/settings": one.keep(settings.encode())} if settings != "{}" else {}
    for name in sorted({*(name for name, _, _ in rows), *board.all()}):
        if (pin := journal.pinned(name)) is not None:
            marks[f"refs/reef/{name}/pinned"] = pin.release_id
        for row in _held(audit, name):
            ref = f"refs/reef/{name}/candidates/{row.candidate}"
            if row.candidate is not None and one.at(ref) is not None:
                marks[ref] = row.candidate
                marks[f"refs/reef/{name}/held/{row.candidate}"] = one.keep(msgspec.json.encode(row))
    return marks


def _held(audit: Audit, scenario: str) -> list[Ruling]:
    """The rows of candidates that wait for a person."""
    try:
        rows = audit.newest(scenario, HELD, ("hold",))
        return [row for row in rows if row.candidate and audit.about(scenario, [row.candidate])[0] == row]
    except StoreError:  # nothing was learnt here yet
        return []


# --- beginning --------------------------------------------------------------------------------------------------------


def begin(settings: Settings) -> None:
    """A state folder without releases takes those of `releases.remote`, when there are any."""
    if (url := address(settings)) is not None:
        names = clone.begin(settings.reef.state_dir / "releases.git", url)
        if names:
            log.warning("the releases of %s come from the remote %s", ", ".join(names), hide(url))


def adopt(state: Path, chain: GitChain, board: Board) -> None:
    """Let the record store and the learner know of a chain that came from a remote. Cut short, it is done again."""
    from reef.cli import assemble, numbers
    from reef.records.journal import Journal
    from reef.scenario import serving
    from reef.scenario.audit import Ruling as Row
    from reef.scenario.learnt import history

    path = state / "releases.git"
    found = remote.read(path)
    if found is None or not found.adopt:
        return
    one = Remote(path, found.url)
    releases = [release for name in found.heads for release in history(chain, name)]
    releases += [candidate for name in found.heads for candidate in chain.candidates(name)]
    numbers.skip(board, "events", numbers.furthest(releases))
    for name in found.heads:
        given: dict[str, Any] = {}
        with contextlib.suppress(msgspec.MsgspecError):
            text = one.kept(found.marks.get(f"refs/reef/{name}/settings", "")) or b"{}"
            given = msgspec.json.decode(text, type=dict[str, Any])
        board.create_scenario(name, given)
    for release in sorted(releases, key=lambda release: release.seq):
        if release.operation != "candidate":
            serving.tell(release, board)
    for ref, to in found.marks.items():
        name, kind = ref.split("/")[2:4]
        try:
            if kind == "held" and (row := one.kept(to)) is not None:
                assemble.hold(state, name, msgspec.json.decode(row, type=Row))
            elif kind == "pinned":
                reason = "pinned where the releases come from"
                Journal(board).pin(name, chain.get(to).id, actor="reef", reason=reason)
            elif kind == "archived" and name in board.scenarios():
                board.archive(name)
        except (MissingError, msgspec.MsgspecError) as error:
            log.warning("%s of the remote is left out: %s", ref, error)
    found.adopt = False
    one.save(found)


# --- the command ------------------------------------------------------------------------------------------------------


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "push",
        help="bring releases.remote to the newest releases now",
        description="Push every scenario's releases to releases.remote now, with or without a running server (which "
        "does it by itself). Exit code 1 when the remote is not in step after it.",
    )
    options.configuration(parser)
    options.reading(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from reef.cli import assemble

    settings = options.load(args).settings
    state, url = settings.reef.state_dir, address(settings)
    if url is None:
        raise ConfigError("there is no remote to push to; give one with --releases.remote URL", param="releases.remote")
    if not (state / "releases.git").is_dir():
        raise StoreError(f"{state} holds no releases; name the state folder with --reef.state_dir FOLDER")
    board = assemble.open_board(state)
    try:
        found = push(Remote(state / "releases.git", url), state, board, sure=True)
        seen = remote.view(found, {name: at.release_id for name, at in board.all().items()})
    finally:
        board.close()
    if args.json:
        show.dump(seen)
    else:
        print("\n".join(lines(seen)))
    return 0 if found.condition == "in step" else 1


def lines(seen: Mapping[str, Json]) -> list[str]:
    """The remote's state for a person."""
    told = [f"remote {seen['url']}: {seen['state']}"]
    if seen["failing_since"]:
        told[0] += f" since {show.when(seen['failing_since'])} ({seen['failures']} failures)"
    elif seen["in_step_at"]:
        told[0] += f", at {show.when(seen['in_step_at'])}"
    for name, item in seen["scenarios"].items():
        if item["behind"]:
            upto = f"up to release {item['seq']} ({item['release_id'][:10]})" if item["release_id"] else "nothing"
            told.append(f"  {name}: pushed {upto}")
    if seen["error"]:
        told.append(f"  {seen['error']}")
    if seen["absent_files"]:
        told.append(f"  {seen['absent_files']} large files of old releases are neither here nor known to be there")
    return told
