"""The driver as a program: `reef run recipes/tttd -- OPTIONS` runs it beside a server.

Knows: options, the screen, the file a search goes on from. Does not know: how a step goes (`search`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reef.core.errors import InputError, ReefError, StoreError

from .archive import File
from .client import Client
from .problems import PROBLEMS, Problem, choose
from .search import Search, Settings

COLUMNS = ("step", "mean", "max", "std", "zeros", "distinct", "calls", "best", "drift")


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run.py",
        description="Search one problem with a policy that learns while it searches. Needs a server with recipe: tttd "
        "(REEF_URL and REEF_TOKEN; `reef run` starts one). Stopped at any point, it goes on where it was.",
    )
    parser.add_argument("--problem", default="circle_packing", help=f"{', '.join(PROBLEMS)}, or package.module:Name")
    parser.add_argument("--n", type=int, default=32, help="the problem's size (default 32)")
    parser.add_argument("--steps", type=int, default=9, help="optimizer steps in all (default 9)")
    parser.add_argument("--groups", type=int, default=4, help="parents of a step (default 4)")
    parser.add_argument("--rollouts", type=int, default=8, help="rollouts from each parent (default 8)")
    parser.add_argument("--seed", type=int, default=0, help="of the first states and the sampling (default 0)")
    parser.add_argument("--c", type=float, default=1.0, help="how much the choice of parents explores (default 1)")
    parser.add_argument(
        "--frozen", action="store_true", help="report nothing: the same search with an untrained policy"
    )
    parser.add_argument("--free", action="store_true", help="do not limit answers to the problem's grammar")
    parser.add_argument(
        "--least-distinct", type=float, default=0.0, metavar="SHARE",
        help="stop when fewer of a step's answers differ: the policy has collapsed (0.25 suits; default 0: never)",
    )  # fmt: skip
    parser.add_argument(
        "--polish", action="store_true", help="at the end, let an optimiser refine the best (no evidence)"
    )
    parser.add_argument("--scenario", help="default: made of problem, n and seed; one scenario for each problem")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="where the search is kept (default: tttd-SCENARIO.json)"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    args = options().parse_args(arguments)
    try:
        return asyncio.run(_main(args))
    except ReefError as error:
        print(f"run.py: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130


async def _main(args: argparse.Namespace) -> int:
    if not (url := os.environ.get("REEF_URL")):
        raise InputError("REEF_URL is not set; start this with `reef run recipes/tttd`, or set it and REEF_TOKEN")
    problem = choose(args.problem, args.n)
    scenario = args.scenario or _scenario(args)
    file = File(args.keep or Path(f"tttd-{scenario}.json"))
    with file.alone():
        return await _searched(args, url, problem, scenario, file)


async def _searched(args: argparse.Namespace, url: str, problem: Problem, scenario: str, file: File) -> int:
    import httpx

    token = os.environ.get("REEF_TOKEN")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    timeout = httpx.Timeout(600.0, connect=5.0, pool=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout) as http:
        client = Client(http, scenario)
        await client.create()
        settings = Settings(
            groups=args.groups, rollouts=args.rollouts, c=args.c, seed=args.seed, frozen=args.frozen,
            constrained=not args.free,
        )  # fmt: skip
        kept = file.read()
        try:
            search = Search(client, problem, settings, file.write, kept)
        except StoreError as error:
            raise StoreError(f"{file.path}: {error.message}") from None
        await _steps(search, args, file)
    _best(search, problem, polish=args.polish)
    return 0


async def _steps(search: Search, args: argparse.Namespace, file: File) -> None:
    history = search.state.history
    print(f"{search.problem.name}, scenario {search.server.scenario}, kept in {file.path}")  # type: ignore[attr-defined]
    print("  ".join(f"{name:>8}" for name in COLUMNS), flush=True)
    for figures in history:
        print(_line(figures), flush=True)
    while len(history) < args.steps:
        figures = await search.step()
        print(_line(figures), flush=True)
        if figures["distinct"] < args.least_distinct * args.groups * args.rollouts:
            print(
                f"only {figures['distinct']} answers of this step differ; the policy has collapsed, so this is the end"
            )
            return


def _best(search: Search, problem: Problem, *, polish: bool) -> None:
    if not search.state.archive.entries:
        return
    best = search.state.archive.best()
    print(f"best so far {best.value!r} after {len(search.state.known)} distinct verifier calls:")
    print(best.state)
    refine: Any = getattr(problem, "polish", None)
    if polish and refine is not None:
        print(f"refined by an optimiser, which is no evidence of learning: {refine(best.state)!r}")


def _line(figures: dict[str, Any]) -> str:
    def cell(value: Any) -> str:
        return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)

    return "  ".join(f"{cell(figures.get(name)):>8}" for name in COLUMNS)


def _scenario(args: argparse.Namespace) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", args.problem.rpartition(":")[2].lower()).strip("-")
    return f"{name}-{args.n}-seed{args.seed}" + ("-frozen" if args.frozen else "")
