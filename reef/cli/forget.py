"""`reef forget`: erase records for good, say which releases and harness entries came from them, go back if asked.

Knows: the question, the order (records first, then the rollback), and how to say what happened.
Does not know: how a record is erased (`records.keep`), who learnt from it (`scenario.learnt`), or where an entry comes
from (`scenario.origin`). That an entry came from what was erased is found again from both, so no flag can be lost.

It works on the state folder's file, beside a running server or without one; a rollback goes through the server when
one runs. Interrupted, the same command goes on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reef.cli import options, sessions, show, state
from reef.cli.api import Found, connect, find
from reef.cli.export import Progress
from reef.core.errors import InputError, MissingError
from reef.core.ids import parse_receipt

if TYPE_CHECKING:
    from reef.core.nouns import Release, Report
    from reef.releases.chain import GitChain
    from reef.scenario.audit import Audit
    from reef.scenario.learnt import Learnt
    from reef.scenario.origin import Flag

LINES = 20  # of an entry, or names in a sentence, that are shown


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "forget",
        help="erase records for good, and say which releases learnt from them",
        description="Erase records, the reports on them alone and the bodies that only they had, so that their bytes "
        "are gone from the store's files and cannot come back. Says what would go and asks before it does anything. "
        "What a model learnt stays in its weights, and what a harness learnt in its entries, which are named: "
        "--rollback serves the newest release from before that.",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--session", metavar="SESSION", help="every record of this session")
    which.add_argument("--record", nargs="+", metavar="RECEIPT", help="these records")
    which.add_argument("--report", nargs="+", metavar="REPORT", help="these reports, and not the answers they are on")
    which.add_argument("--tag", metavar="NAME=VALUE", help="every record with this tag")
    parser.add_argument("--rollback", action="store_true", help="serve the newest release that did not learn from them")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    options.server(parser)
    options.reading(parser)
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What is meant: records and reports that are there, and those of the records named that were erased before."""

    receipts: list[str]
    gone: list[str] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.receipts or self.reports)

    def __str__(self) -> str:
        if self.reports:
            return _many(len(self.reports), "report")
        return _many(len(self.receipts), "record")


def run(args: argparse.Namespace) -> int:
    from reef.cli import assemble
    from reef.records import erase, keep
    from reef.scenario import learnt, origin

    place = find(args)
    path = place.state_dir / "records.db"
    if place.named:
        raise InputError(
            "forget works on the state folder itself, and --url or REEF_URL names a server: run it on the server's "
            "machine without them, with --reef.state_dir FOLDER (env -u REEF_URL reef forget …)"
        )
    erase.check(path)
    assemble.known(place.state_dir, place.scenario)
    chosen = _choose(args, place, path)
    if args.rollback and not (chosen or chosen.gone or args.report):
        raise MissingError(
            f"scenario {place.scenario} has no such record (any more), so what learnt from it cannot be told: "
            "nothing was done. `reef doctor` names what is served and came from what was forgotten, `reef releases` "
            "lists the releases, and `reef rollback N` serves number N again"
        )
    chain, audit = assemble.open_chain(place.state_dir), assemble.open_audit(place.state_dir)

    def influenced() -> Learnt:
        """Asked twice: a release may have been published meanwhile."""
        by_reports = learnt.judged(chain, audit, place.scenario, chosen.reports)
        by_records = learnt.consumers(chain, place.scenario, [*chosen.receipts, *chosen.gone])
        return learnt.influence(chain, place.scenario, by_reports or by_records)

    found = influenced()
    if not args.json:
        _tell(place, chosen, found, args.rollback)
    if chosen and not args.yes and not _asked(args, chosen):
        print("nothing was changed", file=sys.stderr)
        return 1
    said = Progress()
    done, clean = keep.forget(path, chosen.receipts, said.now, [report.id for report in chosen.reports])
    sessions.forget(place.state_dir, [*chosen.receipts, *chosen.gone])
    found = influenced()
    flags = origin.flags(chain, place.scenario, [one.id for one in found.releases if "harness" in one.consumed])
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
                "entries": [asdict(flag) for flag in flags],
                "served": found.served,
                "head": head,
            }
        )
    print(f"erased {_many(done.records, 'record')}, {_many(done.reports, 'report')}, {done.blobs} stored bodies")
    for line in flagged(flags):
        print(line)
    if head is not None:
        print(f"{place.scenario} serves release {head['seq']} now, with the parts of release {_short(found.before)}")
    elif found.served:
        print(f"what is served still comes from them; `reef rollback {_short(found.before)}` goes back to before")
        if any(flag.lines is not None for flag in flags):
            print("or take those entries out of the harness with a proposal; `reef doctor` names them until then")
    return 0 if clean else 1


