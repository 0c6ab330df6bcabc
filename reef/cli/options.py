"""What commands share on the command line: the configuration's options, the server's address, `--json`.

Knows: `-c`, `--model`, `--section.key value`, `--url`, `--token`, `--scenario`. Does not know: any command.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from reef.config import Loaded
from reef.config import load as load_config
from reef.core.errors import ConfigError

_OVERRIDE = re.compile(r"--([A-Za-z_][\w-]*(?:\.[\w-]+)+)(?:=(.*))?", re.DOTALL)


def overrides(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """The arguments without `--section.key value` (or `--section.key=value`), and those."""
    rest: list[str] = []
    found: list[tuple[str, str]] = []
    place = 0
    while place < len(arguments):
        match = _OVERRIDE.fullmatch(arguments[place])
        if arguments[place] == "--":
            return rest + list(arguments[place:]), found
        if match is None:
            rest.append(arguments[place])
        elif match.group(2) is not None:
            found.append((match.group(1), match.group(2)))
        elif place + 1 < len(arguments):
            place += 1
            found.append((match.group(1), arguments[place]))
        else:
            raise ConfigError(f"{arguments[place]} needs a value; write {arguments[place]} VALUE")
        place += 1
    return rest, found


def program() -> str:
    """How a person on this machine starts `reef`: by its name, or by its path when it is not on PATH."""
    if shutil.which("reef"):
        return "reef"
    path = Path(sys.executable).parent / "reef"
    if not path.exists():
        return f"{sys.executable} -m reef"
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def configuration(parser: argparse.ArgumentParser, *, model: bool = False) -> None:
    """`-c FILE`, and `--model` where a server is started; `--section.key value` was taken out by `main` already."""
    parser.add_argument("-c", "--config", type=Path, metavar="FILE", help="configuration file (default: ./reef.yaml)")
    if model:
        parser.add_argument(
            "--model",
            metavar="MODEL",
            help="openai/NAME, anthropic/NAME, openrouter/NAME or ollama/NAME; a provider's address, http(s)://…/v1 "
            "(key in REEF_UPSTREAM_API_KEY); else a model folder, a hub id, or smollm2-135m (the default)",
        )


def server(parser: argparse.ArgumentParser, *, scenario: bool = True, model: bool = False) -> None:
    """Where the server is: found from the configuration unless said."""
    parser.add_argument("--url", help="the server's address (default: $REEF_URL, else the one running here)")
    parser.add_argument("--token", help="its token (default: $REEF_TOKEN, else the state folder's)")
    if scenario:
        parser.add_argument("-s", "--scenario", help="the scenario (default: the configuration's default_scenario)")
    configuration(parser, model=model)


def reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def load(args: argparse.Namespace, faults: list[ConfigError] | None = None) -> Loaded:
    """The configuration that the arguments ask for. `faults`: see `config.load`.

    Without `faults` nobody looks at recipes and engines: what is wrong there is told once, as a warning.
    """
    loaded = load_config(
        getattr(args, "config", None),
        getattr(args, "overrides", ()),
        model=getattr(args, "model", None),
        faults=faults,
    )
    if faults is None and loaded.file is not None and not getattr(args, "warned", False):
        args.warned = True
        from reef.cli import bind

        try:
            bind.check(loaded.settings, loaded.values, loaded.place, keys=False)
        except ConfigError as error:
            for line in error.message.splitlines():
                print(f"reef: warning: {line}", file=sys.stderr)
    return loaded
