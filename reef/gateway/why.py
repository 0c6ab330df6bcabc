"""GET /reef/why/{id}: a record, report, release, candidate or ask, forward and back, as far as the token sees.

Knows: which kind of thing an id names, and the answer as JSON. Does not know: how the story is put together
(`scenario.why`). `explain` and `view` are also what `reef why` uses on a state folder without a server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from reef.core.errors import ChainError, MissingError
from reef.core.ids import parse_receipt
from reef.core.nouns import Record, Release, Report
from reef.gateway.call import Call
from reef.gateway.report import derived, resolve
from reef.gateway.views import record_view, release_view, report_view
from reef.records.queue import is_ask
from reef.scenario.story import BECAME, MOST, SHOWN, AskStory, CandidateStory, Page, Story
from reef.scenario.why import Why

if TYPE_CHECKING:
    from reef.gateway.app import App


async def why(app: App, call: Call) -> None:
    """`limit`: of each list; `units` and `releases`: where the lists of what was learnt and of releases go on."""
    wanted = call.params["*"]
    page = Page(
        call.number("limit", SHOWN, MOST) or SHOWN,
        call.number("units", None, 2**62) or 0,
        call.number("releases", None, 2**62) or 0,
    )
    names = await asyncio.to_thread(app.context.board.names)  # an answer of an archived scenario has a story, too
    places = [name for name in names if call.token.sees(name) and call.scenario in (None, name)]
    await call.json(200, view(await explain(app.why, wanted, places, page)))


async def explain(asked: Why, wanted: str, scenarios: Sequence[str], page: Page) -> Story:
    """The story of what an id names, among these scenarios. MissingError: nothing there has this id."""
    missing = MissingError(
        f"nothing here is called {wanted[:80]!r}; give a receipt or another id of an answer, a report's id (rep_…), "
        "the id of a release or candidate, or of what was asked for (ask_…)",
        param="id",
    )
    if is_ask(wanted) and (told := await _asked(asked, wanted, scenarios, page)) is not None:
        return told
    receipt = parse_receipt(wanted)
    names = [wanted] if receipt is None or receipt == wanted else [wanted, receipt]
    if (found := await _entry(asked, names, scenarios)) is None:
        if (release := await _release(asked, wanted, scenarios)) is not None:
            return await asked.release(release, page)
        quoted = await resolve(asked.store, [wanted], scenarios)
        found = await _entry(asked, list(quoted.values()), scenarios)
    if found is not None:
        return await (asked.report(found, page) if isinstance(found, Report) else asked.record(found, page))
    if receipt is not None and (story := await asked.erased(scenarios, receipt, page)) is not None:
        return story
    imported = {derived(place, wanted): place for place in scenarios}
    for name in await asked.forgotten(list(imported)):
        if (story := await asked.erased([imported[name]], name, page)) is not None:
            return story
    raise missing


async def _asked(asked: Why, wanted: str, scenarios: Sequence[str], page: Page) -> AskStory | None:
    """What a person asked for, and what came of it: of a held edit, what was decided since."""
    try:
        found = await asyncio.to_thread(asked.asks.get, wanted) if asked.asks is not None else None
    except MissingError:
        return None
    if found is None or found.scenario not in scenarios:
        return None
    candidate: CandidateStory | None = None
    unknown: tuple[str, ...] = ()
    if found.candidate is not None:
        try:
            story = await asked.release(await asked.find(found.candidate, [found.scenario]), page)
        except (ChainError, MissingError) as error:
            unknown = (f"the candidate {found.candidate} that came of it cannot be read: {error.message}",)
        else:
            candidate = story if isinstance(story, CandidateStory) else None
    state: str = found.state
    said, became = found.said, candidate.became if candidate else None
    if candidate is not None and state == "held" and (decided := BECAME.get(candidate.state)) is not None:
        state, said = decided, candidate.looks[0].reason if decided == "rejected" and candidate.looks else said
    return AskStory(found.id, found.scenario, found, state, said, candidate, became, unknown)


async def _entry(asked: Why, names: Sequence[str], scenarios: Sequence[str]) -> Record | Report | None:
    for name in names:
        try:
            (found,) = await asked.store.get([name])
        except MissingError:
            continue
        if found.scenario in scenarios:
            return found
    return None


async def _release(asked: Why, wanted: str, scenarios: Sequence[str]) -> Release | None:
    """A release or candidate by id or prefix. A prefix of several is an error only where the asker sees them all."""
    try:
        return await asked.find(wanted, scenarios)
    except MissingError as error:
        if "more than one" in error.message:
            raise
        return None


def view(value: Any) -> Any:
    """A story as JSON."""
    if isinstance(value, Record):
        return record_view(value)
    if isinstance(value, Report):
        return report_view(value)
    if isinstance(value, Release):
        consumed = {part: {"cursor": held.cursor, "units": len(held.units)} for part, held in value.consumed.items()}
        shown = release_view(value, current=False) | {"consumed": consumed}
        del shown["current"]
        return shown
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: view(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): view(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [view(item) for item in value]
    return value
