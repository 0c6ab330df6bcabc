"""Commands that read: `status`, `scenarios`, `releases`, `records`.

Knows: the server's answers as tables. Does not know: anything the server did not say, except that `releases` also reads
the state folder when no server runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

from reef.cli import filters, options
from reef.cli.api import Api, connect, find
from reef.core.errors import MissingError, WireError

_NUMBERS = re.compile(r"\[\n\s+(-?\d[-+\d.eE,\s]*?)\n\s*\]")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for name, run, text in (
        ("status", status, "what each scenario serves and what its learner does"),
        ("scenarios", scenarios, "the scenarios, with recipe and release"),
        ("releases", releases, "the release chain of a scenario, newest first (also without a server)"),
        ("records", records, "recent exchanges of a scenario, newest first"),
    ):
        parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        options.server(parser, scenario=name in ("releases", "records"))
        options.reading(parser)
        if name in ("releases", "records"):
            parser.add_argument("-n", "--limit", type=int, default=20, metavar="N", help="how many (default: 20)")
        if name == "records":
            parser.add_argument(
                "--why-not-trained", action="store_true", help="only records no recipe can train on, with the reason"
            )
            parser.add_argument("--reports", action="store_true", help="the reports instead, newest first")
            parser.add_argument(
                "id", nargs="?", metavar="RECEIPT", help="one record whole, with the reports on it (of any scenario)"
            )
            filters.add(parser)
        parser.set_defaults(run=run)


def status(args: argparse.Namespace) -> int:
    with connect(args) as api:
        found = api.get("/reef/status")
    if args.json:
        return dump(found)
    engine, learner = found["engine"], found["learner"]
    ready, alive = "ready" if engine["ready"] else "not ready", "alive" if learner["alive"] else "not answering"
    print(f"engine {ready}, learner {alive}")
    rows = []
    for name, item in found["scenarios"].items():
        parts = ((item.get("learner") or {}).get("parts") or {"": {}}).items()
        for part, work in parts:
            last = work.get("last") or {}
            pending, size = work.get("pending"), work.get("batch_size")
            row = [name, f"{item['seq']} {item['release_id'][:10]}", item["recipe"] or "", part, work.get("state", "")]
            row += [f"{pending}/{size}" if size else pending, work.get("step"), work.get("trained")]
            rows.append([*row, work.get("error") or last.get("reason")])
    heads = ["scenario", "release", "recipe", "part", "state", "pending", "step", "trained", "last"]
    table(heads, rows)
    return 0


def scenarios(args: argparse.Namespace) -> int:
    with connect(args) as api:
        found = api.get("/reef/scenarios")
    if args.json:
        return dump(found)
    rows = [
        [
            item["name"],
            _text(item["seq"]),
            item["release_id"][:10],
            item["recipe"] or "",
            "file" if item["fixed"] else "request",
        ]
        for item in found["scenarios"]
    ]
    table(["scenario", "seq", "release", "recipe", "from"], rows)
    return 0


def releases(args: argparse.Namespace) -> int:
    place = find(args)
    try:
        with connect(args) as api:
            found = api.get(f"/reef/scenarios/{place.scenario}/releases", limit=args.limit)
    except WireError:
        if place.named:
            raise
        found = {"releases": _from_folder(args), "next": None}
    if args.json:
        return dump(found)
    rows = []
    for item in found["releases"]:
        verdict = (item["evaluation"] or {}).get("reason") or item["reason"]
        parts = ", ".join(f"{name} {part['kind']}" for name, part in item["parts"].items())
        mark = "*" if item["current"] else ""
        row = [mark, item["seq"], item["release_id"][:10], item["operation"], item["step"], parts]
        rows.append([*row, when(item["created_at"]), verdict])
    table(["", "seq", "release", "operation", "step", "parts", "made", "why"], rows)
    return 0


def _from_folder(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The chain without a server: it is only read, so no lock is needed."""
    from reef.cli import assemble
    from reef.gateway.views import release_view

    place = find(args)
    if not (place.state_dir / "releases.git").is_dir():
        raise WireError(
            f"no server answers on {place.url}, and {place.state_dir} holds no releases; start one with `reef serve`"
        )
    chain = assemble.open_chain(place.state_dir)
    head = chain.head(place.scenario)
    if head is None:
        raise MissingError(f"no scenario {place.scenario!r} in {place.state_dir}; name one with --scenario")
    return [release_view(item, current=item.id == head.id) for item in chain.history(place.scenario, args.limit)]


