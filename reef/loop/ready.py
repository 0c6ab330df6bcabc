"""The units that a recipe may choose a batch from: read, fresh, not discarded, not forgotten; and what of it is kept.

Knows: a part's pool, its ledger rows, what a recipe discards. Does not know: which batch is made, or when.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Final

from reef.core.failpoint import failpoint
from reef.core.nouns import Batch, Release, Unit
from reef.experience.lag import judge
from reef.experience.units import Drop
from reef.loop import assess
from reef.loop.binding import Binding, Tools, Work
from reef.loop.line import Line

SAVE_EVERY: Final = 256  # events that may be read again after a crash because nothing in them was worth a write


async def read(tools: Tools, binding: Binding, work: Work) -> None:
    """New events, and what was made of their units before a restart."""
    if not binding.signals(work.part):
        return  # nothing makes a unit here
    await work.pool.read(tools.store)
    assess.recall(tools, binding, work)


async def fresh(tools: Tools, binding: Binding, work: Work, head: Release, line: Line) -> list[Unit]:
    """The ready units with their lag. Those that are too old, or of another line, are dropped."""
    units, bound = work.pool.units(), binding.bound(work.part)
    if bound is None or not units:
        return units
    lags = await asyncio.to_thread(judge, tools.chain.get, head, line.age, units, bound)
    found: list[Unit] = []
    for unit in units:
        lag = lags[unit.id]
        if isinstance(lag, str):
            work.pool.drop([Drop(unit.id, unit.report.id, lag)])
        else:
            found.append(_aged(unit, lag))
    work.lags = dict(Counter(unit.lag or 0 for unit in found))
    return found


def _aged(unit: Unit, lag: int) -> Unit:
    return replace(unit, lag=lag, sample=None if unit.sample is None else replace(unit.sample, lag=lag))


async def discard(binding: Binding, work: Work, units: list[Unit]) -> list[Unit]:
    """What the recipe says can be in no batch is dropped, with the recipe's reason."""
    ask = getattr(binding.recipes[work.part], "discard", None)  # a recipe need not have one
    if ask is None or not units:
        return units
    said = await asyncio.to_thread(ask, units)
    # a duplicate settles nothing: the unit would be discarded again at every look
    gone = {unit.id: "recipe: duplicate" if why == "duplicate" else str(why) for unit, why in said}
    work.pool.drop([Drop(unit.id, unit.report.id, gone[unit.id]) for unit in units if unit.id in gone])
    work.discarded += len(gone)
    return [unit for unit in units if unit.id not in gone]


async def forgotten(tools: Tools, batch: Batch) -> list[str]:
    """The units of which the store no longer has a record, or the report (or message) they were judged by."""
    known = getattr(tools.store, "known", None)  # a store need not be able to tell
    if known is None:
        return []
    needed = {
        unit.id: [*(name.partition(":")[0] for name in (*unit.turns, unit.id)), unit.report.id] for unit in batch.units
    }
    there = set(await known([name for names in needed.values() for name in names]))
    return [name for name, names in needed.items() if not there.issuperset(names)]


def save(tools: Tools, work: Work) -> None:
    """What can never train is written down, with the reason, and how far the log was read."""
    pool, low = work.pool, work.pool.low()
    if pool.dropped:
        tools.ledger.drop(work.scenario, work.part, pool.dropped, low)
        failpoint("loop.after_drop")
        for drop in pool.dropped:
            work.dropped[drop.reason] = work.dropped.get(drop.reason, 0) + 1
        pool.acknowledge()
        work.saved = low
    elif low - work.saved >= SAVE_EVERY:
        tools.ledger.advance(work.scenario, work.part, low)
        work.saved = low
