"""`reef teach`: a scripted user teaches the served model a preference, live, and shows what came of it.

Knows: arguments, a server of its own when none runs, the screen, the final tables. Does not know: how a wave goes
(`lesson`), or anything of the server beyond its HTTP address.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reef.cli import bind, options, state
from reef.cli.api import find
from reef.cli.preferences import PREFERENCES, Preference
from reef.cli.screen import screen, tally
from reef.core.errors import ConfigError, InputError, WireError
from reef.core.load import load
from reef.study import server as serving

if TYPE_CHECKING:
    from rich.console import Console

    from reef.cli.lesson import Lesson, Measure

REPORTS = 448


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    names = "\n".join(f"  {name:10} {one.title}" for name, one in PREFERENCES.items())
    parser = commands.add_parser(
        "teach",
        help="teach the model a preference and watch it learn",
        description="A scripted user chats over HTTP, checks the answers and reports scores; the served model learns.\n"
        f"It ends after at most {REPORTS} reports; --reports or --updates change that.\n"
        "Starts a server of its own, in a temporary folder, when none runs.\n\npreferences:\n" + names,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "preferences", nargs="*", metavar="PREFERENCE", help="a name above, or package.module:NAME (default: addition)"
    )
    options.server(parser, model=True)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--updates", type=_positive, metavar="N", help="end after about N optimizer steps")
    length.add_argument("--reports", type=_positive, metavar="N", help=f"end after N reports (default {REPORTS})")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' order and the sampling (default 0)")
    parser.add_argument("--samples", type=_positive, default=4, help="answers a held-out prompt gets (default 4)")
    parser.add_argument("--abreast", type=_positive, default=16, help="chats at once (default 16)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="the curve (default: teach-<preference>.png)")
    parser.add_argument("--no-png", action="store_true", help="draw no curve")
    options.reading(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    taught = [choose(name) for name in args.preferences or ["addition"]]
    if args.scenario and len(taught) > 1:
        raise InputError("--scenario is one scenario; teach one preference at a time in it", param="scenario")
    target = args.png or Path(f"teach-{'-'.join(one.name for one in taught)}.png")
    console = Console(stderr=args.json, width=None if sys.stdout.isatty() else 110, soft_wrap=False)
    lessons: list[Lesson] = []
    with server(args, console) as (url, token, passing):
        for preference in taught:
            lesson = asyncio.run(_lesson(args, preference, url, token, console))
            lessons.append(lesson)
            if not args.json:
                report(lesson, console)
    picture = None
    if not args.no_png:
        from reef.cli.curve import draw

        picture = draw(lessons, target)
        console.print(f"curve: {picture}", highlight=False)
    if args.json:
        print(
            json.dumps(
                {"lessons": [document(lesson) for lesson in lessons], "png": str(picture or "") or None}, indent=2
            )
        )
    else:
        console.print(further(lessons, passing, args.url), highlight=False, markup=False)
    return 0


def choose(name: str) -> Preference:
    """A built-in preference, or one of the user's own by dotted path."""
    if name in PREFERENCES:
        return PREFERENCES[name]
    if ":" not in name:
        raise ConfigError(f"no preference {name!r}; there are {', '.join(PREFERENCES)}, or write package.module:NAME")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # the installed program does not have the caller's folder there
    found = load(name, what="preference")
    if isinstance(found, Preference):
        return found
    raise ConfigError(f"{name} is a {type(found).__name__}, not a reef.cli.preferences.Preference")


async def _lesson(
    args: argparse.Namespace, preference: Preference, url: str, token: str | None, console: Console
) -> Lesson:
    import httpx

    from reef.cli.lesson import Lesson, Teacher

    lesson = Lesson(preference, args.scenario or f"teach-{preference.name}-{args.seed}", args.seed)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    limits = httpx.Limits(max_connections=2 * args.abreast)
    timeout = httpx.Timeout(180.0, connect=5.0, pool=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=timeout) as client:
        with screen(lesson, console) as watch:
            teacher = Teacher(client, lesson, samples=args.samples, abreast=args.abreast, watch=watch)
            reports = args.reports or (REPORTS if args.updates is None else 2**31)
            await teacher.teach(updates=args.updates, reports=reports, fresh=not args.scenario)
    return lesson


# --- a server of its own ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(args: argparse.Namespace, console: Console) -> Iterator[tuple[str, str | None, bool]]:
    """Address and token of the server to teach: the one that runs, or one of our own that ends with this block (then
    the third is True)."""
    found = find(args)
    if _fronts(found.url):
        from reef.cli.lesson import NEEDS

        raise InputError(f"the model of the server on {found.url} is a provider's; {NEEDS}")
    if serving.answers(found.url):
        console.print(f"server: {found.url}", highlight=False)
        yield found.url, found.token, False
        return
    if args.url:
        raise WireError(f"no server answers on {args.url}; start one with `reef serve`, or leave --url out to get one")
    settings = bind.load_checked(args)[0].settings
    if settings.engine(settings.reef.engine).kind == "upstream":
        from reef.cli.lesson import NEEDS

        raise ConfigError(f"the configured model is a provider's; {NEEDS}", param="reef.engine")
    with tempfile.TemporaryDirectory(prefix="reef-teach-") as name:
        folder = Path(name)
        url = f"http://127.0.0.1:{serving.free_port()}"
        child = serving.start(_serve(args, url, folder / "state"), folder / "serve.log")
        previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            console.print(f"no server runs on {found.url}; starting one on {url} …", highlight=False)
            serving.await_start(child, url, folder / "serve.log")
            yield url, state.read_token(folder / "state") or found.token, True
        finally:
            serving.stop(child)
            signal.signal(signal.SIGTERM, previous)


