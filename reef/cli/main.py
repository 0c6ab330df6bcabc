"""The program `reef`: finds the command, runs it, turns errors into a sentence and an exit code.

Knows: the commands' names and modules. Does not know: what a command does.

Exit codes: 0 done, 1 failed, 2 usage or configuration.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from reef import __version__
from reef.cli import options
from reef.core.errors import ConfigError, InputError, ReefError

COMMANDS = (
    "reef.cli.serve",
    "reef.cli.drive",
    "reef.cli.teach",
    "reef.cli.chat",
    "reef.cli.feedback",
    "reef.cli.show",
    "reef.cli.rollback",
    "reef.cli.export",
    "reef.cli.forget",
    "reef.cli.backup",
    "reef.cli.token",
    "reef.cli.settings",
    "reef.cli.doctor",
)
"""Modules with `add(subparsers)`; each adds its commands, whose `run(args)` returns an exit code."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
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
        args = parser().parse_args(given)
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
