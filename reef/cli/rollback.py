"""`reef rollback RELEASE`: an earlier release's parts become the head and are served, without a restart.

Knows: how to ask a server, and how to do it on the state folder when none runs. Does not know: how a rollback works.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from reef.cli import options, reader, show
from reef.cli.api import Api, Found, connect, either, find
from reef.core.errors import MissingError

if TYPE_CHECKING:
    from reef.releases import ReleaseChain


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "rollback",
        help="serve an earlier release again",
        description="Make an earlier release's parts the newest release and serve it. Works without a restart, with "
        "the learner dead, and on the state folder when no server runs.",
    )
    parser.add_argument("release", help="a release id, a prefix of 7 or more digits, or a sequence number")
    parser.add_argument("--reason", default="", help="why; kept in the release")
    options.server(parser)
    options.reading(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    place = find(args)
    before, head = either(place, lambda: _ask(args), lambda: _folder(place, args))
    if args.json:
        return show.dump(head)
    parts, number = (head["base"] or head["release_id"])[:10], f"{head['seq']} ({head['release_id'][:10]})"
    if head["release_id"] == before:
        print(f"nothing changed: {head['scenario']} serves release {number} already")
    else:
        print(f"{head['scenario']} serves release {number}, with the parts of {parts}")
    return 0


def _ask(args: argparse.Namespace) -> tuple[str, Any]:
    """The release served before, and the head after."""
    with connect(args) as api:
        path = f"/reef/scenarios/{api.found.scenario}"
        wanted = by_server(api, path, args.release)
        before = str(api.get(path)["release_id"])
        return before, api.post(f"{path}/rollback", {"release_id": wanted, "reason": args.reason})


def _folder(place: Found, args: argparse.Namespace) -> tuple[str, Any]:
    """Without a server: under the state folder's lock, so that none can start meanwhile."""
    from reef.gateway.views import release_view
    from reef.scenario import serving

    with reader.held(place, options.load(args).settings) as (chain, board):
        wanted = by_chain(chain, place.scenario, args.release)
        before = chain.head(place.scenario)
        head = serving.rollback(place.scenario, wanted, chain, board, actor="operator", reason=args.reason)
        return before.id if before else "", release_view(head, current=True)


def by_server(api: Api, path: str, wanted: str) -> str:
    """A release's id as a server knows it: a sequence number becomes the id, anything else stays."""
    return numbered(api.get(f"{path}/releases", limit=500)["releases"], wanted) if is_number(wanted) else wanted


def by_chain(chain: ReleaseChain, name: str, wanted: str) -> str:
    """The same, from the chain of a state folder."""
    from reef.gateway.views import release_view

    if not is_number(wanted):
        return wanted
    return numbered([release_view(item, current=False) for item in chain.history(name, 500)], wanted)


def is_number(text: str) -> bool:
    return text.isdigit() and len(text) < 7


def numbered(releases: list[dict[str, Any]], number: str) -> str:
    for item in releases:
        if item["seq"] == int(number):
            return str(item["release_id"])
    raise MissingError(f"there is no release number {number}; `reef releases` lists them")
