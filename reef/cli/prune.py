"""`reef prune`: remove the large files that the policy lets go, or say what that would be. The learner does it too.

Knows: where the policy is, who pinned what, which candidates wait for a person, whether there is a remote.
Does not know: what a release needs, or how a removal is made safe (`releases.prune`). Works with a server and without.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reef.cli import options, show
from reef.config import Settings
from reef.core.errors import MissingError, ReefError
from reef.releases.prune import Policy, Pruned, prune

if TYPE_CHECKING:
    from reef.records.board import Board
    from reef.releases.chain import GitChain

PERIOD = 60.0
"""Seconds between two looks of `tend` at whether anything was released or proposed."""
AT_LEAST = 60
"""Looks after which it prunes although nothing was: what killed processes left grows old."""

log = logging.getLogger(__name__)


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "prune",
        help="free disk: remove large files of old releases",
        description="Remove the large files that releases.keep and releases.keep_candidates let go. Pinned releases, "
        "candidates that wait for a person and what a kept release needs stay, and so does all history. A running "
        "server does this by itself.",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")
    options.configuration(parser)
    options.reading(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from reef.cli import assemble

    settings = options.load(args).settings
    state = settings.reef.state_dir
    if not (state / "releases.git").is_dir():
        raise MissingError(f"{state} holds no releases; name the folder with --reef.state_dir FOLDER")
    chain, board = assemble.open_chain(state), assemble.open_board(state)
    try:
        done = sweep(settings, chain, board, dry=args.dry_run, actor="operator")
    finally:
        board.close()
    return show.dump(_json(done, args.dry_run)) if args.json else _print(done, settings, args.dry_run)


def sweep(settings: Settings, chain: GitChain, board: Board, *, dry: bool = False, actor: str = "learner") -> Pruned:
    """Prune once by what the configuration says. Each scenario's journal tells of its releases that lost files."""
    from reef.records.journal import Journal

    done = prune(chain, policy(settings, chain, board), pushed=_pushed(settings, chain), dry=dry)
    lost: dict[str, list[str]] = {}
    for release in done.releases if not dry else ():
        lost.setdefault(release.scenario, []).append(release.id)
    for name, ids in lost.items():
        reason = f"the large files of {len(ids)} releases were removed (releases.keep)"
        Journal(board).tell(name, "prune", ids[-1], actor=actor, reason=reason, detail={"releases": ids}, once=False)
    return done


def policy(settings: Settings, chain: GitChain, board: Board) -> Policy:
    """What the configuration, the pins and the gate's audit rows say."""
    from reef.records.journal import Journal

    names = chain.scenarios()
    journal = Journal(board)
    pins = [pin.release_id for name in names if (pin := journal.pinned(name)) is not None]
    kept = settings.releases
    return Policy(kept.keep, kept.keep_candidates, frozenset(pins), frozenset(held(settings.reef.state_dir, names)))


def held(state: Path, scenarios: Iterable[str]) -> set[str]:
    """The candidates that wait for a person."""
    from reef.cli import assemble

    if not (state / "learn.db").exists():
        return set()
    audit, found = assemble.open_audit(state), set[str]()
    for name in scenarios:
        for ruling in audit.newest(name, 10_000, ("hold",)):
            if ruling.candidate and audit.about(name, [ruling.candidate])[0].verdict == "hold":
                found.add(ruling.candidate)
    return found


async def tend(settings: Settings, chain: GitChain, board: Board) -> None:
    """Prune after each publish and each new candidate, within PERIOD seconds. Never ends by itself."""
    seen, idle = "", 0
    while True:
        try:
            refs = (await asyncio.to_thread(chain.git.run, "for-each-ref")).stdout.decode()
            idle += 1
            if refs != seen or idle >= AT_LEAST:
                done = await asyncio.to_thread(sweep, settings, chain, board)
                if done.objects:
                    log.info("removed %d large files (%s) by policy", len(done.objects), _size(done.freed))
                seen, idle = refs, 0
        except (ReefError, OSError) as error:
            log.warning("the disk is not bounded now: %s", error)
        await asyncio.sleep(PERIOD)


def _pushed(settings: Settings, chain: GitChain) -> Callable[[str], bool] | None:
    from reef.cli import remote
    from reef.releases.remote import Remote

    url = remote.address(settings)
    return None if url is None else Remote(chain.path, url).pushed


def _json(done: Pruned, dry: bool) -> dict[str, Any]:
    named = [{"scenario": found.scenario, "seq": found.seq, "release_id": found.id} for found in done.releases]
    return {
        "dry_run": dry,
        "bytes": done.freed,
        "objects": len(done.objects),
        "releases": named,
        "candidates": [{"scenario": found.scenario, "candidate_id": found.id} for found in done.candidates],
        "waiting_bytes": done.waiting,
        "kept_bytes": done.kept,
    }


def _print(done: Pruned, settings: Settings, dry: bool) -> int:
    lost: dict[str, list[int]] = {}
    for release in done.releases:
        lost.setdefault(release.scenario, []).append(release.seq)
    for name, numbers in lost.items():
        shown = ", ".join(str(number) for number in numbers[:20]) + (" and more" if len(numbers) > 20 else "")
        print(f"{name}: {'would lose' if dry else 'lost'} the large files of release {shown}")
    if done.candidates:
        print(f"{len(done.candidates)} candidates beyond releases.keep_candidates {'would go' if dry else 'went'}")
    verb = "would be freed" if dry else "freed"
    print(f"{_size(done.freed)} {verb} ({len(done.objects)} large files); {_size(done.kept)} of large files stay")
    if done.waiting:
        print(f"{_size(done.waiting)} more when the remote has them (`reef status` shows how far the push is)")
    if settings.releases.keep is None:
        print("all releases keep their large files: set releases.keep to bound them")
    return 0


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 1024:.1f} KiB"
