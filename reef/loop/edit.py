"""One edit of a harness: who proposes it, what cordis makes of it, and the step folder it becomes.

Knows: a recipe's proposal, its search (a task of its own, beside the other part's updates), and a person's mutations.
Does not know: when an edit is made, what becomes of its units, or whether it will be served.

- The step folder holds the tree and, beside it, `proposal.json`: what was proposed, by whom and why. A look reads it
  from there, also when a crash came in between.
- A search that a crash or a stop cut short is begun again by the same order, and finds its folder as it left it.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from reef.cordis import hold
from reef.cordis.compose import propose
from reef.cordis.screen import masked
from reef.core.errors import MissingError, TrainError
from reef.core.failpoint import failpoint
from reef.core.nouns import Batch, Evaluation, Release, Report, Unit
from reef.harness import tree
from reef.loop import asks, retell
from reef.loop.bench import Workbench
from reef.loop.binding import Binding, Tools, Work
from reef.loop.ledger import Order
from reef.loop.line import Line
from reef.loop.step import Unmade
from reef.recipe.bench import Proposed
from reef.records.queue import Ask, is_ask
from reef.trainers import folder

FILE: Final = "proposal.json"
SEARCH: Final = "search"


@dataclass(frozen=True, slots=True)
class Written:
    """What a step of a line was made from. `actor` and `ask`: of the person who wanted it; None: experience did."""

    batch: str
    proposed: Proposed
    actor: str | None
    ask: str | None


async def edit(
    tools: Tools, binding: Binding, work: Work, order: Order, head: Release, line: Line
) -> Mapping[str, float] | Unmade | None:
    """Make the step of an order; its metrics. None: a search for it goes on."""
    message = order.message
    if (done := folder.answered(tools.training, message)) is not None:
        return done.metrics
    names = [name for name in message.unit_ids if not is_ask(name)]
    units = [work.pool.ready[name] for name in names if name in work.pool.ready]
    if (message.line, message.step) != (line.name, line.step + 1) or len(units) < len(names):
        work.leave()
        return Unmade(None, "its line is over, or a record of it was forgotten")  # and nobody else makes such steps
    try:
        ask = asks.of(tools, order)
    except MissingError as error:
        return Unmade("failed", asks.missing(error))
    before = await working(tools, head, line)
    proposed = await _proposed(tools, binding, work, order, ask, units, head, before)
    if proposed is None:
        return None
    if not proposed.mutations:
        return Unmade("no edit", proposed.reason or "the recipe proposed no edit", proposed)
    known = retell.prompts(units, [str(entry.config.get("text") or "") for entry in before])
    proposal = await asyncio.to_thread(propose, before, proposed.mutations, known=known)
    if proposal.entries is None:
        return Unmade("refused", "; ".join(proposal.refused), proposed)
    written = {"batch": message.batch_id, "actor": ask and ask.actor, "ask": ask and ask.id, **asdict(proposed)}
    files = {tree.FILE: tree.write(proposal.entries), FILE: json.dumps(written, ensure_ascii=False).encode()}
    counts = {"mutations": float(len(proposed.mutations)), "entries": float(len(proposal.entries))}
    made = await asyncio.to_thread(
        folder.write, tools.training, message, "tree", files, dict(proposed.metrics) | counts
    )
    return made.metrics


async def _proposed(
    tools: Tools,
    binding: Binding,
    work: Work,
    order: Order,
    ask: Ask | None,
    units: Sequence[Unit],
    head: Release,
    before: Sequence[tree.Entry],
) -> Proposed | None:
    """The edit that a person or the recipe proposes; None while a search for it goes on."""
    if ask is not None and ask.kind == "proposal":
        return asks.proposed(ask)
    recipe: Any = binding.recipes["harness"]
    if not hasattr(recipe, "search"):
        batch = Batch(order.message.batch_id, "harness", tuple(units), order.metrics)
        return _plain(Proposed(tuple(await asyncio.to_thread(recipe.propose, batch, before))))
    if work.search is not None and work.sought != order.message.batch_id:
        work.leave()
    if work.search is None:
        if ask is not None and not units:
            units = await _concerned(tools, ask)
        found = Batch(order.message.batch_id, "harness", tuple(units), order.metrics) if units else None
        place = searched(tools.training, work.scenario, order)
        place.mkdir(parents=True, exist_ok=True)
        failpoint("loop.before_search")
        bench = Workbench(place, ask, tools, binding, work, head)
        work.sought = order.message.batch_id
        work.search = asyncio.create_task(_sought(recipe, found, before, bench), name=f"search {work.scenario}")
        return None
    if not work.search.done():
        return None
    search, work.search = work.search, None
    if search.cancelled():
        raise TrainError("the search for an edit was cancelled from within; look at the recipe")
    proposed = _plain(search.result())
    failpoint("loop.after_search")
    if ask is not None and proposed.mutations and not proposed.reason:
        proposed = replace(proposed, reason=asks.line(masked(str(ask.body.get("text") or ""))))
    return proposed


async def _sought(recipe: Any, found: Batch | None, before: Sequence[tree.Entry], bench: Workbench) -> Proposed:
    """A recipe's search. One that ends the program has failed: it would end all learning, again at each start."""
    try:
        made: Proposed = await recipe.search(found, before, bench)
    except (SystemExit, KeyboardInterrupt) as error:
        raise TrainError(f"the search for an edit raised {type(error).__name__}; look at the recipe") from error
    return made


