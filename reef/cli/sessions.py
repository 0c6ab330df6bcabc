"""`reef sessions`: the sessions of a scenario, and one of them as a tree of turns; what is forgotten leaves them.

Knows: the server's answers as a list and as a tree. Does not know: how sessions are joined.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from reef.cli import options, show
from reef.cli.api import Api, connect

_COUNTED = (("sides", "beside"), ("retries", "asked again"))
WIDE = 60  # characters of an answer that are shown


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "sessions",
        help="conversations: which requests go on from which answers",
        description="Sessions of a scenario, newest first. With an ID, one session as a tree: each turn below the one "
        "that it goes on from; titles, summaries, retries and sub-agents are marked, and do not train.",
    )
    parser.add_argument("id", nargs="?", metavar="ID", help="one session: its name, or its first receipt")
    parser.add_argument("-n", "--limit", type=int, default=20, metavar="N", help="how many (default: 20)")
    options.server(parser)
    options.reading(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with connect(args) as api:
        path = f"/reef/scenarios/{api.found.scenario}/sessions"
        if args.id:
            found = _whole(api, f"{path}/{quote(args.id, safe='')}")
            return show.dump(found) if args.json else _tree(found)
        found = api.get(path, limit=args.limit)
    if args.json:
        return show.dump(found)
    rows = []
    for item in found["sessions"]:
        more = [f"{item[name]} {what}" for name, what in _COUNTED if item.get(name)]
        more += [f"{item['branches']} agents"] if (item.get("branches") or 1) > 1 else []
        more += [f"a branch of {item['within']}"] if item.get("within") else []
        row = [item["session"], item["count"], *(show.when(item[name]) for name in ("first_at", "last_at"))]
        rows.append([*row, ", ".join(more)])
    show.table(["session", "records", "first", "last", "of which"], rows)
    if not found["joined"]:
        print("the learner joined none yet, so these are the ones that clients named")
    return 0


def _whole(api: Api, path: str) -> dict[str, Any]:
    """Every page of one session."""
    found: dict[str, Any] = api.get(path, limit=500)
    while found["next"] is not None:
        page = api.get(path, limit=500, after=found["next"])
        found = {**page, "records": [*found["records"], *page["records"]]}
    return found


def _tree(found: dict[str, Any]) -> int:
    """Each turn below the one it goes on from. A conversation that simply goes on stays in its column."""
    import rich.console
    import rich.text
    import rich.tree

    records = found["records"]
    known = {item["agent_record_id"] for item in records}
    below: dict[str | None, list[dict[str, Any]]] = {}
    for item in records:
        parent = (item["place"] or {}).get("parent")
        below.setdefault(parent if parent in known else None, []).append(item)
    top = rich.tree.Tree(rich.text.Text(f"{found['session']}  {show.count(len(records), 'record')}"))
    waiting = [(top, item) for item in below.get(None, ())][::-1]
    while waiting:
        branch, item = waiting.pop()
        branch.add(rich.text.Text(_line(item)))
        following = below.get(item["agent_record_id"], [])
        inner = branch.children[-1] if len(following) > 1 else branch
        waiting += [(inner, each) for each in following][::-1]
    console = rich.console.Console(markup=False, highlight=False)
    if not console.is_terminal:
        console = rich.console.Console(markup=False, highlight=False, width=_widest(map(_line, records)))
    console.print(top)
    return 0


def _line(item: dict[str, Any]) -> str:
    place = item["place"] or {"kind": "main", "turn": None, "segment": 0, "branch": "", "note": "not joined yet"}
    said = " ".join((item["choices"] or [{"text": ""}])[0]["text"].split())
    words = [item["agent_record_id"], show.when(item["timing"]["received_at"])]
    words += [place["kind"]] if place["kind"] != "main" else []
    words += [f"agent {place['branch']}"] if place["branch"] else []
    words += [f"turn {place['turn']}"] if place["turn"] is not None else []
    words += [f"segment {place['segment']}"] if place["segment"] else []
    words += [item["status"]] if item["status"] != "complete" else []
    line = "  ".join(words) + (f"  {said[:WIDE]}{'…' if len(said) > WIDE else ''}" if said else "")
    return line + (f"  ({place['note']})" if place["note"] else "")


def _widest(lines: Iterable[str]) -> int:
    found = list(lines)
    return max(map(len, found), default=0) + 4 * (len(found) + 2)


def forget(state: Path, receipts: Sequence[str]) -> None:
    """Take forgotten records out of the sessions' file, beside a running server or without one."""
    from reef.experience.sessions import Sessions

    path = state / "sessions.db"
    if not path.is_file() or not receipts:
        return
    joined = Sessions(path)
    try:
        joined.forget(receipts)
    finally:
        joined.close()
