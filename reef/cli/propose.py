"""`reef propose`: ask a scenario to change, in words or with mutations of its harness, and see what came of it.

Knows: how to ask a server, how long to wait, and what a person does next. Does not know: how an ask is carried out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from reef.cli import options, show
from reef.cli.api import Api, connect
from reef.core.errors import InputError, ReefError

ROUTE = "/reef/harness/proposals"
OPEN = ("queued", "taken")
LOOK = 0.25  # seconds between two looks at what became of it; longer as time goes on
LONGEST_LOOK = 2.0


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "propose",
        help="ask a scenario to change, in words or with an edit of its harness",
        description="With words alone: an instruction for the scenario's recipe, which needs training.trigger manual "
        "or hybrid. With --file: mutations of the harness as JSON, [{op, id, kind, config}, …] or {mutations, reason}; "
        "the words are then their reason. The gate decides; what runs commands waits for `reef promote`.",
    )
    parser.add_argument("text", nargs="?", metavar="TEXT", help="what should change, or why")
    parser.add_argument("--file", metavar="FILE", help="mutations as JSON; - reads standard input")
    parser.add_argument("--session", help="the session that the instruction is about")
    parser.add_argument("--list", action="store_true", help="what was asked for, newest first, and what came of it")
    parser.add_argument("-n", "--limit", type=int, default=20, metavar="N", help="how many to list (default: 20)")
    parser.add_argument("--wait", action="store_true", help="wait until it is decided, and show what changed")
    parser.add_argument("--seconds", type=float, default=3600.0, help="wait at most so long (default: 3600)")
    options.server(parser)
    options.reading(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.list:
        if args.text or args.file:
            raise InputError("--list only lists; leave TEXT and --file out")
        return _list(args)
    path, body = _asked(args)
    with connect(args) as api:
        found = _send(api, "POST", path, body)
        if args.wait:
            found = _wait(api, found, args.seconds)
        return _tell(api, found, args)


def _asked(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The route and body that the arguments mean."""
    if not args.file:
        if not args.text:
            raise InputError('say what should change: reef propose "…", or give mutations with --file')
        return "/reef/train", {"text": args.text} | ({"session": args.session} if args.session else {})
    if args.session:
        raise InputError("--session goes with an instruction in words, not with --file")
    try:
        given = json.loads(sys.stdin.read() if args.file == "-" else Path(args.file).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {args.file}: {error.strerror}", param="file") from None
    except ValueError as error:
        raise InputError(f"{args.file} is not JSON: {error}", param="file") from None
    if isinstance(given, dict) and "op" in given:
        given = [given]  # one mutation, as it stands
    body: dict[str, Any] = given if isinstance(given, dict) else {"mutations": given}
    if args.text:
        body = body | {"reason": args.text}
    if not body.get("reason"):
        raise InputError(f'say why: reef propose "…" --file {args.file}, or put "reason" into the file', param="reason")
    return ROUTE, body


def _send(api: Api, method: str, path: str, body: dict[str, Any] | None = None, **parameters: Any) -> Any:
    """One request in the scenario that is meant: these routes take it in a header."""
    api.client.headers["x-reef-scenario"] = api.found.scenario
    return api.post(path, body or {}) if method == "POST" else api.get(path, **parameters)


def _wait(api: Api, found: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The ask once it is settled; as it is when the time is up."""
    until, pause, said = time.monotonic() + seconds, LOOK, ""
    while found["state"] in OPEN and time.monotonic() < until:
        if (now := f"{found['state']}: {found['said']}") != said and found["said"]:
            print(show.harmless(now), file=sys.stderr)
            said = now
        time.sleep(min(pause, max(0.0, until - time.monotonic())))
        pause = min(LONGEST_LOOK, 1.2 * pause)
        found = _send(api, "GET", f"{ROUTE}/{quote(found['id'], safe='')}")
    return found


def _tell(api: Api, found: dict[str, Any], args: argparse.Namespace) -> int:
    unmade = found["state"] == "done" and found["part"] == "harness"  # no edit came of it
    done = found["state"] not in ("rejected", "refused", "failed") and not unmade
    if args.json:
        show.dump(found)
        return 0 if done else 1
    name, state, program = found["scenario"], found["state"], options.program()
    print(f"{found['id']} in scenario {name}: {state}" + (" (known already)" if found.get("duplicate") else ""))
    if unmade:
        print("nothing was changed: no edit came of it")
    if found["said"]:
        print(f"  {show.harmless(found['said'])}")
    candidate, flag = found["candidate"], f" -s {name}"
    if candidate is not None and found["part"] == "harness":
        try:
            whole = api.get(f"/reef/scenarios/{name}/candidates/{candidate}")
            print(show.harmless(whole["diff"].get("text", "")), end="")
        except ReefError as error:  # the token may not read, or its files are gone
            print(f"what it changes cannot be shown: {error.message}", file=sys.stderr)
    if state == "held":
        print(f"serve it: {program} promote {candidate[:12]}{flag}; or not: {program} reject {candidate[:12]}{flag}")
    elif state == "accepted" and found["release_id"]:
        made = api.get(f"/reef/scenarios/{name}/releases/{found['release_id']}")
        back = f"{program} rollback {(made['parent'] or '')[:12]}{flag}"
        print(f"it is release {made['seq']} ({made['release_id'][:12]}); take it back: {back}")
    elif state in OPEN:
        print(f"see what comes of it: {program} propose --list{flag}, or ask with --wait")
    return 0 if done else 1


def _list(args: argparse.Namespace) -> int:
    with connect(args) as api:
        found = _send(api, "GET", ROUTE, limit=args.limit)
    if args.json:
        return show.dump(found)
    if not found["proposals"]:
        print(f'nothing was asked for in {api.found.scenario}; begin with: {options.program()} propose "…"')
        return 0
    rows = [
        (
            item["id"],
            show.when(item["created_at"]),
            item["actor"],
            item["state"],
            (item["candidate"] or "")[:12],
            show.harmless(_short(item.get("text") or item.get("reason") or "")),
            show.harmless(_short(item["said"])),
        )
        for item in found["proposals"]
    ]
    show.table(("ask", "when", "by", "state", "candidate", "what", "said"), rows)
    return 0


def _short(text: str, most: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"