def _serve(args: argparse.Namespace, url: str, folder: Path) -> list[str]:
    given: list[str] = []
    if args.config:
        given += ["-c", str(args.config)]
    if args.model:
        given += ["--model", args.model]
    for name, value in getattr(args, "overrides", ()):
        given += [f"--{name}", value]
    return [*given, "--reef.port", url.rpartition(":")[2], "--reef.host", "127.0.0.1", "--reef.state_dir", str(folder)]


def _fronts(url: str) -> bool:
    """Whether a server runs there and waits for its provider."""
    import httpx

    try:
        return str(httpx.get(f"{url}/readyz", timeout=3.0).json().get("reason", "")).startswith("provider ")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, AttributeError):
        return False


# --- the end ----------------------------------------------------------------------------------------------------------


def report(lesson: Lesson, console: Console) -> None:
    """Before and after on prompts that were never trained on, and the chain of releases."""
    from rich.table import Table

    assert lesson.base
    assert lesson.before
    assert lesson.after
    table = Table(title=f"held-out prompts: {lesson.preference.title}", title_justify="left", title_style="bold")
    for name in ("", "release", "as wanted", "95% between", "answers", "for example"):
        table.add_column(name, justify="right" if name in ("as wanted", "answers") else "left", overflow="fold")
    measures = {"base": lesson.base, "before": lesson.before, "after": lesson.after}
    if lesson.before is lesson.base:
        del measures["before"]  # nothing was learnt before this lesson
    for label, measure in measures.items():
        low, high = interval(measure.score, measure.answers)
        known = f"{measure.seq} ({measure.release_id[:8]})"
        between = f"{low:.2f} and {high:.2f}"
        table.add_row(label, known, f"{measure.score:.2f}", between, str(measure.answers), _example(measure))
    console.print(table)
    chain = Table(title="releases", title_justify="left", title_style="bold")
    for name in ("seq", "release", "operation", "step", "verdict", "reason", "at"):
        chain.add_column(name, justify="right" if name in ("seq", "step") else "left", overflow="fold")
    for release in lesson.releases:
        evaluation = release.get("evaluation") or {}
        name = release["release_id"][:8] + (" *" if release.get("current") else "")
        shown = (release["seq"], name, release["operation"], release["step"], evaluation.get("verdict", ""))
        chain.add_row(
            *(str(value) for value in shown), str(evaluation.get("reason", "")), _time(release.get("created_at"))
        )
    console.print(chain)
    updates = lesson.part.get("trained", 0)
    console.print(
        f"{lesson.reports} reports, {updates} trained, {lesson.seconds / 60:.1f} minutes; * is served", highlight=False
    )
    console.print(f"the gate looked at {len(lesson.verdicts)} candidates: {tally(lesson)}", highlight=False)
    if spent := waits(lesson):
        median = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in spent.items())
        console.print(f"from a batch to its release (median): {median}", highlight=False)


def further(lessons: Sequence[Lesson], passing: bool, url: str | None) -> str:
    """What to do next. `passing`: the server was ours and is gone, with everything it learnt."""
    name = options.program()
    if passing:
        return (
            f"that server and what it learnt are gone now; to keep it, run `{name} serve` in another terminal first, "
            f"then `{name} teach` again"
        )
    lines = ["next:"]
    for lesson in lessons:
        rest = f"-s {lesson.scenario}" + (f" --url {url}" if url else "")
        lines += [
            f"  {name} chat {rest}      talk to it",
            f"  {name} releases {rest}  what was made and why",
            f"  {name} records {rest}   what was asked and answered",
        ]
    return "\n".join(lines)


def interval(score: float, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a proportion (Wilson 1927)."""
    z = 1.96
    middle = (score + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(score * (1 - score) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def waits(lesson: Lesson) -> dict[str, float]:
    """Median seconds of each stage over the lesson's releases, as the learner measured them."""
    stages: dict[str, list[float]] = {}
    for mark in lesson.marks:
        for name, seconds in mark.timings.items():
            stages.setdefault(name, []).append(seconds)
    return {name: statistics.median(seconds) for name, seconds in stages.items()}


def document(lesson: Lesson) -> dict[str, Any]:
    """The lesson as JSON."""
    measures = {name: getattr(lesson, name) for name in ("base", "before", "after")}
    return {
        "preference": lesson.preference.name,
        "scenario": lesson.scenario,
        "seed": lesson.seed,
        "minutes": round(lesson.seconds / 60, 2),
        "reports": lesson.reports,
        "held_out": {name: dataclasses.asdict(measure) for name, measure in measures.items() if measure is not None},
        "waves": [dataclasses.asdict(wave) for wave in lesson.waves],
        "marks": [dataclasses.asdict(mark) for mark in lesson.marks],
        "verdicts": [dataclasses.asdict(verdict) for verdict in lesson.verdicts],
        "looks": lesson.counts,
        "timings": waits(lesson),
        "learner": lesson.part,
        "releases": lesson.releases,
    }


def _example(measure: Measure) -> str:
    text = measure.examples[0][1].strip().replace("\n", " ") if measure.examples else ""
    return repr(text if len(text) <= 60 else text[:59] + "…")


def _time(value: Any) -> str:
    return (
        time.strftime("%H:%M:%S", time.localtime(value)) if isinstance(value, int | float) else str(value or "")[11:19]
    )


def _positive(value: str) -> int:
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


__all__: Sequence[str] = (
    "add",
    "choose",
    "document",
    "further",
    "interval",
    "report",
    "run",
    "server",
    "waits",
)
