"""One step of a line: the order for it, and how each part carries it out.

Knows: what a trainer is told, and how a harness edit becomes a step folder like any other.
Does not know: when a step is made, what becomes of its units, or whether it will be served.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from reef.cordis.compose import propose
from reef.core.errors import WireError
from reef.core.nouns import Batch, Release, Unit
from reef.core.wire import Datum, Progress, Step, Stepped
from reef.harness import tree
from reef.loop.binding import Binding, Tools, Work
from reef.loop.ledger import Order
from reef.loop.line import Line
from reef.recipe import Recipe
from reef.recipe.batches import spread
from reef.trainers import folder

TRAINS: Final = {"lora": "a LoRA", "full": "full weights"}
"""What a weights recipe may say that it trains (its field `train`), as people read it."""


@dataclass(frozen=True, slots=True)
class Unmade:
    """No step came of an order. `fate` is what its units met; None: nothing, they are free again."""

    fate: str | None
    why: str


def unfit(training: Path, recipe: Recipe, head: Release, line: Line) -> str | None:
    """Why a recipe that says what it trains cannot go on from the line's weights. Asked before units are taken: every
    batch would fail alike."""
    train = getattr(recipe, "train", None)
    if line.part != "weights" or train not in TRAINS:
        return None
    kind, where = head.parts["weights"].kind, f"release {head.seq}"
    if line.step > line.base_step:
        state = folder.read(folder.path(training, head.scenario, line.part, line.name, line.step))
        kind, where = state.kind if state is not None else train, f"line {line.name}, which is not decided,"
    if kind in (train, "base"):
        return None
    return (
        f"{where} has {TRAINS.get(kind, kind)} and the recipe trains {TRAINS[train]}, so reports wait: set train: "
        f"{kind}, or roll back to the base (reef rollback 0)"
    )


def order(binding: Binding, batch: Batch, line: Line, cursor: int) -> Order:
    """The next step of a line, from this batch. It holds all that a retry needs, so that a retry is the same step.

    A unit of several turns is named with all of them, so that each has the fate of the step."""
    named = [(name, unit.report.id) for unit in batch.units for name in (*unit.turns, unit.id)]
    lags = [unit.lag for unit in batch.units if unit.lag is not None]
    ages = [max(0.0, time.time() - unit.report.created_at) for unit in batch.units]
    metrics = dict(batch.metrics) | {"units": float(len(batch.units)), "queue_age": sum(ages) / len(ages)}
    if lags:
        metrics |= {"lag_mean": sum(lags) / len(lags), "lag_max": float(max(lags))}
    scores = [unit.score for unit in batch.units if unit.score is not None]
    if len(scores) > 1:
        metrics["zero_signal"] = float(spread(scores) == 0)
    path, options = binding.names[line.part], {}
    samples: list[Any] = []
    if line.part == "weights":
        objective = binding.recipes["weights"].objective()
        path, options = objective.path, dict(objective.options)
        samples = [msgspec.to_builtins(unit.sample) for unit in batch.units if unit.sample is not None]
    message = Step(
        scenario=binding.scenario,
        part=line.part,
        line=line.name,
        step=line.step + 1,
        base_release=line.base.id,
        base_step=line.base_step,
        objective=path,
        options=options,
        batch_id=batch.id,
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


async def edit(
    tools: Tools, binding: Binding, work: Work, order: Order, head: Release, line: Line
) -> Mapping[str, float] | Unmade:
    """One edit of the harness tree: the recipe proposes, cordis composes, and the tree becomes a step folder."""
    message = order.message
    if (done := folder.answered(tools.training, message)) is not None:
        return done.metrics
    units = [work.pool.ready[name] for name in message.unit_ids if name in work.pool.ready]
    if (message.line, message.step) != (line.name, line.step + 1) or len(units) < len(message.unit_ids):
        return Unmade(None, "its line is over, or a record of it was forgotten")  # and nobody else makes such steps
    before = await _tree(tools, head, line)
    mutations = await asyncio.to_thread(_propose, binding, order, units, before)
    if not mutations:
        return Unmade("no edit", "the recipe proposed no edit")
    proposal = propose(before, mutations)
    if proposal.entries is None:
        return Unmade("refused", "; ".join(proposal.refused))
    files = {tree.FILE: tree.write(proposal.entries)}
    metrics = {"mutations": float(len(mutations)), "entries": float(len(proposal.entries))}
    made = await asyncio.to_thread(folder.write, tools.training, message, "tree", files, metrics)
    return made.metrics


def _propose(
    binding: Binding, order: Order, units: Sequence[Unit], before: Sequence[tree.Entry]
) -> Sequence[tree.Mutation]:
    batch = Batch(order.message.batch_id, "harness", tuple(units), order.metrics)
    return binding.recipes["harness"].propose(batch, before)


async def _tree(tools: Tools, head: Release, line: Line) -> tuple[tree.Entry, ...]:
    """The line's working tree: its last step, else the head's, else the empty one."""
    if line.step > line.base_step:
        place = folder.path(tools.training, head.scenario, "harness", line.name, line.step)
        return tree.read((place / tree.FILE).read_bytes())
    if "harness" not in head.parts:
        return ()
    files = await asyncio.to_thread(tools.chain.files, head.id, "harness")
    return tree.read(files[tree.FILE].read_bytes())
