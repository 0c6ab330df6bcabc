"""The picture of a lesson: score a wave, releases, and held-out scores, as a PNG.

Knows: what is drawn where; `canvas` loads matplotlib and saves. Does not know: where the numbers come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reef.cli.lesson import Lesson
from reef.study.canvas import INK, canvas, plain

SCORE, RELEASE, AFTER = "#1f77b4", "#e07b39", "#2a9d62"


def draw(lessons: Sequence[Lesson], path: Path) -> Path:
    """One panel a lesson. InputError when matplotlib is missing or the file cannot be written."""
    with canvas(path, 150, "; install it with: pip install matplotlib") as pyplot:
        _, panels = pyplot.subplots(
            len(lessons), 1, figsize=(9, 4.6 * len(lessons)), squeeze=False, layout="constrained"
        )
        for lesson, panel in zip(lessons, panels[:, 0], strict=True):
            _panel(lesson, panel)
    return path


def _panel(lesson: Lesson, panel: Any) -> None:
    end = max(lesson.reports, 1)
    plain(panel)
    _releases(lesson, panel)
    _held_out(lesson, panel, end)
    if lesson.waves:
        places = [wave.reports - lesson.size / 2 for wave in lesson.waves]
        scores = [wave.score for wave in lesson.waves]
        panel.plot(
            places, scores, color=SCORE, linewidth=2.2, marker="o", markersize=6, label="score of a wave", zorder=4
        )
    panel.set_xlim(0, end * 1.02)
    panel.set_ylim(-0.03, 1.12)
    panel.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    panel.set_xlabel("reports")
    panel.set_ylabel("answers as wanted")
    minutes = lesson.seconds / 60
    panel.set_title(f"{lesson.preference.title}", loc="left", fontsize=12, fontweight="bold", pad=22)
    below = f"scenario {lesson.scenario}, seed {lesson.seed}, {lesson.reports} reports, {minutes:.1f} minutes"
    panel.text(0, 1.03, below, transform=panel.transAxes, fontsize=9, color="#5b6875")
    if panel.get_legend_handles_labels()[0]:
        panel.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)


def _releases(lesson: Lesson, panel: Any) -> None:
    made = [mark for mark in lesson.marks if mark.seq > lesson.marks[0].seq] if lesson.marks else []
    for number, mark in enumerate(made):
        name = "a release goes live" if number == 0 else None
        panel.axvline(mark.reports, color=RELEASE, linewidth=1.1, alpha=0.55, label=name, zorder=1)
        if len(made) <= 16 or number % (len(made) // 12 + 1) == 0:
            panel.text(mark.reports, 1.065, str(mark.seq), color=RELEASE, fontsize=8, ha="center", va="bottom")


def _held_out(lesson: Lesson, panel: Any, end: int) -> None:
    if lesson.base is not None:
        label = f"held-out, base: {lesson.base.score:.2f}"
        panel.hlines(lesson.base.score, 0, end, color=INK, linewidth=1.4, linestyles="dashed", label=label, zorder=3)
    if lesson.before is not None and lesson.before is not lesson.base:
        label = f"held-out, before: {lesson.before.score:.2f}"
        panel.hlines(lesson.before.score, 0, end, color=INK, linewidth=1.4, linestyles="dotted", label=label, zorder=3)
    if lesson.after is not None:
        label = f"held-out, after: {lesson.after.score:.2f}"
        panel.hlines(lesson.after.score, 0, end, color=AFTER, linewidth=2.0, label=label, zorder=3)
