"""The program `reef`: finds the command, runs it, turns errors into a sentence and an exit code.

Knows: the commands' names and modules. Does not know: what a command does.

Exit codes: 0 done, 1 failed, 2 usage or configuration.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from reef import __version__
from reef.cli import options
from reef.config import check
from reef.core.errors import ConfigError, InputError, ReefError

COMMANDS = (
    "reef.cli.serve",
    "reef.cli.drive",
    "reef.cli.teach",
    "reef.cli.bench",
    "reef.cli.demo",
    "reef.cli.chat",
    "reef.cli.feedback",
    "reef.cli.connect",
    "reef.cli.show",
    "reef.cli.sessions",
    "reef.cli.rollback",
    "reef.cli.promote",
    "reef.cli.propose",
    "reef.cli.pin",
    "reef.cli.why",
    "reef.cli.export",
    "reef.cli.forget",
    "reef.cli.backup",
    "reef.cli.remote",
    "reef.cli.prune",
    "reef.cli.token",
    "reef.cli.settings",
    "reef.cli.doctor",
)
"""Modules with `add(subparsers)`; each adds its commands, whose `run(args)` returns an exit code."""
_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)$")


class Parser(argparse.ArgumentParser):
    """Names the nearest right word in the place of a list of all."""

    def error(self, message: str) -> NoReturn:
        if found := _CHOICE.search(message):
            words = [word.strip(" '\"") for word in found[2].split(",")]
            near = difflib.get_close_matches(found[1], words, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(words)}"
            message = f"{message[: found.start()]}there is no {found[1]!r}; {hint}"
        super().error(message)

    def unknown(self, rest: Sequence[str], given: Sequence[str]) -> NoReturn:
        """The error for arguments that none of its commands takes."""
        place, options = self, list[str]()
        for word in given:
            commands = [item for item in place._actions if isinstance(item, argparse._SubParsersAction)]
            if commands and word in commands[0].choices:
                place = commands[0].choices[word]
        for action in place._actions:
            options += action.option_strings
        word = next((word for word in rest if word.startswith("-")), rest[0]).partition("=")[0]
        near = difflib.get_close_matches(word, [name for name in options if name.startswith("--")], 1)
        if not near and "--config" in options and word.startswith("--"):
            keys = {key: f"--{section}.{key}" for section in check.keys_at(()) for key in check.keys_at((section,))}
            near = [keys[key] for key in difflib.get_close_matches(word[2:].replace("-", "_"), keys, 1)]
        hint = f"did you mean {near[0]}?" if near else f"`{place.prog} --help` lists what there is"
        place.error(f"there is no {'option' if word.startswith('-') else 'argument'} {word} here; {hint}")


def parser() -> Parser:
    made = Parser(
        prog="reef",
        description="Reef, an inference server that learns.",
        epilog="Start with `reef serve`. Any setting can be given as --section.key VALUE; `reef config` lists them.",
        allow_abbrev=False,
    )
    made.add_argument("--version", action="version", version=f"reef {__version__}")
    commands = made.add_subparsers(metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(name).add(commands)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        given, overrides = options.overrides(sys.argv[1:] if arguments is None else arguments)
        whole = parser()
        args, rest = whole.parse_known_args(given)
        if rest:
            whole.unknown(rest, given)
        args.overrides = overrides
        return int(args.run(args) or 0)
    except SystemExit as error:  # argparse: help is 0, a wrong usage 2
        return error.code if isinstance(error.code, int) else 2
    except ReefError as error:
        lines = error.message.splitlines() if isinstance(error, ConfigError) else [error.message]
        print("\n".join(f"reef: {line}" for line in lines), file=sys.stderr)
        return 2 if isinstance(error, ConfigError | InputError) else 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `reef records | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
