"""What people asked for: which row of the queue is next, and what came of each, told back to its row.

Knows: that the ledger says what became of an ask (its id stands among the units of an order), and the row follows.
Does not know: how an ask is carried out (`edit`, `update`), HTTP.

- An ask becomes a part of an order like a unit, and is settled with it: once, also across crashes. A row that a crash
  left behind is brought up to date at the next update; an ask that the ledger settled is never taken again.
- A person's mutations need no recipe: where none has the harness, `Edits` stands in while something waits.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, cast

from reef.core.errors import MissingError
from reef.core.failpoint import failpoint
from reef.core.nouns import Json, PartName
from reef.harness.tree import Mutation
from reef.loop.binding import Binding, Tools
from reef.loop.ledger import Ledger, Order
from reef.loop.line import Line
from reef.loop.released import from_release
from reef.recipe import Recipe
from reef.recipe.bench import Proposed
from reef.recipe.edits import Edits
from reef.records.queue import Ask, State, is_ask
from reef.trainers import folder

NAME: Final = "proposal"
"""How a release calls what a person proposed, in the place of a recipe."""

BACK: Final = 50
"""Releases among which one that took an ask along is looked for."""
Standing = tuple[State, str, str | None, str | None]
"""An ask's state, a sentence, its candidate and its release."""
_FATES: Final[Mapping[str, State]] = {"refused": "refused", "no edit": "done", "failed": "failed"}


def whole(tools: Tools, binding: Binding) -> Binding:
    """The binding with somebody for the harness, where a person's proposal waits and no recipe has that part."""
    open_ones = tools.queue.open(binding.scenario)
    for ask in open_ones:
        if ask.part not in binding.recipes and ask.kind == "instruction":
            tools.queue.tell(ask.id, "refused", f"no recipe of {ask.scenario} learns the {ask.part} any more")
    proposed = any(ask.part == "harness" and ask.kind == "proposal" for ask in open_ones)
    if "harness" in binding.recipes or not (proposed or tools.ledger.order(binding.scenario, "harness")):
        return binding
    recipes, names = dict(binding.recipes), dict(binding.names)
    recipes["harness"], names["harness"] = cast(Recipe, Edits()), NAME
    return replace(binding, recipes=recipes, names=names)


def following(tools: Tools, binding: Binding, part: PartName) -> Ask | None:
    """The ask whose turn it is. Instructions that nothing here takes (any more) are refused on the way."""
    for ask in tools.queue.open(binding.scenario, part):
        if any(of == part for of, *_ in tools.ledger.fate(binding.scenario, ask.id)):
            continue
        if ask.kind == "proposal" or (why := unwanted(binding, part)) is None:
            return ask
        tools.queue.tell(ask.id, "refused", why)
    return None


def unwanted(binding: Binding, part: PartName) -> str | None:
    """Why a part takes no instructions."""
    if binding.trigger == "auto":
        return "training.trigger is auto: it learns from experience only"
    if part == "harness" and not hasattr(binding.recipes[part], "search"):
        return f"the recipe {binding.names[part]} takes no instructions; propose mutations instead"
    return None


def of(tools: Tools, order: Order) -> Ask | None:
    """The ask that an order came from. MissingError when it names one that is gone."""
    name = named(order.message.unit_ids)
    return None if name is None else tools.queue.get(name)


def named(units: Sequence[str]) -> str | None:
    """The ask among the units of an order or step."""
    return next(filter(is_ask, units), None)


def batch_id(part: PartName, units: Sequence[str]) -> str:
    """As a batch's: a digest of part and units, so that a retry is recognised."""
    return hashlib.sha256(json.dumps([part, *sorted(units)]).encode()).hexdigest()


def proposed(ask: Ask) -> Proposed:
    """A proposal's mutations with their reason."""
    return Proposed(mutations(ask.body.get("mutations")), line(str(ask.body.get("reason") or "")))


