"""What `reef teach` shows while it goes: a live table on a terminal, a line a wave elsewhere.

Knows: a lesson as it is now. Does not know: how it goes on (`lesson`), or what is shown at its end (`teach`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from reef.cli.lesson import Lesson

ROWS = 14  # waves on the screen


@contextlib.contextmanager
def screen(lesson: Lesson, console: Console) -> Iterator[Any]:
    """A function to call when the lesson changed: a live table on a terminal, a line a wave elsewhere."""
    news = News(console)
    if console.is_terminal:
        from rich.live import Live

        with Live(console=console, auto_refresh=False) as live:
            last = [0.0]

            def show(lesson: Lesson) -> None:
                news.tell(lesson)
                if time.monotonic() - last[0] > 0.1 or lesson.ended is not None:
                    last[0] = time.monotonic()
                    live.update(progress(lesson), refresh=True)

            yield show
        return
    shown = {"waves": 0, "measures": 0}

    def line(lesson: Lesson) -> None:
        news.tell(lesson)
        measures = sum(measure is not None for measure in (lesson.base, lesson.after))
        if measures > shown["measures"]:
            shown["measures"] = measures
            if measures == 1 and lesson.base:
                console.print(
                    f"held-out, base: {lesson.base.score:.2f} ({lesson.base.answers} answers)", highlight=False
                )
        for wave in lesson.waves[shown["waves"] :]:
            shown["waves"] += 1
            loss = "" if wave.loss is None else f"  loss {wave.loss:.3f}"
            left = "" if lesson.left is None else f"  left {clock(lesson.left)}"
            counts = f"wave {wave.number:3}/{lesson.planned}  reports {wave.reports:4}  score {wave.score:.2f}"
            rest = f"{loss}  gate {tally(lesson)}  release {_served(lesson)}  {wave.seconds:.0f} s{left}"
            console.print(counts + rest, highlight=False, soft_wrap=True)

    yield line


class News:
    """What is printed once, when it is known: the scenario and the length of the lesson, and each rejection."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = False
        self._told = 0  # verdicts

    def tell(self, lesson: Lesson) -> None:
        if lesson.planned and not self._begun:
            self._begun = True
            self._say(f"{lesson.preference.title} (seed {lesson.seed})")
            self._say(f"scenario: {lesson.scenario}")
            total = lesson.planned * lesson.size
            self._say(f"length: at most {total} reports, in {lesson.planned} waves of {lesson.size} chats")
        for verdict in lesson.verdicts[self._told :]:
            if verdict.verdict == "reject":
                self._say(f"rejected at step {verdict.step}: {verdict.reason}")
        self._told = len(lesson.verdicts)

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def tally(lesson: Lesson) -> str:
    """How the gate's looks ended: `3 accepted, 1 rejected`, and the others only when there are any."""
    words = {"accept": "accepted", "reject": "rejected", "hold": "held"}
    return ", ".join(f"{count} {words.get(name, name)}" for name, count in lesson.counts.items())


def progress(lesson: Lesson) -> RenderableType:
    """The live table: one row a wave, then what is happening now."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2), header_style="bold", title_justify="left", title_style="bold")
    table.title = f"{lesson.preference.title}  (scenario {lesson.scenario}, seed {lesson.seed})"
    for name in ("wave", "reports", "score", "", "loss", "looks", "time"):
        table.add_column(name, justify="left" if name == "" else "right")
    for wave in lesson.waves[-ROWS:]:
        loss = "" if wave.loss is None else f"{wave.loss:.3f}"
        color = "green" if wave.score >= 0.7 else "yellow" if wave.score >= 0.3 else "red"
        strip = Text("█" * round(24 * wave.score), style=color) + Text("·" * (24 - round(24 * wave.score)), style="dim")
        row = (
            str(wave.number),
            str(wave.reports),
            f"{wave.score:.2f}",
            strip,
            loss,
            str(wave.looks),
            clock(wave.seconds),
        )
        table.add_row(*row)
    part = lesson.part
    doing = f"{lesson.stage}, {lesson.answered} answered" if "learning" not in lesson.stage else lesson.stage
    learner = f"learner {part.get('state', '?')}, step {part.get('step', 0)}, pending {part.get('pending', 0)}"
    left = "" if lesson.left is None else f", about {clock(lesson.left)} left"
    base = "" if lesson.base is None else f"held-out base {lesson.base.score:.2f}   "
    below = Text(f"\n{base}release {_served(lesson)}   gate {tally(lesson)}   {learner}\n", style="cyan")
    return Group(table, below, Text(f"{doing}; {clock(lesson.seconds)} so far{left}", style="bold"))


def _served(lesson: Lesson) -> str:
    return f"{lesson.marks[-1].seq} ({lesson.marks[-1].release_id[:8]})" if lesson.marks else "?"


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