def records(args: argparse.Namespace) -> int:
    with connect(args) as api:
        path = f"/reef/scenarios/{api.found.scenario}/records"
        if args.id:
            whole = _one(api, args)
            return dump(whole if args.json else _counted(whole))
        given = filters.given(args)
        filters.query(args, api.found.scenario, kind="report" if args.reports else "record")
        if args.reports:
            path = f"/reef/scenarios/{api.found.scenario}/reports"
            return _reports(api.get(path, limit=args.limit, **given), args.json)
        found = api.get(path, limit=args.limit, **given)
    shown = [item for item in found["records"] if item["untrainable"] or not args.why_not_trained]
    if args.json:
        return dump({**found, "records": shown})
    rows = []
    for item in shown:
        said = (item["choices"] or [{"text": ""}])[0]["text"]
        usage = item["usage"] or {}
        row = [item["agent_record_id"], when(item["timing"]["received_at"]), item["status"], item["purpose"]]
        told = item["untrainable"] if args.why_not_trained else _short(said)
        rows.append([*row, item["release_id"][:10], usage.get("completion_tokens"), told])
    last = "why not trained" if args.why_not_trained else "answer"
    table(["receipt", "received", "status", "purpose", "release", "tokens", last], rows)
    return 0


def _one(api: Api, args: argparse.Namespace) -> Any:
    """A record by its id. A receipt is unique, so without --scenario every scenario is asked for it."""

    def ask(scenario: str) -> Any:
        return api.get(f"/reef/scenarios/{scenario}/records/{quote(args.id, safe='')}")

    try:
        return ask(api.found.scenario)
    except MissingError as error:
        if args.scenario is not None:
            raise
        for item in api.get("/reef/scenarios")["scenarios"]:
            with contextlib.suppress(MissingError):
                if item["name"] != api.found.scenario:
                    return ask(item["name"])
        raise MissingError(f"{error.message}, nor has another one; `reef records` lists them") from None


def _reports(found: dict[str, Any], whole: bool) -> int:
    if whole:
        return dump(found)
    rows = []
    for item in found["reports"]:
        score = item["score"] if item["score"] is not None else ", ".join(map(str, item["per_receipt"].values()))
        said = [_words(item[name]) for name in ("feedback", "demonstration") if item[name] is not None]
        receipts = item["references"][0] + (f" and {more} more" if (more := len(item["references"]) - 1) else "")
        rows.append([item["agent_record_id"], when(item["created_at"]), receipts, score, _short(" / ".join(said))])
    table(["report", "received", "on", "score", "feedback / what it should have been"], rows)
    return 0


def _words(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _counted(record: dict[str, Any]) -> dict[str, Any]:
    """A record with its long lists of tokens counted instead of listed."""

    def count(item: dict[str, Any]) -> dict[str, Any]:
        long = ("prompt_ids", "output_ids", "logprobs")
        return {k: f"{len(v)} (--json lists them)" if k in long and v else v for k, v in item.items()}

    return count({**record, "choices": [count(choice) for choice in record["choices"]]})


# --- output -----------------------------------------------------------------------------------------------------------


def dump(value: Any) -> int:
    """JSON for people and programs: indented, but a list of numbers on one line."""
    text = json.dumps(value, indent=2, ensure_ascii=False)  # a line break in a string is escaped, so never matches
    print(_NUMBERS.sub(lambda found: "[" + " ".join(found[1].split()) + "]", text))
    return 0


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table for people; without a terminal, as wide as its content."""
    import rich.box
    import rich.console
    import rich.table
    import rich.text

    made = rich.table.Table(*heads, box=rich.box.SIMPLE_HEAD, pad_edge=False)
    kept = [[_text(cell) for cell in row] for row in rows]
    for row in kept:
        made.add_row(*(rich.text.Text(cell) for cell in row))
    console = rich.console.Console(markup=False, highlight=False)
    if not console.is_terminal:
        widest = [max([len(head), *(len(row[i]) for row in kept)]) for i, head in enumerate(heads)]
        console = rich.console.Console(markup=False, highlight=False, width=sum(widest) + 3 * len(widest) + 2)
    console.print(made)
    if not kept:
        print("none yet")


def when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _short(text: str, most: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"
