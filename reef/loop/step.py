"""One step of a line: the order for it, and how a trainer carries it out.

Knows: what a trainer is told. Does not know: how a harness edit is made (`edit`), when a step is made, what becomes of
its units, or whether it will be served.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from reef.core.errors import WireError
from reef.core.nouns import Batch, Release
from reef.core.wire import Datum, Progress, Step, Stepped
from reef.loop import asks
from reef.loop.binding import Binding, Tools, Work
from reef.loop.ledger import Order
from reef.loop.line import Line
from reef.recipe import Recipe
from reef.recipe.batches import spread
from reef.recipe.bench import Proposed
from reef.records.queue import Ask
from reef.trainers import folder

TRAINS: Final = {"lora": "a LoRA", "full": "full weights"}
"""What a weights recipe may say that it trains (its field `train`), as people read it."""


@dataclass(frozen=True, slots=True)
class Unmade:
    """No step came of an order. `fate` is what its units met; None: nothing, they are free again. `proposed` is the
    edit that was not taken."""

    fate: str | None
    why: str
    proposed: Proposed | None = None


def unfit(training: Path, recipe: Recipe, head: Release, line: Line) -> str | None:
    """Why a recipe that says what it trains cannot go on from the line's weights. Asked before units are taken: every
    batch would fail alike."""
    train = getattr(recipe, "train", None)
    if line.part != "weights" or train not in TRAINS:
        return None
    kind, meta, where = head.parts["weights"].kind, head.parts["weights"].meta, f"release {head.seq}"
    if line.step > line.base_step:
        place = folder.path(training, head.scenario, line.part, line.name, line.step)
        state, where = folder.read(place), f"line {line.name}, which is not decided,"
        kind, meta = state.kind if state is not None else train, {}
        if state is not None and state.files:
            _, _, meta = folder.part_files(place, check=False)
    if kind == "base":
        return None
    if kind == train:
        has = {name: meta[name] for name in ("rank", "alpha") if meta.get(name) is not None}
        wants = {name: getattr(recipe, name, one) for name, one in has.items()}
        if has == wants:
            return None
        return (
            f"{where} has a LoRA of {_sizes(has)} and the recipe says {_sizes(wants)}, so reports wait: set them back, "
            "or roll back to the base (reef rollback 0)"
        )
    return (
        f"{where} has {TRAINS.get(kind, kind)} and the recipe trains {TRAINS[train]}, so reports wait: set train: "
        f"{kind}, or roll back to the base (reef rollback 0)"
    )


def _sizes(found: Mapping[str, Any]) -> str:
    return " and ".join(f"{name} {value:g}" for name, value in found.items())


def order(binding: Binding, batch: Batch | None, line: Line, cursor: int, ask: Ask | None = None) -> Order:
    """The next step of a line, from this batch, or from what a person asked for, or both. It holds all that a retry
    needs, so that a retry is the same step.

    A unit of several turns is named with all of them, so that each has the fate of the step. So is the ask."""
    units = batch.units if batch is not None else ()
    named = [(name, unit.report.id) for unit in units for name in (*unit.turns, unit.id)]
    lags = [unit.lag for unit in units if unit.lag is not None]
    ages = [max(0.0, time.time() - unit.report.created_at) for unit in units]
    if ask is not None:
        named.append((ask.id, ""))
        ages.append(max(0.0, time.time() - ask.created_at))
    metrics = dict(batch.metrics) if batch is not None else {}
    metrics |= {"units": float(len(units)), "queue_age": sum(ages) / len(ages)}
    if lags:
        metrics |= {"lag_mean": sum(lags) / len(lags), "lag_max": float(max(lags))}
    scores = [unit.score for unit in units if unit.score is not None]
    if len(scores) > 1:
        metrics["zero_signal"] = float(spread(scores) == 0)
    path, options = binding.names[line.part], {}
    samples: list[Any] = []
    if line.part == "weights":
        objective = binding.recipes["weights"].objective()
        path, options = objective.path, dict(objective.options)
        samples = [msgspec.to_builtins(unit.sample) for unit in units if unit.sample is not None]
    elif ask is not None and ask.kind == "proposal":
        path = asks.NAME
    batch_id = batch.id if batch is not None and ask is None else asks.batch_id(line.part, [name for name, _ in named])
    message = Step(
        scenario=binding.scenario,
        part=line.part,
        line=line.name,
        step=line.step + 1,
        base_release=line.base.id,
        base_step=line.base_step,
        objective=path,
        options=options,
        batch_id=batch_id,
        unit_ids=[name for name, _ in named],
        cursor=cursor,
        data=msgspec.convert(samples, list[Datum]),
    )
    return Order(
        line.part,
        message,
        reports=tuple(report for _, report in named),
        metrics=metrics,
        waited=min(ages),
    )


async def train(tools: Tools, work: Work, order: Order) -> Mapping[str, float]:
    """One optimizer step, by the trainer; its metrics. TrainError or WireError when there is none yet."""
    async with contextlib.aclosing(tools.trainer.step(order.message)) as items:  # type: ignore[type-var]
        async for item in items:
            if isinstance(item, Stepped):
                return item.metrics
            assert isinstance(item, Progress)
            work.progress = (item.stage, item.done, item.total)
    raise WireError("the trainer ended without an answer; the step is asked for again")
