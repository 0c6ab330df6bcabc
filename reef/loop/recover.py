"""After a crash: the ledger learns again what training folders and the chain know.

Knows: which durable thing is believed over which (folders and chain over the ledger).
Does not know: how to serve; the first line of every update aligns the board with the head.

- A step folder says which units were trained, and its order is done. A release says so too, for lines long forgotten.
- What the journal was not told of any more is told.
- Drafts of harness steps, and searches whose order is settled, are removed here; drafts of weights steps belong to the
  trainer, which may be at work on one.
"""

from __future__ import annotations

import asyncio
import shutil

from reef.core.failpoint import failpoint
from reef.core.nouns import PartName, Release
from reef.loop import tell
from reef.loop.binding import Tools
from reef.loop.edit import forget
from reef.loop.released import from_release
from reef.trainers import folder

PAGE = 50


async def recover(tools: Tools, scenario: str, part: PartName) -> None:
    """Bring the ledger of one part up to date. Repeating it changes nothing."""
    if part == "harness":
        for draft in (tools.training / scenario / part).glob("*/.*-*"):
            shutil.rmtree(draft, ignore_errors=True)
    _from_folders(tools, scenario, part)
    failpoint("loop.in_recover")
    if part == "harness":
        forget(tools.training, scenario, tools.ledger.order(scenario, part))
    for release in await _unknown(tools, scenario, part):
        from_release(tools, scenario, part, release)
    await tell.missed(tools, scenario)


def _from_folders(tools: Tools, scenario: str, part: PartName) -> None:
    order = tools.ledger.order(scenario, part)
    for place in sorted((tools.training / scenario / part).glob("*/[0-9]*")):
        state = folder.read(place)
        if state is None:
            continue
        asked = order.message if order is not None else None
        mine = (state.line, state.step, state.batch_id)
        if order is not None and asked is not None and mine == (asked.line, asked.step, asked.batch_id):
            tools.ledger.settle(order, "trained", dict(order.metrics) | dict(state.metrics))
            continue
        tools.ledger.restore(
            scenario, part, state.line, state.step, state.unit_ids,
            batch=state.batch_id, metrics=state.metrics, cursor=state.cursor,
        )  # fmt: skip


async def _unknown(tools: Tools, scenario: str, part: PartName) -> list[Release]:
    """The releases this part's lines made that no audit row speaks of, oldest first."""
    found: list[Release] = []
    before: str | None = None
    while page := await asyncio.to_thread(tools.chain.history, scenario, PAGE, before):
        for release in page:
            if release.operation in ("publish", "promote") and _made(release, part):
                if tools.ledger.knows(scenario, release.id):
                    return found[::-1]
                found.append(release)
        before = page[-1].id
    return found[::-1]


def _made(release: Release, part: PartName) -> bool:
    """Whether a line of this part made the release: only its own part has units in `consumed`."""
    return part in release.consumed and bool(release.consumed[part].units)
