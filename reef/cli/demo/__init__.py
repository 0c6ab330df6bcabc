"""`reef demo`: a story that shows what Reef does, on this machine alone, with no account anywhere.

Knows: which demos there are, their options. Does not know: how one goes (`agent`, `plain`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from reef.cli import options

ABOUT = {
    "harness": "a coding agent fails tasks; its harness learns from the reports, is measured, released, and updated",
}


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    names = "\n".join(f"  {name:10} {said}" for name, said in ABOUT.items())
    parser = commands.add_parser(
        "demo",
        help="see what Reef does, with a scripted model and no account",
        description="Shows a story from beginning to end, on loopback and in a temporary folder. The model and the "
        "proposer are scripted; the server, the client, the episodes, the gate and the releases are real.\n\n"
        "demos:\n" + names,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", choices=sorted(ABOUT), metavar="DEMO", help="one of the above")
    parser.add_argument(
        "--plain", action="store_true", help="a plain application in place of the agent (needs no Node)"
    )
    parser.add_argument(
        "--client", metavar="PROGRAM", help="a pi that is installed already (default: $REEF_CLIENT, else npm)"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="work in this new folder, and keep it")
    options.reading(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.name is None:
        print("\n".join(f"{options.program()} demo {name}    {said}" for name, said in ABOUT.items()))
        print(f"{options.program()} demo harness --plain    the same for a plain application; needs no Node")
        return 0
    from reef.cli.demo import agent, plain
    from reef.cli.demo.stage import stage

    with stage(args.keep, sys.stderr if args.json else sys.stdout) as here:
        made = plain.play(here) if args.plain else agent.play(here, args.client)
    if args.json:
        print(json.dumps(made, indent=2))
    return 0 if made["ok"] else 1
