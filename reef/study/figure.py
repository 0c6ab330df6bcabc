"""A study's curves as a PNG: the main arm's seeds, the other arms, the untouched base.

Knows: what is drawn where; `canvas` loads matplotlib and saves. Does not know: where the numbers come from.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from reef.study import Study
from reef.study.canvas import INK, canvas, plain
from reef.study.runner import Outcome

MAIN = ("#1f77b4", "#4c9ed9", "#8cc3ea", "#0b4f82", "#5b8db8")
OTHERS = ("#e07b39", "#8a63b3", "#2a9d62", "#b3475b", "#7a7a2e", "#555555")


def draw(study: Study, found: Sequence[Outcome], path: Path) -> Path:
    """The first arm is the main one. InputError when matplotlib is missing or the file cannot be written."""
    main = study.arms[0].name
    others = [arm.name for arm in study.arms[1:]]
    seeds = [one.seed for one in found if one.arm == main]
    missing = (
        ", which the extra `local` brings: pip install 'reef-learn[local]', or leave the picture out with --no-png"
    )
    with canvas(path, 130, missing) as pyplot:
        _, panel = pyplot.subplots(figsize=(9, 5), layout="constrained")
        for one in found:
            points, faint = one.figures.get("curve") or [], one.figures.get("training") or []
            first = one.arm == main
            colours, place = (MAIN, seeds.index(one.seed)) if first else (OTHERS, others.index(one.arm))
            colour, width = colours[place % len(colours)], 2.2 if first else 1.6
            panel.plot([x for x, _ in faint], [y for _, y in faint], color=colour, linewidth=0.8, alpha=0.45, zorder=1)
            panel.plot(
                [x for x, _ in points], [y for _, y in points], color=colour, linewidth=width, marker="o", markersize=4,
                label=f"{one.arm}, seed {one.seed}: {one.figures['end']:.2f}", zorder=4 if first else 3,
            )  # fmt: skip
        if found:
            base = statistics.median(float(one.figures["base"]) for one in found)
            panel.axhline(base, color=INK, linewidth=1.2, linestyle="dashed", label=f"base: {base:.2f}", zorder=2)
            if any(one.figures.get("training") for one in found):
                panel.plot([], [], color=INK, linewidth=0.8, alpha=0.45, label="thin: while training")
            panel.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
        low, high = panel.get_ylim()
        if low > -0.2 and high < 1.2:  # shares
            panel.set_ylim(-0.02, 1.02)
        plain(panel)
        panel.set_xlabel(study.progress)
        panel.set_ylabel(study.score)
        panel.set_title(study.title, loc="left", fontsize=12, fontweight="bold")
    return path
