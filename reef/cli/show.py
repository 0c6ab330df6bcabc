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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from reef.cli import filters, options
from reef.cli.api import Api, connect, either, find
from reef.core.errors import InputError, MissingError, StoreError

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
        if name == "releases":
            parser.add_argument("--all", action="store_true", help="also what was turned down or is held")
        if name == "scenarios":
            parser.add_argument("action", nargs="?", choices=("archive", "restore"), help="hide one, or bring it back")
            parser.add_argument("name", nargs="?", help="which one")
            parser.add_argument("--reason", default="", help="why; kept in the journal")
        if name == "records":
            parser.add_argument(
                "--why-not-trained",
                action="store_true",
                help="why each record did not train (with RECEIPT: one); reads the state folder",
            )
            parser.add_argument("--reports", action="store_true", help="the reports instead, newest first")
            parser.add_argument(
                "id", nargs="?", metavar="RECEIPT", help="one record whole, with the reports on it (of any scenario)"
            )
            filters.add(parser)
        parser.set_defaults(run=run)


def _doing(work: Mapping[str, Any]) -> str:
    """What a part's learner does, and how far it is: evaluating (episodes 5 of 32)."""
    state, progress = str(work.get("state", "")), work.get("progress")
    return f"{state} ({progress[0]} {progress[1]} of {progress[2]})" if progress else state


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
            row = [name, f"{item['seq']} {item['release_id'][:10]}", item["recipe"] or "", part, _doing(work)]
            row += [f"{pending}/{size}" if size else pending, work.get("step"), work.get("trained")]
            rows.append([*row, work.get("error") or last.get("reason")])
    heads = ["scenario", "release", "recipe", "part", "state", "pending", "step", "trained", "last"]
    table(heads, rows)
    for name, item in found["scenarios"].items():
        if item.get("trouble"):
            print(f"{name} is not served: {item['trouble']}")
        print("".join(f"{name}: {line}\n" for line in _beside(name, item)), end="")
    if (hook := learner.get("webhook")) and hook.get("error"):
        print(f"webhook: {hook['error']}")
    if found.get("remote"):
        from reef.cli import remote

        print("\n".join(remote.lines(found["remote"])))
    return 0


def _beside(name: str, item: dict[str, Any]) -> list[str]:
    """What is worth a line of its own: a pin, what waits for a person, what did not train, what a release was worth,
    watch and cost."""
    lines = []
    if said := (item.get("learner") or {}).get("error"):
        lines.append(f"learning: {said}")
    if item.get("behind"):
        lines.append(f"release {item['seq']} goes on: {item['behind']}")
    if pin := item.get("pin"):
        why = f": {pin['reason']}" if pin["reason"] else ""
        lines.append(f"pinned to release {pin['release_id'][:10]} by {pin['actor']}, {when(pin['at'])}{why}")
    if (held := item.get("held")) and held["count"]:
        oldest = "" if held["oldest"] is None else f", the oldest since {when(held['oldest'])}"
        lines.append(f"{held['count']} held for a person{oldest}; `reef candidates -s {name}` lists what waits")
    for part, work in ((item.get("learner") or {}).get("parts") or {}).items():
        if dropped := work.get("dropped"):
            told = ", ".join(f"{count} {why}" for why, count in sorted(dropped.items()))
            lines.append(f"{part}: what did not train: {told}")
        lines += [f"{part}: {said}" for said in _queue(work)]
    if gain := item.get("gain"):
        lines.append(f"release {item['seq']} {gain['said']}")
    if (watch := (item.get("learner") or {}).get("watch")) and watch.get("state") not in (None, "idle"):
        lines.append(f"watch: {watch['state']}; {watch.get('reason')}")
    if (spent := item.get("spent")) and spent["calls"]:
        money = "price not known" if spent["money"] is None else f"{spent['money']:.2f} by the price table"
        tokens = spent["prompt_tokens"] + spent["output_tokens"]
        lines.append(f"evaluations this month: {spent['calls']:,} calls, {tokens:,} tokens, {money}")
    return lines


def _queue(work: dict[str, Any]) -> list[str]:
    """Figures of the last step, how old what waits is, and what merging turns cost."""
    said = []
    if metrics := list((work.get("metrics") or {}).items())[:6]:
        said.append("last step: " + ", ".join(f"{name} {value:.4g}" for name, value in metrics))
    if ages := {age: number for age, number in (work.get("ages") or {}).items() if number}:
        lags = [f"{number} of lag {lag}" for lag, number in (work.get("lags") or {}).items()]
        said.append("ready by age: " + ", ".join([*(f"{number} {age}" for age, number in ages.items()), *lags]))
    if merged := work.get("merged"):
        said.append("sessions merged: " + ", ".join(f"{number} {what}" for what, number in merged.items()))
    return said


def scenarios(args: argparse.Namespace) -> int:
    if args.action is not None:
        return _keep(args)
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


def _keep(args: argparse.Namespace) -> int:
    """`reef scenarios archive|restore NAME`."""
    if not args.name:
        raise InputError(f"which scenario? Write reef scenarios {args.action} NAME; `reef scenarios` lists them")
    with connect(args) as api:
        path = f"/reef/scenarios/{quote(args.name, safe='')}"
        if args.action == "archive":
            found = api.delete(path, reason=args.reason or None)
        else:
            found = api.post(f"{path}/restore", {"reason": args.reason})
    if args.json:
        return dump(found)
    if args.action == "archive":
        print(f"{args.name} is archived; its records and releases stay: `reef scenarios restore {args.name}`")
    else:
        print(f"{args.name} is back, at release {found['seq']} ({found['release_id'][:10]})")
    return 0