def flagged(flags: Sequence[Flag]) -> list[str]:
    """The harness's entries that came from what was forgotten, in lines for people."""
    said = ["these entries of the harness came from them:"] if flags else []
    for flag in flags:
        by = ", ".join(f"{seq} ({name[:10]})" for name, seq in flag.brought)
        held = f"{flag.held[0]} to {flag.held[-1]}" if len(flag.held) > 1 else str(flag.held[0])
        now = "" if flag.lines is None else ", served now" if flag.lines else ", served now in other words"
        said.append(f"  {flag.id} ({flag.kind}): by release {by}, held by {held}{now}")
        said += [show.harmless(f"    {line.seq} | {line.text}") for line in (flag.lines or ())[:LINES]]
        if (more := len(flag.lines or ()) - LINES) > 0:
            said.append(f"    and {more} more lines")
    return said


def standing(chain: GitChain, audit: Audit, head: Release, erased: Callable[[Sequence[str]], Sequence[str]]) -> str:
    """For `doctor`: the entries that are served and came from what was forgotten, in a sentence; empty: none."""
    from reef.scenario import origin

    origins = origin.entries(chain, head)
    behind = origin.behind(chain, audit, origins)
    gone = erased(sorted({name for each in behind.values() for name in each.names}))
    marked = [one for one in origin.marked(origins, origin.lost(behind, gone)) if one.forgotten]
    if not marked:
        return ""
    named = ", ".join(f"{one.id} (release {one.seq})" for one in marked[:LINES])
    more = f" and {len(marked) - LINES} more" if len(marked) > LINES else ""
    return (
        f"came from records or reports that were forgotten: {named}{more}; `reef why {head.seq} -s {head.scenario}` "
        "shows them, `reef rollback` or a proposal takes them out"
    )


def _choose(args: argparse.Namespace, place: Found, path: Path) -> _Chosen:
    from reef.records import Query, keep

    if args.report:
        reports = keep.reports(path, place.scenario, args.report)
        there = {report.id for report in reports}
        gone = keep.erased(path, args.report)
        if lost := [name for name in args.report if name not in (*there, *gone)]:
            raise MissingError(
                f"scenario {place.scenario!r} has no report {lost[0][:80]!r}; `reef records --reports` lists them",
                param="report",
            )
        return _Chosen([], [], reports)
    if args.record:
        known: dict[str, None] = {}
        earlier: dict[str, None] = {}
        for name in args.record:
            found, erased = _named(name, place.scenario, path)
            if not found and not erased:
                raise MissingError(_nowhere(name, place.scenario, path), param="record")
            known |= dict.fromkeys(found)
            earlier |= dict.fromkeys(erased)
        return _Chosen(list(known), list(earlier))
    if args.tag:
        name, separator, value = args.tag.partition("=")
        if not separator or not name:
            raise InputError("--tag is NAME=VALUE", param="tag")
        return _Chosen(keep.select(path, Query(place.scenario, tag=(name, value))))
    return _Chosen(keep.select(path, Query(place.scenario, session=args.session)))


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


def _tell(place: Found, chosen: _Chosen, found: Learnt, back: bool) -> None:
    if not chosen:
        print(f"scenario {place.scenario} has no such record (any more)")
    else:
        print(
            f"{chosen} of scenario {place.scenario}" + ("" if chosen.reports else ", and the reports on nothing else")
        )
    if not found.releases:
        if chosen:
            print("no release learnt from them")
        return
    names = ", ".join(f"{item.seq} ({item.id[:10]})" for item in found.releases)
    print(f"these releases learnt from it: {names}")
    if not found.served:
        print("what is served now does not come from them")
    elif back:
        print(f"release {_short(found.before)}, from before the first of them, will be served")


def _asked(args: argparse.Namespace, chosen: _Chosen) -> bool:
    if not sys.stdin.isatty():
        raise InputError("not erased: this would ask, and there is no terminal; add --yes if it is meant")
    print(f"Erase {chosen} for good? [y/N] ", end="", file=sys.stderr, flush=True)
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
