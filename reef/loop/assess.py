"""What a recipe's `assess` makes of units before they can be in a batch: a judge's votes, a hint, a rule's verdict.

Knows: which ready units were not assessed yet, how many are asked about at once, and what is kept.
Does not know: what is asked, of whom, or what an assessment means.

- An assessment is written down before it is used, and goes when its unit is settled: a crash never asks again for what
  was written.
- Who is asked may be away: its units wait, and the loop rests as after any failure. What was assessed can still train.
- None is an answer: the unit never trains (`unjudged`). So is failing on one unit ATTEMPTS times, by time or by error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final

from reef.core.errors import EngineError, ReefError, StoreError, UpstreamError, WireError
from reef.core.failpoint import failpoint
from reef.core.nouns import Json, Unit
from reef.experience.units import Drop
from reef.loop.binding import Binding, Tools, Work

AT_ONCE: Final = 8
MOST: Final = 32
"""Units that one update asks about: the loop looks at everything else in between."""
LONGEST: Final = 120.0  # seconds for one unit
ATTEMPTS: Final = 3
REFUSED: Final = frozenset({400, 404, 405, 413, 415, 422})
"""What a provider answers to a request that is wrong by itself, such as one that is too long: nobody is away."""

log = logging.getLogger(__name__)
Assess = Callable[[Unit], Awaitable[Json]]


def recall(tools: Tools, binding: Binding, work: Work) -> None:
    """Give the ready units what was written down of them before a restart. Rows of units that are no more are removed:
    their records were forgotten on request."""
    if work.recalled or not hasattr(binding.recipes[work.part], "assess"):
        return
    known = tools.ledger.assessments(work.scenario, work.part)
    tools.ledger.unassess(work.scenario, work.part, known.keys() - work.pool.ready.keys())
    for name in known.keys() & work.pool.ready.keys():
        work.pool.judged(name, known[name])
        if known[name] is None:
            _unjudged(work, work.pool.ready[name])
    work.recalled = True


async def assessed(
    tools: Tools, binding: Binding, work: Work, units: Sequence[Unit]
) -> tuple[list[Unit], ReefError | None, int]:
    """Those of the units that have an assessment, the trouble of whoever is asked (None: there was none), and how many
    were asked about. All of them, for a recipe that assesses nothing."""
    recipe = binding.recipes[work.part]
    ask = getattr(recipe, "assess", None)
    if ask is None:
        return list(units), None, 0
    if binding.ask is None:
        raise EngineError(f"the recipe of {work.scenario} asks a model about each unit, and nothing here can ask one")
    open_ones = [unit for unit in units if unit.assessment is None][:MOST]
    away = await _ask_all(tools, work, open_ones, lambda unit: ask(unit, binding.ask))
    known = {name: unit.assessment for name, unit in work.pool.ready.items() if unit.assessment is not None}
    return [replace(unit, assessment=known[unit.id]) for unit in units if unit.id in known], away, len(open_ones)


async def _ask_all(tools: Tools, work: Work, units: Sequence[Unit], assess: Assess) -> ReefError | None:
    """Ask about these units, AT_ONCE at once; no more of them once somebody is found to be away."""
    todo, away = list(reversed(units)), list[ReefError]()

    async def one_after_another() -> None:
        while todo and not away:
            unit = todo.pop()
            try:
                _keep(tools, work, unit, await asyncio.wait_for(assess(unit), LONGEST))
            except (EngineError, WireError) as error:
                if isinstance(error, UpstreamError) and error.status in REFUSED:
                    _failed(tools, work, unit, error)
                else:
                    away.append(error)
            except StoreError:
                raise
            except Exception as error:
                _failed(tools, work, unit, error)

    asking = [asyncio.create_task(one_after_another()) for _ in range(min(AT_ONCE, len(units)))]
    try:
        await asyncio.gather(*asking)
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    return away[0] if away else None


def _failed(tools: Tools, work: Work, unit: Unit, error: Exception) -> None:
    """Asking about this unit failed, by its own fault or by taking too long."""
    said = f"took more than {LONGEST:g} s" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
    work.tries[unit.id] = work.tries.get(unit.id, 0) + 1
    log.warning("%s %s: assessing %s: %s", work.scenario, work.part, unit.id, said)
    if work.tries[unit.id] >= ATTEMPTS:
        _keep(tools, work, unit, None)


def _keep(tools: Tools, work: Work, unit: Unit, found: Json) -> None:
    """Write it down, then use it."""
    tools.ledger.assess(work.scenario, work.part, unit.id, found)
    failpoint("loop.after_assess")
    work.tries.pop(unit.id, None)
    work.pool.judged(unit.id, found)
    if found is None:
        _unjudged(work, unit)


def _unjudged(work: Work, unit: Unit) -> None:
    work.pool.drop([Drop(unit.id, unit.report.id, "unjudged")])
