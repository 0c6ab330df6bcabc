"""One report on several turns of a session, as one unit: its sample holds all of them, exactly as they were sampled.

Knows: which reports mean several turns together, and why such turns train as separate units all the same.
Does not know: the event log, what counted before, how sessions are found; how tokens are put together is `merge`'s.

- The unit's id is the last turn's; `turns` names the units of the earlier ones, which share its fate.
- What cannot be put together exactly trains as separate units, each with the report's score.
- A report with a score for each receipt is several reports in one: its units stay apart, each with its own value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from reef.core.nouns import Report, Unit
from reef.experience.merge import Apart, merge
from reef.experience.sessions import Sessions
from reef.experience.units import Drop, origins

Why = Apart | Literal["tokens", "choices", "releases", "order", "counted", "gone", "held"]
"""Why turns are separate units. tokens: not all of them can train exactly; choices: one has several answers; releases:
several answered; order: they do not follow one another in one branch; counted: an earlier report counted on one of
them; gone: one was forgotten on request; held: one is held out. The others: see `merge.Apart`."""


@dataclass(frozen=True, slots=True)
class Lot:
    """How a unit fared that a report named together with others: how many tokens lost their signal, or why it is by
    itself."""

    realigned: int = 0
    apart: Why | None = None


def whole(report: Report) -> bool:
    """Whether a report speaks of several turns together: one score for all of them."""
    return (
        len(set(report.references)) > 1
        and report.score is not None
        and math.isfinite(report.score)
        and not report.per_receipt
        and report.choice is None
        and report.demonstration is None
    )


def join(made: Sequence[Unit | Drop], sessions: Sessions | None) -> tuple[Unit, int] | Why:
    """The one unit of these units of one report (with the number of tokens that lost their signal), or why not."""
    found = [one for one in made if isinstance(one, Unit)]
    if len(found) < len(made) or any(unit.sample is None for unit in found):
        return "tokens"
    if any(len(unit.record.choices) > 1 for unit in found):
        return "choices"
    if len({release for unit in found for release in origins(unit)}) > 1:
        return "releases"
    ordered = _follow(found, sessions)
    if ordered is None:
        return "order"
    merged = merge([unit.sample for unit in ordered if unit.sample is not None])
    if isinstance(merged, str):
        return merged
    *earlier, last = ordered
    return replace(last, sample=merged.sample, turns=tuple(unit.id for unit in earlier)), merged.realigned


def count(counts: Counter[str], unit: Unit, realigned: int) -> None:
    """A merged unit, for people."""
    counts["units"] += 1
    counts["turns"] += 1 + len(unit.turns)
    counts["realigned_tokens"] += realigned


def _follow(units: Sequence[Unit], sessions: Sessions | None) -> list[Unit] | None:
    """The units in the order of their turns, if they follow one another. A report may name them in any order."""
    if sessions is None:
        return None
    places = {unit.id: sessions.place(unit.record.id) for unit in units}
    if any(place is None for place in places.values()):
        return None
    ordered = sorted(units, key=lambda unit: (place.segment, place.turn) if (place := places[unit.id]) else (0, 0))
    return ordered if sessions.path([unit.record.id for unit in ordered]) else None
