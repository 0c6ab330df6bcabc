"""`reef token create|list|revoke|rotate`: tokens of applications, beside the state folder's own.

Knows: the record store's file in the state folder; how long "30d" is. Does not know: how a gateway uses a token.

It works on the file itself, so a server may run or not; one that runs follows within a tenth of a second. A secret goes
to stdout, alone, once; what there is to say about it goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reef.cli import options, show
from reef.core.errors import InputError
from reef.records.tokens import EPISODE, OLD, RIGHTS, Grant, Quota, TokenTable

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smhdw])")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "make, list, revoke and rotate tokens for applications"
    parser = commands.add_parser(
        "token",
        help=text,
        description="Make, list, revoke and rotate tokens for applications: what each may do, in which scenarios, how "
        "much and until when. Works with and without a running server, which follows at once.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    create = actions.add_parser("create", help="make a token and print its secret, once")
    create.add_argument("name", metavar="NAME", help="what it is for; a name that is over may be used again")
    create.add_argument(
        "--right",
        action="extend",
        nargs="+",
        choices=sorted(RIGHTS),
        help="infer: ask; report: feedback; read: records and releases; operate: create, roll back, pin; "
        "admin: the rest (default: infer report)",
    )
    create.add_argument(
        "--scenario", action="extend", nargs="+", metavar="PATTERN", help="scenarios, like team-* (default: every one)"
    )
    for name, what in (
        ("--requests-per-minute", "requests in any 60 seconds"),
        ("--tokens-per-minute", "prompt and answer tokens in any 60 seconds"),
        ("--concurrent", "requests at once"),
    ):
        create.add_argument(name, type=int, metavar="N", help=f"at most so many {what} (default: no limit)")
    create.add_argument("--expires", metavar="TIME", help="how long it lives: 30m, 12h, 30d (default: for ever)")
    create.set_defaults(run=_create)

    listing = actions.add_parser("list", help="the tokens, without their secrets")
    listing.set_defaults(run=_list)
    options.reading(listing)

    revoke = actions.add_parser("revoke", help="end a token now")
    revoke.set_defaults(run=_revoke)

    rotate = actions.add_parser("rotate", help="a new secret for the same token; the old one lives on for a while")
    rotate.add_argument("--overlap", default="1h", metavar="TIME", help="how long the old one lives on (default: 1h)")
    rotate.set_defaults(run=_rotate)

    for action in (revoke, rotate):
        action.add_argument("name", metavar="NAME")
    for action in (create, listing, revoke, rotate):
        options.configuration(action)


def _create(args: argparse.Namespace) -> int:
    quota = Quota(args.requests_per_minute, args.tokens_per_minute, args.concurrent)
    expires = None if args.expires is None else duration(args.expires, "--expires")
    with _table(args, make=True) as (table, folder):
        assert table is not None
        secret = table.create(args.name, args.right or ("infer", "report"), args.scenario, quota, expires)
    print(secret, flush=True)
    _note(f"the token {args.name} of {folder}, shown once: keep it now; Reef keeps only its digest")
    return 0


def _list(args: argparse.Namespace) -> int:
    with _table(args) as (table, folder):
        grants = [] if table is None else table.list()
    grants = [grant for grant in grants if not grant.name.startswith(EPISODE)]
    if args.json:
        return show.dump({"tokens": [_view(grant) for grant in grants]})
    heads = ["name", "state", "rights", "scenarios", "limits", "made", "expires"]
    show.table(heads, [_row(grant) for grant in grants])
    _note(f"the operator's own token is in {folder / 'token'}")
    return 0


def _revoke(args: argparse.Namespace) -> int:
    with _table(args) as (table, folder):
        if table is None:
            raise _nothing(folder)
        table.revoke(args.name)
    _note(f"the token {args.name} is revoked")
    return 0


def _rotate(args: argparse.Namespace) -> int:
    overlap = duration(args.overlap, "--overlap")
    with _table(args) as (table, folder):
        if table is None:
            raise _nothing(folder)
        secret = table.rotate(args.name, overlap)
    print(secret, flush=True)
    _note(f"the new secret of {args.name}, shown once; the old one ({args.name}{OLD}) works for {args.overlap} more")
    return 0


@contextlib.contextmanager
def _table(args: argparse.Namespace, *, make: bool = False) -> Iterator[tuple[TokenTable | None, Path]]:
    """The table of the state folder and that folder; None when there are no records yet and none shall be made."""
    from reef.records.board import Board

    folder = options.load(args).settings.reef.state_dir.absolute()
    path = folder / "records.db"
    if not make and not path.exists():
        yield None, folder
        return
    if not folder.exists():
        folder.mkdir(parents=True, mode=0o700)
        _note(f"made the state folder {folder}; a server started with it accepts this token")
    board = Board(path)
    try:
        yield TokenTable(board), folder
    finally:
        board.close()


def duration(text: str, name: str) -> float:
    """Seconds. InputError says how to write it."""
    if text == "0":
        return 0.0
    if not (found := _DURATION.fullmatch(text)):
        raise InputError(f"{name} is a number and s, m, h, d or w, like 30d or 12h; not {text[:40]!r}", param=name)
    return float(found[1]) * _UNITS[found[2]]


def _nothing(folder: Path) -> InputError:
    return InputError(f"{folder} has no tokens yet; name another folder with --reef.state_dir, or its file with -c")


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _row(grant: Grant) -> list[str]:
    quota = grant.quota
    limits = (
        (quota.requests_per_minute, "requests/min"),
        (quota.tokens_per_minute, "tokens/min"),
        (quota.concurrent, "at once"),
    )
    return [
        grant.name,
        grant.state(time.time()),
        " ".join(sorted(grant.rights)),
        "every one" if grant.scenarios is None else " ".join(grant.scenarios),
        ", ".join(f"{value} {what}" for value, what in limits if value is not None),
        show.when(grant.created_at),
        "" if grant.expires_at is None else show.when(grant.expires_at),
    ]


def _view(grant: Grant) -> dict[str, Any]:
    """Everything but the digest."""
    return {
        "name": grant.name,
        "state": grant.state(time.time()),
        "rights": sorted(grant.rights),
        "scenarios": None if grant.scenarios is None else list(grant.scenarios),
        "requests_per_minute": grant.quota.requests_per_minute,
        "tokens_per_minute": grant.quota.tokens_per_minute,
        "concurrent": grant.quota.concurrent,
        "created_at": grant.created_at,
        "expires_at": grant.expires_at,
        "revoked_at": grant.revoked_at,
    }
