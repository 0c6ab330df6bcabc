"""`reef pin`: keep a scenario at a release, and let it go again.

Knows: how to ask a server, and how to do it on the state folder when none runs. Does not know: what a pin does
(`scenario.serving`).
"""

from __future__ import annotations

import argparse
from typing import Any

from reef.cli import options, reader, show
from reef.cli.api import Found, connect, either, find
from reef.cli.rollback import by_chain, by_server
from reef.core.errors import InputError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "pin",
        help="keep a scenario at a release: what the gate accepts is held",
        description="Keep a scenario at a release (default: the one it serves; another is rolled back to). Learning "
        "goes on, and what the gate accepts is held: `reef candidates`. Works on the state folder when no server runs.",
    )
    parser.add_argument("release", nargs="?", help="a release id, a prefix of 7 or more digits, or a sequence number")
    parser.add_argument("--off", action="store_true", help="take the pin off")
    parser.add_argument("--reason", default="", help="why; kept in the journal")
    options.server(parser)
    options.reading(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.off and args.release:
        raise InputError("give a release to pin, or --off, not both")
    place = find(args)
    found = either(place, lambda: _ask(args), lambda: _folder(place, args))
    if args.json:
        return show.dump(found)
    if not args.off:
        print(f"{found['scenario']} is pinned to release {found['seq']} ({found['release_id'][:10]}); --off lets it go")
    elif found["unpinned"]:
        print(f"{found['name']} is not pinned any more; what is held still waits: `reef candidates -s {found['name']}`")
    else:
        print(f"nothing changed: {found['name']} was not pinned")
    return 0


def _ask(args: argparse.Namespace) -> dict[str, Any]:
    with connect(args) as api:
        path = f"/reef/scenarios/{api.found.scenario}"
        if args.off:
            return dict(api.delete(f"{path}/pin", reason=args.reason or None))
        wanted = args.release and by_server(api, path, args.release)
        return dict(api.post(f"{path}/pin", {"release_id": wanted, "reason": args.reason}))


def _folder(place: Found, args: argparse.Namespace) -> dict[str, Any]:
    """Without a server: under the state folder's lock, so that none can start meanwhile."""
    from reef.gateway.views import release_view
    from reef.scenario import serving

    name = place.scenario
    with reader.held(place, options.load(args).settings) as (chain, board):
        if args.off:
            return {"name": name, "unpinned": serving.unpin(name, board, actor="operator", reason=args.reason)}
        wanted = args.release and by_chain(chain, name, args.release)
        if not wanted:
            served, head = board.get(name), chain.head(name)
            wanted = served.release_id if served is not None else head.id if head is not None else ""
        head = serving.pin(name, wanted, chain, board, actor="operator", reason=args.reason)
        return release_view(head, current=True)