async def _concerned(tools: Tools, ask: Ask) -> list[Unit]:
    """An instruction about a session is a unit like one of a report: the person's words on its last answer."""
    session = ask.body.get("session")
    record = await retell.newest(tools, ask.scenario, session) if isinstance(session, str) else None
    if record is None:
        return []
    report = Report(ask.id, ask.scenario, (record.id,), ask.created_at, feedback=ask.body.get("text"))
    return [Unit(ask.id, record, 0, report, None, None, "a person's instruction")]


def _plain(found: Proposed) -> Proposed:
    """A recipe's proposal as it can be kept: a reason of one line and without secrets, metrics that are numbers."""
    numbers = {str(name): float(value) for name, value in found.metrics.items() if math.isfinite(value)}
    return Proposed(tuple(found.mutations), asks.line(masked(found.reason)), numbers)


async def working(tools: Tools, head: Release, line: Line) -> tuple[tree.Entry, ...]:
    """The line's working tree: its last step, else the head's."""
    if line.step > line.base_step:
        place = folder.path(tools.training, head.scenario, "harness", line.name, line.step)
        return tree.read((place / tree.FILE).read_bytes())
    return await served(tools, head)


async def served(tools: Tools, head: Release) -> tuple[tree.Entry, ...]:
    """The head's tree; the empty one where it has none."""
    if "harness" not in head.parts:
        return ()
    files = await asyncio.to_thread(tools.chain.files, head.id, "harness")
    return tree.read(files[tree.FILE].read_bytes())


def written(training: Path, scenario: str, line: Line) -> list[Written]:
    """What the steps of a line were made from, in order. Steps of an older Reef do not say."""
    found = []
    for step in folder.steps(training, scenario, "harness", line.name):
        place = folder.path(training, scenario, "harness", line.name, step) / FILE
        if not place.is_file():
            continue
        said = json.loads(place.read_bytes())
        proposed = Proposed(asks.mutations(said["mutations"]), said["reason"], said["metrics"])
        found.append(Written(said["batch"], proposed, said["actor"], said["ask"]))
    return found


def because(wanted: Sequence[Written], evaluation: Evaluation | None = None) -> str:
    """Why a release is made: a person's own words; a recipe's, with the gate's; else the gate's."""
    said = "; ".join(dict.fromkeys(one.proposed.reason for one in wanted if one.proposed.reason))
    if evaluation is None or (said and wanted[-1].actor is not None):
        return said
    return f"{said} ({evaluation.reason})" if said else evaluation.reason


def beside(wanted: Sequence[Written], evaluation: Evaluation) -> Evaluation:
    """What the gate measured, beside what the search did."""
    found = {name: value for one in wanted for name, value in one.proposed.metrics.items()}
    return replace(evaluation, metrics=found | dict(evaluation.metrics)) if found else evaluation


async def acting(tools: Tools, head: Release, line: Line) -> tuple[str, ...]:
    """What a line's harness brings that acts on a machine, and the head's has not: sentences for a person."""
    if line.part != "harness":
        return ()
    return hold.reasons(await served(tools, head), await working(tools, head, line))


def searched(training: Path, scenario: str, order: Order) -> Path:
    """The folder of an order's search."""
    return training / scenario / "harness" / SEARCH / f"order-{order.message.batch_id[:16]}"


def forget(training: Path, scenario: str, keep: Order | None = None) -> None:
    """Remove the folders of searches, but that of the order that is still out."""
    kept = None if keep is None else searched(training, scenario, keep)
    for place in (training / scenario / "harness" / SEARCH).glob("order-*"):
        if place != kept:
            shutil.rmtree(place, ignore_errors=True)
