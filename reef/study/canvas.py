"""A picture on its way into a file: matplotlib without a screen, our colours, errors that say what to do.

Knows: how a figure is begun, how an axis looks, how it is saved. Does not know: what is drawn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reef.core.errors import InputError

INK, FAINT = "#1d2733", "#d9dee5"


@contextlib.contextmanager
def canvas(path: Path, dpi: int, missing: str) -> Iterator[Any]:
    """`pyplot`; the figure that was made is saved at the end. InputError when matplotlib is not there (`missing` says
    what to do), or when the file cannot be written."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise InputError(f"the picture needs matplotlib{missing}") from None
    with pyplot.rc_context({"font.size": 10, "axes.edgecolor": INK, "text.color": INK, "axes.labelcolor": INK}):
        try:
            yield pyplot
            _save(pyplot, path, dpi)
        finally:
            pyplot.close()


def _save(pyplot: Any, path: Path, dpi: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pyplot.savefig(path, dpi=dpi)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write {path}: {error}") from None


def plain(panel: Any) -> None:
    """Two spines, and lines across that stay behind what is drawn."""
    for spine in ("top", "right"):
        panel.spines[spine].set_visible(False)
    panel.grid(axis="y", color=FAINT, linewidth=0.8)
    panel.set_axisbelow(True)
