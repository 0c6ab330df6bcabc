"""Which reports say that something went wrong, and what they say: for methods that mend a harness.

Knows: scores and written feedback of units. Does not know: what was asked, or what would mend it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from reef.core.nouns import Batch, Unit
from reef.recipe import batches

LONGEST: Final = 2_000  # characters of one report's feedback


def said(unit: Unit) -> str:
    """What somebody wrote, as text; empty when nobody wrote anything."""
    given = unit.report.feedback
    if isinstance(given, dict | list) and given:
        given = json.dumps(given, ensure_ascii=False)
    return given.strip()[:LONGEST] if isinstance(given, str) else ""


def told(unit: Unit, max_score: float) -> bool:
    """Whether it has a score of at most `max_score`, or written feedback."""
    return (unit.score is not None and unit.score <= max_score) or bool(said(unit))


def batch(units: Sequence[Unit], size: int, max_score: float) -> Batch | None:
    """All units of the first `size` reports that tell something; None until there are as many."""
    fit = [unit for unit in units if told(unit, max_score)]
    reports = list(dict.fromkeys(unit.report.id for unit in fit))[:size]
    if len(reports) < size:
        return None
    chosen = [unit for unit in fit if unit.report.id in reports]
    return batches.make(chosen, {"reports": float(len(reports))}, part="harness")
