"""`reef report`: feedback on answers, by their receipts or their session.

Knows: how to write a report's body from flags. Does not know: what the feedback is worth.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from reef.cli import options, show
from reef.cli.api import connect
from reef.core.errors import InputError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "report",
        help="report on an answer by its receipt",
        description="Report on one or more answers. A receipt is an answer's x-reef-agent-record-id header.",
    )
    parser.add_argument("references", nargs="*", metavar="RECEIPT")
    parser.add_argument("--session", metavar="ID", help="instead of receipts: the session id that the client sent")
    parser.add_argument("--score", type=float, help="how good it was, a number")
    parser.add_argument("--feedback", help="what was wrong or right, in words")
    parser.add_argument("--fix", metavar="TEXT", help="what the answer should have been")
    parser.add_argument("--choice", type=int, help="which choice of an answer with several, from 0")
    parser.add_argument("--metadata", metavar="JSON", help="a JSON object that is kept with it, such as a check")
    options.server(parser)
    options.reading(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    body: dict[str, Any] = {"score": args.score, "feedback": args.feedback, "demonstration": args.fix}
    body |= {"choice": args.choice, "metadata": _metadata(args.metadata)}
    if args.score is None and args.feedback is None and args.fix is None:
        raise InputError("nothing to report; give --score, --feedback or --fix")
    if args.score is not None and not math.isfinite(args.score):
        raise InputError(f"--score must be a finite number, not {args.score}; 0 and 1 are usual", param="score")
    if bool(args.references) == (args.session is not None):
        raise InputError("name receipts, or a session with --session ID; not both", param="references")
    about = {"session": args.session} if args.session is not None else {"references": args.references}
    given = {name: value for name, value in body.items() if value is not None} | about
    headers = {"content-type": "application/json"} | ({"x-reef-scenario": args.scenario} if args.scenario else {})
    with connect(args) as api:
        answer = api.send("/reef/report", json.dumps(given).encode(), headers)
    if args.json:
        return show.dump(answer)
    print(
        f"{answer['agent_record_id']} in scenario {answer['scenario']}"
        + (f", on {answer['records']} record{'s' * (answer['records'] != 1)}" if "records" in answer else "")
        + (" (known already)" if answer["duplicate"] else "")
    )
    return 0


def _metadata(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InputError(f"--metadata is not JSON ({error}); quote it for the shell", param="metadata") from None
    if not isinstance(found, dict):
        raise InputError("--metadata must be a JSON object, such as '{\"check\": {…}}'", param="metadata")
    return found