def mutations(given: Json) -> tuple[Mutation, ...]:
    return tuple(Mutation(one["op"], one["id"], one.get("kind"), one.get("config")) for one in given or ())


def line(text: str, most: int = 500) -> str:
    """A reason as one line that can be printed."""
    one = "".join(letter if letter.isprintable() else " " for letter in text)
    one = " ".join(one.split())
    return one if len(one) <= most else one[: most - 1] + "…"


async def follow(tools: Tools, binding: Binding, line: Line, trouble: str | None = None) -> None:
    """Bring the rows of a part's open asks up to date. One whose line was left, since somebody else moved the head, is
    free to be carried out again. `trouble`: why the last try came to nothing."""
    for ask in tools.queue.open(binding.scenario, line.part):
        if (left := _left(tools.ledger, ask, line)) is not None:
            await _again(tools, ask, line.part, left)
        state, said, candidate, release = standing(tools.ledger, ask, line, binding)
        if state == "taken" and trouble:
            said = f"it is tried again: {trouble}"
        if tools.queue.tell(ask.id, state, said, candidate=candidate, release=release):
            failpoint("loop.after_asks")


def _left(ledger: Ledger, ask: Ask, line: Line) -> tuple[str, int] | None:
    """The line and step of an ask that a line made and that was never decided, where the part has another line now."""
    for part, _, fate, name, step in ledger.fate(ask.scenario, ask.id):
        if (part, fate) != (line.part, "trained") or name is None or name == line.name or part == "weights":
            continue
        if all(look.verdict == "undecided" for look in ledger.looks(ask.scenario, line.part, name)):
            return name, step or 0
    return None


async def _again(tools: Tools, ask: Ask, part: PartName, left: tuple[str, int]) -> None:
    """Forget the step of a line that was left, unless a release has it, whose audit row is then still to be written."""
    for release in await asyncio.to_thread(tools.chain.history, ask.scenario, BACK):
        if part in release.consumed and ask.id in release.consumed[part].units:
            from_release(tools, ask.scenario, part, release)
            return
    place = folder.path(tools.training, ask.scenario, part, *left)
    await asyncio.to_thread(shutil.rmtree, place, True)  # first: a folder is believed over the ledger
    tools.ledger.free(ask.scenario, part, ask.id)
    failpoint("loop.after_free")


def standing(ledger: Ledger, ask: Ask, line: Line, binding: Binding) -> Standing:
    """What the ledger says of an ask."""
    part = line.part
    fates = [(fate, of_line) for of, _, fate, of_line, _ in ledger.fate(ask.scenario, ask.id) if of == part]
    if not fates:
        order = ledger.order(ask.scenario, part)
        if order is not None and ask.id in order.message.unit_ids:
            return "taken", "", None, None
        if line.held:
            return "queued", "a candidate is held: promote or reject it first (`reef candidates --held`)", None, None
        waits = "it waits for enough reports to make a batch" if part == "weights" else ""
        return "queued", waits, None, None
    fate, of_line = fates[0]
    if fate != "trained":
        return _FATES.get(fate, "failed"), ledger.why(ask.scenario, ask.id) or fate, None, None
    looks = ledger.looks(ask.scenario, part, of_line, 1) if of_line else []
    look = looks[0] if looks else None
    if look is not None and look.verdict == "accept":
        return "accepted", look.reason, look.candidate, look.release
    if look is not None and look.verdict == "reject":
        return "rejected", look.reason, look.candidate, None
    if look is not None and look.verdict == "hold":
        return "held", look.reason, look.candidate, None
    if part == "weights" and not (line.name == of_line and line.due(binding.evaluate_every)):
        return "done", "a step was trained from a batch of reports; the gate has not decided on it yet", None, None
    return "taken", "the edit is made; the gate looks at it", None, None


def missing(error: MissingError) -> str:
    """Why an order without its ask is given up."""
    return f"what a person asked for is gone from the queue ({error.message})"
