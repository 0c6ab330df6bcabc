"""`reef candidates`, `reef promote`, `reef reject`: what waits for a person, and the decision on it.

Knows: how to ask a server, and how to do it on the state folder when none runs. Does not know: how a promotion is made
(`scenario.serving`), or which decision excludes which (`scenario.decide`).
"""

from __future__ import annotations

import argparse
from typing import Any
from urllib.parse import quote

from reef.cli import options, reader, show
from reef.cli.api import Api, Found, connect, either, find
from reef.core.errors import MissingError, RightError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "candidates",
        help="candidates that are held or were decided on, newest first (also without a server)",
        description="Candidates that are held or were decided on, newest first. With an id: one of them, with the "
        "evidence of every look and what it changes.",
    )
    parser.add_argument("id", nargs="?", help="one candidate, by id or a prefix of 7 or more digits")
    parser.add_argument("--held", action="store_true", help="only those that wait for a person")
    parser.add_argument("-n", "--limit", type=int, default=20, metavar="N", help="how many (default: 20)")
    _common(parser, candidates)
    parser = commands.add_parser(
        "promote",
        help="serve a candidate that is held",
        description="Make a candidate the newest release and serve it. Works without a restart, with the learner "
        "dead, and on the state folder when no server runs. Asked twice, it is promoted once.",
    )
    parser.add_argument("id", help="a candidate's id or a prefix of 7 or more digits; `reef candidates` lists them")
    parser.add_argument("--reason", default="", help="why; kept in the release")
    parser.add_argument(
        "--force",
        action="store_true",
        help="also one that was turned down, or was measured against what is no longer served",
    )
    _common(parser, promote)
    parser = commands.add_parser(
        "reject",
        help="turn a held candidate down",
        description="Turn a held candidate down: its line ends, and learning goes on from what is served.",
    )
    parser.add_argument("id", help="a candidate's id or a prefix of 7 or more digits; `reef candidates` lists them")
    parser.add_argument("--reason", default="", help="why; kept with the candidate")
    _common(parser, reject)


def _common(parser: argparse.ArgumentParser, run: Any) -> None:
    options.server(parser)
    options.reading(parser)
    parser.set_defaults(run=run)


# --- what waits -------------------------------------------------------------------------------------------------------


def candidates(args: argparse.Namespace) -> int:
    place = find(args)

    def ask() -> Any:
        with connect(args) as api:
            path = f"/reef/scenarios/{_scenario(api, args) if args.id else place.scenario}/candidates"
            if args.id:
                return api.get(f"{path}/{quote(args.id, safe='')}")
            return api.get(path, limit=args.limit, state="held" if args.held else None)

    found = either(place, ask, lambda: _whole(place, args) if args.id else _listed(place, args))
    if args.json:
        return show.dump(found)
    return _tell_one(found) if args.id else _tell(found)


def _listed(place: Found, args: argparse.Namespace) -> dict[str, Any]:
    from reef.cli import assemble
    from reef.gateway.candidates import candidate_view
    from reef.scenario.candidates import listed
    from reef.scenario.learnt import Family

    chain = assemble.open_chain(reader.folder(place))
    if chain.head(place.scenario) is None:
        raise MissingError(f"no scenario {place.scenario!r} in {place.state_dir}; name one with --scenario")
    found = listed(chain, assemble.open_audit(place.state_dir), Family(chain), place.scenario)
    shown = [candidate_view(item) for item in found.found if item.state == "held" or not args.held]
    return {"candidates": shown[: args.limit], "known": found.known}


def _whole(place: Found, args: argparse.Namespace) -> dict[str, Any]:
    from reef.gateway.candidates import whole
    from reef.scenario import decide
    from reef.scenario.why import Why

    async def ask(asked: Why, _: list[str]) -> dict[str, Any]:
        name = args.scenario or _own(asked.chain, args.id, place.scenario)
        return await whole(asked, decide.own(name, args.id, asked.chain))

    return reader.asking(place, ask)


def _tell(found: dict[str, Any]) -> int:
    rows = []
    for item in found["candidates"]:
        state = item["state"] + ("" if item["fits"] or item["state"] != "held" else ", outdated")
        row = [item["candidate_id"][:10], state, item["part"], item["step"], item["units"]]
        rows.append([*row, show.when(item["decided_at"] or item["created_at"]), item["actor"], item["reason"]])
    show.table(["candidate", "state", "part", "step", "units", "at", "by", "why"], rows)
    if not found["known"]:
        print("the learner's audit cannot be read, so what was said of them is not known")
    if waiting := [item for item in found["candidates"] if item["state"] == "held" and item["fits"]]:
        short = waiting[0]["candidate_id"][:10]
        print(f"next: `reef candidates {short}` shows what it changes; `reef promote {short}` or `reef reject {short}`")
    return 0