def releases(args: argparse.Namespace) -> int:
    place = find(args)

    def ask() -> Any:
        with connect(args) as api:
            path = f"/reef/scenarios/{place.scenario}/releases"
            return api.get(path, limit=args.limit, all="true" if args.all else None)

    found = either(place, ask, lambda: _from_folder(args))
    if args.json:
        return dump(found)
    rows: list[tuple[float, list[Any]]] = []
    for item in found["releases"]:
        parts = ", ".join(f"{name} {part['kind']}" for name, part in item["parts"].items())
        mark = "*" if item["current"] else ""
        row = [mark, item["seq"], item["release_id"][:10], item["operation"], item["step"], parts]
        rows.append((item["created_at"], [*row, when(item["created_at"]), _points(item.get("gain")), _because(item)]))
    for item in found.get("rulings") or ():
        said = {"reject": "rejected", "hold": "held"}[item["verdict"]]
        row = ["", "", (item["candidate"] or "")[:10], said, item["step"], item["part"], when(item["at"]), ""]
        rows.append((item["at"], [*row, item["reason"]]))
    if found.get("rulings"):
        rows.sort(key=lambda pair: pair[0], reverse=True)
    table(["", "seq", "release", "operation", "step", "parts", "made", "gain", "why"], [row for _, row in rows])
    if "rulings" in found and found["rulings"] is None:
        print("the learner's audit cannot be read, so what was turned down is not known")
    return 0


def _because(item: Mapping[str, Any]) -> str:
    """Why a release was made, and what the gate said where that is not told already."""
    reason, said = item["reason"] or "", (item["evaluation"] or {}).get("reason") or ""
    return f"{reason} ({said})" if reason and said and said not in reason else reason or said


def _points(gain: dict[str, Any] | None) -> str:
    """What a release was worth when it was measured again, in points of score."""
    if gain is None or gain.get("gain") is None:
        return ""
    return f"{100 * gain['gain']:+.0f} ({100 * gain['lower']:+.0f} to {100 * gain['upper']:+.0f})"


def _from_folder(args: argparse.Namespace) -> dict[str, Any]:
    """The chain without a server: it is only read, so no lock is needed."""
    from dataclasses import asdict

    from reef.cli import assemble, reader
    from reef.gateway.views import gain, release_view, standing
    from reef.records.journal import Journal

    place = find(args)
    chain = assemble.open_chain(reader.folder(place))
    head = chain.head(place.scenario)
    if head is None:
        raise MissingError(f"no scenario {place.scenario!r} in {place.state_dir}; name one with --scenario")
    board = assemble.open_board(place.state_dir)
    try:
        journal, history = Journal(board), chain.history(place.scenario, args.limit)
        shown = [
            release_view(item, current=item.id == head.id) | {"gain": gain(journal.about(item.id))} for item in history
        ]
    finally:
        board.close()
    found: dict[str, Any] = {"releases": shown, "next": None}
    if args.all:
        found["rulings"] = None
        with contextlib.suppress(StoreError):
            rulings = assemble.open_audit(place.state_dir).newest(place.scenario, args.limit, ("reject", "hold"))
            found["rulings"] = [asdict(row) for row in standing(rulings, history)]
    return found


def records(args: argparse.Namespace) -> int:
    if args.why_not_trained:
        from reef.cli import untrained

        return untrained.run(args)
    with connect(args) as api:
        path = f"/reef/scenarios/{api.found.scenario}/records"
        if args.id:
            whole = one(api, args)
            return dump(whole if args.json else _counted(whole))
        given = filters.given(args)
        filters.query(args, api.found.scenario, kind="report" if args.reports else "record")
        if args.reports:
            path = f"/reef/scenarios/{api.found.scenario}/reports"
            return _reports(api.get(path, limit=args.limit, **given), args.json)
        found = api.get(path, limit=args.limit, **given)
    if args.json:
        return dump(found)
    rows = []
    for item in found["records"]:
        said = (item["choices"] or [{"text": ""}])[0]["text"]
        usage = item["usage"] or {}
        row = [item["agent_record_id"], when(item["timing"]["received_at"]), item["status"], item["purpose"]]
        rows.append([*row, item["release_id"][:10], usage.get("completion_tokens"), _short(said)])
    table(["receipt", "received", "status", "purpose", "release", "tokens", "answer"], rows)
    return 0


def one(api: Api, args: argparse.Namespace) -> Any:
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


def guard(found: Mapping[str, Any]) -> str:
    """One line on a guard of an evaluation. One that could not be measured did not pass: it says so itself."""
    if found["value"] is None and found["passed"]:
        return f"{found['name']}: {found['note']}"
    return f"{'passed' if found['passed'] else 'FAILED'} {found['name']}: {found['note']}"


def harmless(text: str) -> str:
    """Text of unknown origin for a terminal, which would act on control characters."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\N{REPLACEMENT CHARACTER}" for sign in text)


def count(number: int, what: str) -> str:
    """1 release, 2 releases."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _short(text: str, most: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"
