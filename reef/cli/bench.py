"""`reef bench learning NAME`: run a study, or what is missing of it, and write its table and figure.

Knows: arguments, the screen, where the files go. Does not know: how a run goes (`study.run`), or what it is about.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from reef.cli import options
from reef.core.errors import ConfigError, InputError, ReefError
from reef.study import STUDIES

if TYPE_CHECKING:
    from rich.console import Console

    from reef.study import Study
    from reef.study.runner import Failure, Outcome

OUT = Path(".bench-learning")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser("bench", help="measure what recipes learn", description="Measurements of the product.")
    kinds = bench.add_subparsers(metavar="WHAT", required=True)
    parser = kinds.add_parser(
        "learning",
        help="run a study: a recipe on a real server, against controls",
        description="Run a study's arms and seeds one after the other, each on a server of its own, and write a\n"
        "table, a figure and every number. Runs that have ended are not run again; one that was cut short goes on.\n\n"
        "studies: " + ", ".join(STUDIES) + "; without NAME they are listed",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a study, or package.module:NAME")
    parser.add_argument("--arm", action="append", default=[], metavar="A", help="only this arm (may be repeated)")
    parser.add_argument("--seeds", type=_seeds, default=(), metavar="0,1", help="these seeds instead of the arms' own")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help=f"where runs are kept (default: {OUT})")
    parser.add_argument("--write", action="store_true", help="write table and figure into the recipe's folder")
    parser.add_argument("--fresh", action="store_true", help="start the chosen runs over")
    parser.add_argument("--list", action="store_true", help="say what would run and what has ended; run nothing")
    parser.add_argument("--no-png", action="store_true", help="draw no figure")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 120, soft_wrap=True)
    if args.name is None:
        return _studies(console)
    from reef.study import runner

    study = runner.find(args.name)
    wanted = runner.plan(study, args.arm, args.seeds)
    if args.list:
        for arm, seed in wanted:
            done = runner.outcome(study, arm, seed, args.out)
            said = "not run" if done is None else f"{done.figures['base']:.2f} -> {done.figures['end']:.2f}"
            begun = done is None and (runner.place(study, arm, seed, args.out) / "kept.json").exists()
            console.print(f"{arm.name} seed {seed}: {'begun' if begun else said}", highlight=False)
        return 0
    target = _target(study, args)
    failures: list[Failure] = []
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with runner.alone(study, args.out):
            for arm, seed in wanted:
                with _shown(console, f"{arm.name} seed {seed}") as show:
                    try:
                        made = asyncio.run(runner.run(study, arm, seed, args.out, fresh=args.fresh, show=show))
                    except ConfigError:
                        raise
                    except ReefError as error:
                        failures.append(runner.Failure(arm.name, seed, error.message))
                        console.print(f"{arm.name} seed {seed} failed: {error.message}", highlight=False, markup=False)
                        continue
                base, end, spent = made.figures["base"], made.figures["end"], made.seconds["all"] / 60
                console.print(f"{arm.name} seed {seed}: {base:.3f} -> {end:.3f}, {spent:.1f} min", highlight=False)
            _write(study, runner.outcomes(study, args.out), target, args, console)
    finally:
        signal.signal(signal.SIGTERM, previous)
    if failures:
        console.print(
            f"{len(failures)} of {len(wanted)} runs failed; the same command tries them again", highlight=False
        )
    return 1 if failures else 0


def _studies(console: Console) -> int:
    from reef.study import runner

    for name in STUDIES:
        try:
            study = runner.find(name)
            arms = ", ".join(f"{arm.name} ({len(arm.seeds)})" for arm in study.arms)
            console.print(f"{name:12} {study.title}; arms {arms}", highlight=False, markup=False)
        except ConfigError as error:
            console.print(f"{name:12} cannot be loaded: {error.message}", highlight=False, markup=False)
    console.print(f"run one with: {options.program()} bench learning NAME", highlight=False)
    return 0


def _target(study: Study, args: argparse.Namespace) -> Path:
    """Where table and figure go. Known before anything runs, so that hours of runs do not end in an error."""
    if not args.write:
        return Path(args.out) / study.name
    folder = Path(study.folder)
    if not study.folder or not folder.is_dir():
        raise InputError(f"--write needs the folder {study.folder or 'of a recipe'} here; run it in a checkout of Reef")
    return folder


def _write(study: Study, found: list[Outcome], target: Path, args: argparse.Namespace, console: Console) -> None:
    from reef.study import figure, runner, table

    demands = list(study.demands(runner.results(found)))
    command = f"reef bench learning {args.name}"
    stem = target / table.stem(study)
    target.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".md").write_text(table.markdown(study, found, demands, command))
    stem.with_suffix(".json").write_text(table.dumps(table.document(study, found, demands, command)))
    for one in demands:
        said = {True: "met", False: "NOT met", None: "not known"}[one.met]
        console.print(f"{said}: {one.text}; {one.said}", highlight=False, markup=False)
    console.print(f"table: {stem}.md", highlight=False)
    if not args.no_png:
        console.print(f"figure: {figure.draw(study, found, stem.with_suffix('.png'))}", highlight=False)


@contextlib.contextmanager
def _shown(console: Console, name: str) -> Iterator:  # type: ignore[type-arg]
    """A function that shows a point: a line each, below which a terminal also has a clock."""

    def line(text: str) -> None:
        console.print(f"{name}: {text}", highlight=False, markup=False)

    if not console.is_terminal:
        yield line
        return
    with console.status(f"{name} …"):
        yield line


def _seeds(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 0 or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of seeds; write 0,1,2")
    return found