def _tell_one(found: dict[str, Any]) -> int:
    print(f"candidate {found['candidate_id']} of {found['scenario']}: {found['state']}")
    print(f"made from release {found['base'][:12]} in line {found['line']}, from {show.count(found['units'], 'unit')}")
    for look in found["looks"]:
        said = f"{show.when(look['at'])}, by {look['actor']}: {look['verdict']}"
        print(f"look {look['look']} at step {look['step']}, {said}\n  {look['reason']}")
        for guard in (look["evaluation"] or {}).get("guards", ()):
            print(f"  {show.guard(guard)}")
    for said in found["unknown"]:
        print(said)
    changed = found["diff"]
    if "error" in changed:
        print(f"what it changes cannot be read: {changed['error']}")
        return 0
    if changed["part"] == "harness":
        print(show.harmless(changed["text"]), end="")
        return 0
    print(f"weights: {changed['kind']}, rank {changed['rank']}, {changed['steps']} steps, {changed['bytes']:,} bytes")
    print(f"{changed['tensors']['count']} tensors" + (", among them:" if changed["tensors"]["listed"] else ""))
    for tensor in changed["tensors"]["listed"][:8]:
        print(f"  {tensor['name']} {tensor['dtype']} {tensor['shape']}")
    return 0


# --- the decision -----------------------------------------------------------------------------------------------------


def _decide(args: argparse.Namespace, what: str, body: dict[str, Any]) -> Any:
    with connect(args) as api:
        path = f"/reef/scenarios/{_scenario(api, args)}/candidates/{quote(args.id, safe='')}/{what}"
        return api.post(path, body)


def promote(args: argparse.Namespace) -> int:
    place = find(args)
    head = either(
        place,
        lambda: _decide(args, "promote", {"reason": args.reason, "force": args.force}),
        lambda: _promote_here(place, args),
    )
    if args.json:
        return show.dump(head)
    made = f"release {head['seq']} ({head['release_id'][:10]})"
    if head["current"]:
        print(f"{head['scenario']} serves {made}, which was candidate {head['evaluation']['candidate_id'][:10]}")
    else:
        print(f"the candidate is {made} of {head['scenario']}; something newer is served: `reef releases`")
    return 0


def _promote_here(place: Found, args: argparse.Namespace) -> dict[str, Any]:
    from reef.cli import assemble
    from reef.gateway.views import release_view
    from reef.scenario import decide

    with reader.held(place) as (chain, board):
        name = args.scenario or _own(chain, args.id, place.scenario)
        audit = assemble.open_audit(place.state_dir)
        head = decide.promote(
            name, args.id, chain, board, audit, actor="operator", reason=args.reason, force=args.force
        )
        now = chain.head(name)
        return release_view(head, current=now is not None and now.id == head.id)


def reject(args: argparse.Namespace) -> int:
    place = find(args)
    found = either(place, lambda: _decide(args, "reject", {"reason": args.reason}), lambda: _reject_here(place, args))
    if args.json:
        return show.dump(found)
    print(f"candidate {found['candidate_id'][:10]} of {found['scenario']} is turned down: {found['reason']}")
    return 0


def _reject_here(place: Found, args: argparse.Namespace) -> dict[str, Any]:
    from reef.cli import assemble
    from reef.gateway.candidates import candidate_view
    from reef.scenario import candidates, decide
    from reef.scenario.learnt import Family

    with reader.held(place) as (chain, board):
        name = args.scenario or _own(chain, args.id, place.scenario)
        audit, family = assemble.open_audit(place.state_dir), Family(chain)
        decide.reject(name, args.id, chain, board, audit, family, actor="operator", reason=args.reason)
        return candidate_view(candidates.one(chain, audit, family, decide.own(name, args.id, chain)))


def _scenario(api: Api, args: argparse.Namespace) -> str:
    """The candidate's own scenario, unless one is named: an id is unique on a server."""
    if args.scenario:
        return api.found.scenario
    try:
        found = api.get(f"/reef/why/{quote(args.id, safe='')}", limit=1)
    except (MissingError, RightError):
        return api.found.scenario
    return str(found["scenario"]) if found["kind"] in ("candidate", "release") else api.found.scenario


def _own(chain: Any, candidate: str, otherwise: str) -> str:
    try:
        return str(chain.get(candidate).scenario)
    except MissingError:
        return otherwise
