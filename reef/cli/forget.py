"""`reef forget`: erase records for good, say which releases learnt from them, and go back to before those if asked.

Knows: the question, the order (records first, then the rollback), and how to say what happened.
Does not know: how a record is erased (`records.keep`) or who learnt from it (`scenario.learnt`).

It works on the state folder's file, beside a running server or without one; a rollback goes through the server when
one runs. Interrupted, the same command goes on.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reef.cli import options, sessions, show, state
from reef.cli.api import Found, connect, find
from reef.cli.export import Progress
from reef.core.errors import InputError, MissingError
from reef.core.ids import parse_receipt

if TYPE_CHECKING:
    from reef.core.nouns import Release
    from reef.scenario.learnt import Learnt


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "forget",
        help="erase records for good, and say which releases learnt from them",
        description="Erase records, the reports on them alone and the bodies that only they had, so that their bytes "
        "are gone from the store's files and cannot come back. Says what would go and asks before it does anything. "
        "What a model learnt stays in its weights: --rollback serves the newest release from before that.",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--session", metavar="SESSION", help="every record of this session")
    which.add_argument("--record", nargs="+", metavar="RECEIPT", help="these records")
    which.add_argument("--tag", metavar="NAME=VALUE", help="every record with this tag")
    parser.add_argument("--rollback", action="store_true", help="serve the newest release that did not learn from them")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    options.server(parser)
    options.reading(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from reef.cli import assemble
    from reef.records import erase, keep
    from reef.scenario.learnt import learnt

    place = find(args)
    path = place.state_dir / "records.db"
    if place.named:
        raise InputError(
            "forget works on the state folder itself; run it on the server's machine, with --reef.state_dir FOLDER"
        )
    erase.check(path)
    assemble.known(place.state_dir, place.scenario)
    receipts, gone = _receipts(args, place, path)
    chain = assemble.open_chain(place.state_dir)
    found = learnt(chain, place.scenario, [*receipts, *gone])
    if not args.json:
        _tell(place, receipts, found, args.rollback)
    if receipts and not args.yes and not _asked(args, len(receipts)):
        print("nothing was changed", file=sys.stderr)
        return 1
    said = Progress()
    done, clean = keep.forget(path, receipts, said.now)
    sessions.forget(place.state_dir, [*receipts, *gone])
    found = learnt(chain, place.scenario, [*receipts, *gone])  # one may have been published meanwhile
    if not clean:
        print(
            "a reader holds an older state of the file, so erased bytes are still in its log; run this again",
            file=sys.stderr,
        )
    head: Any = _go_back(args, place, found) if args.rollback and found.served else None
    if args.json:
        return show.dump(
            {
                "scenario": place.scenario,
                "records": done.records,
                "reports": done.reports,
                "bodies": done.blobs,
                "clean": clean,
                "learnt": [{"seq": item.seq, "release_id": item.id} for item in found.releases],
                "served": found.served,
                "head": head,
            }
        )
    print(f"erased {_many(done.records, 'record')}, {_many(done.reports, 'report')}, {done.blobs} stored bodies")
    if head is not None:
        print(f"{place.scenario} serves release {head['seq']} now, with the parts of release {_short(found.before)}")
    elif found.served:
        print(f"what is served still comes from them; `reef rollback {_short(found.before)}` goes back to before")
    return 0 if clean else 1


def _receipts(args: argparse.Namespace, place: Found, path: Path) -> tuple[list[str], list[str]]:
    """The records meant, and those meant by receipt that were erased before."""
    from reef.records import Query, keep

    if args.record:
        known: dict[str, None] = {}
        gone: dict[str, None] = {}
        for name in args.record:
            found, erased = _named(name, place.scenario, path)
            if not found and not erased:
                raise MissingError(_nowhere(name, place.scenario, path), param="record")
            known |= dict.fromkeys(found)
            gone |= dict.fromkeys(erased)
        return list(known), list(gone)
    if args.tag:
        name, separator, value = args.tag.partition("=")
        if not separator or not name:
            raise InputError("--tag is NAME=VALUE", param="tag")
        return keep.select(path, Query(place.scenario, tag=(name, value))), []
    return keep.select(path, Query(place.scenario, session=args.session)), []


def _named(name: str, scenario: str, path: Path) -> tuple[list[str], list[str]]:
    """The records of a name, and those that were erased: a receipt, an import's own id, or an answer's id."""
    from reef.gateway.report import derived
    from reef.records import Query, keep

    names = [parse_receipt(name), derived(scenario, name)]
    receipts = [receipt for receipt in names if receipt is not None]
    found = keep.of(path, scenario, receipts) or keep.select(path, Query(scenario, answer_id=name))
    return found, [] if found else keep.erased(path, receipts)


def _nowhere(name: str, scenario: str, path: Path) -> str:
    from reef.records import keep

    for other in keep.scenarios(path):
        if other != scenario and _named(name, other, path)[0]:
            return f"{name[:80]} is a record of the scenario {other}, not of {scenario}; add -s {other}"
    return f"scenario {scenario!r} has no record {name[:80]!r}; `reef records` lists them"


def _tell(place: Found, receipts: list[str], found: Learnt, back: bool) -> None:
    if not receipts:
        print(f"scenario {place.scenario} has no such record (any more)")
    else:
        print(f"{_many(len(receipts), 'record')} of scenario {place.scenario}, and the reports on nothing else")
    if not found.releases:
        if receipts:
            print("no release learnt from them")
        return
    names = ", ".join(f"{item.seq} ({item.id[:10]})" for item in found.releases)
    print(f"these releases learnt from it: {names}")
    if not found.served:
        print("what is served now does not come from them")
    elif back:
        print(f"release {_short(found.before)}, from before the first of them, will be served")


def _asked(args: argparse.Namespace, count: int) -> bool:
    if not sys.stdin.isatty():
        raise InputError("not erased: this would ask, and there is no terminal; add --yes if it is meant")
    print(f"Erase {_many(count, 'record')} for good? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _go_back(args: argparse.Namespace, place: Found, found: Learnt) -> dict[str, Any]:
    from reef.cli import assemble
    from reef.gateway.views import release_view
    from reef.scenario import serving

    if found.before is None:
        raise MissingError(f"{place.scenario} has no release from before them; the records are erased all the same")
    reason = "records it learnt from were forgotten"
    if state.held(place.state_dir):
        with connect(args) as api:
            body = {"release_id": found.before.id, "reason": reason}
            return dict(api.post(f"/reef/scenarios/{place.scenario}/rollback", body))
    lock = state.claim(place.state_dir, patience=0.0)
    try:
        chain, board = assemble.open_chain(place.state_dir), assemble.open_board(place.state_dir)
        chain.open()
        head = serving.rollback(place.scenario, found.before.id, chain, board, actor="operator", reason=reason)
        board.close()
        return release_view(head, current=True)
    finally:
        lock.release()


def _short(release: Release | None) -> str:
    return "0" if release is None else str(release.seq)


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
