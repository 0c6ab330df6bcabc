"""`reef config` shows every setting and where it came from; `reef init` writes a file to begin with.

Knows: rows and a template. Does not know: what a setting does.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from reef.cli import options, show
from reef.config import Loaded
from reef.config.file import Where, dotted
from reef.config.sources import Row
from reef.core.errors import ConfigError

if TYPE_CHECKING:
    from reef.cli.bind import Bound

TEMPLATE = """\
# Reef's configuration. Every key has a default; `reef config` shows them all and where each came from.
reef:
  port: 8900
  token: ${REEF_TOKEN:-}      # empty: one is created in state_dir and shown once
  state_dir: .reef
  engine: local               # or a name under engines
  model: smollm2-135m         # a folder, a hub id, or the embedded name
  recipe: sao                 # its fields sit beside it:
  # batch_size: 32

# engines:
#   up: {kind: upstream, url: https://api.openai.com/v1, key_env: OPENAI_API_KEY, model: null}
#   gpu: {kind: vllm, url: "http://127.0.0.1:8000"}   # or sglang: a server that answers with our weights; urls: several

gate:
  policy: guarded             # always | guarded, or with a suite: floor | better | no_worse | protected | all_of
  # suite: [tasks.jsonl, traffic, failures]   # traffic: a tenth of the prompts, which then never train
  # scorer: {use: number}     # judges tasks that bring none: exact, contains, regex, number, schema, code, tests, judge
  # calls: 20000              # evaluation's calls of a scenario in a month; also tokens, and money by prices
  evaluate_every: 1
  patience: 3

# prices:                     # money for a million tokens, by model name or engine/model
#   up/gpt-x: {prompt: 1.0, output: 4.0}

# training: {trigger: hybrid}   # auto: from experience; manual: when a person asks (reef propose); hybrid: both
# training: {backend: ray, options: {workers: 2}}   # where a step is made: local | ray | tinker | slime
# training: {broadcast: "127.0.0.1:0"}   # engines take each step's weights from the trainer's memory
# harness: {apply: true}        # for applications without a client: rules and matching skills go into their requests

releases:
  mode: auto                  # review: an accepted candidate waits for `reef promote`
  # watch: {action: tell}     # rollback (the default) | tell | off, when reports say that a release is worse
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "config",
        help="every setting, its value and where it came from",
        description="Check the configuration and show every setting with its source; secrets are masked.",
    )
    options.configuration(parser, model=True)
    options.reading(parser)
    parser.set_defaults(run=config)
    parser = commands.add_parser(
        "init", help="write a reef.yaml to begin with", description="Write a commented reef.yaml in this folder."
    )
    parser.add_argument("file", nargs="?", type=Path, default=Path("reef.yaml"), metavar="FILE")
    parser.set_defaults(run=init)


def config(args: argparse.Namespace) -> int:
    from reef.cli import bind

    loaded, bound = bind.load_checked(args)
    rows = loaded.rows()
    known = {row.key for row in rows}
    for name, one in bound.items():
        own = name if name in loaded.settings.scenarios else None
        rows += [row for row in _fields(one, loaded, own) if row.key not in known]
    if args.json:
        return show.dump([dataclasses.asdict(row) for row in rows])
    show.table(["setting", "value", "from"], [[row.key, _shown(row.value), row.source] for row in rows])
    return 0


def _fields(bound: Bound, loaded: Loaded, scenario: str | None) -> list[Row]:
    """Every field of a scenario's recipes, at the key where it is (or could be) written."""
    rows = []
    for use in bound.settings.recipes:
        if scenario is not None and use.where[0] == "reef":
            continue  # nothing of its own: it is as reef says
        made = next((bound.recipes[part] for part, name in bound.names.items() if name == use.recipe), None)
        if made is None:
            continue
        for field in dataclasses.fields(made):  # type: ignore[arg-type]  # every recipe is a dataclass
            home: Where = ("reef",) if field.name in use.inherited else use.where
            where: Where = (*home, field.name)
            source = str(loaded.place(where)) if field.name in use.fields else f"default of {type(made).__name__}"
            rows.append(Row(dotted((*use.where, field.name)), getattr(made, field.name), source))
    return rows


def init(args: argparse.Namespace) -> int:
    try:
        with args.file.open("x") as file:
            file.write(TEMPLATE)
    except FileExistsError:
        raise ConfigError(f"{args.file} is there already; edit it, or give another name") from None
    except OSError as error:
        raise ConfigError(f"{args.file} cannot be written: {error.strerror}") from None
    print(
        f"wrote {args.file}; start with `{options.program()} serve"
        + ("" if args.file == Path("reef.yaml") else f" -c {args.file}")
        + "`"
    )
    return 0


def _shown(value: object) -> str:
    return (
        {None: "", True: "true", False: "false"}.get(value, str(value))
        if isinstance(value, bool | None)
        else str(value)
    )
