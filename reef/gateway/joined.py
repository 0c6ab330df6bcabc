"""Sessions over HTTP: those that clients named, and those that the learner joined by their transcripts.

Knows: both lists as one, paged by the log's numbers; where each record of a session stands in its tree.
Does not know: how sessions are joined. Without the learner's file there are the named ones, and no places.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from reef.core.errors import MissingError, StoreError
from reef.core.nouns import Record
from reef.experience.sessions import Listed, Sessions
from reef.gateway.call import Call
from reef.gateway.views import MOST, PAGE, PAGED, number, only, record_view, scenario_of

if TYPE_CHECKING:
    from reef.gateway.app import App

T = TypeVar("T")


async def sessions(app: App, call: Call) -> None:
    """`{sessions, next, joined}`: the one with the newest record first. A session that no client named has the first
    receipt of it as its name. `within`: the session that a sub-agent's own is a branch of. `joined`: whether sessions
    were joined here; if not, what only that can tell is null."""
    name = scenario_of(app, call)
    given = only(call.queries(), PAGED)
    limit, after = number(given, "limit", PAGE, MOST), number(given, "after", 0, 2**62)
    found = await _able(app, "sessions")(name, after or None, limit + 1)

    def look(joined: Sessions) -> tuple[list[Listed], dict[str, str | None], dict[str, Listed | None]]:
        within = {group.session: joined.within(name, group.session) for group in found}
        about = {group.session: joined.about(name, group.session) for group in found}
        return joined.listed(name, after or None, limit + 1, unnamed=True), within, about

    seen = await _joined(app, look)
    others, within, about = seen or ([], {}, {})
    shown = [
        asdict(group)
        | {"named": True, "within": None if within.get(group.session) == group.session else within.get(group.session)}
        | _counts(about.get(group.session))
        for group in found
    ]
    shown += [
        {"session": each.session, "last_seq": each.last, "count": each.count, "first_at": each.first_at}
        | {"last_at": each.last_at, "named": False, "within": None}
        | _counts(each)
        for each in others
    ]
    shown.sort(key=lambda item: item["last_seq"], reverse=True)
    more = shown[limit - 1]["last_seq"] if len(shown) > limit else None
    await call.json(200, {"sessions": shown[:limit], "next": more, "joined": seen is not None})


def _counts(about: Listed | None) -> dict[str, int | None]:
    names = ("branches", "sides", "retries")
    return {name: None if about is None else getattr(about, name) for name in names}


async def session(app: App, call: Call) -> None:
    """`{session, records, next, joined}`: one session's records, the oldest first, with those of its sub-agents. Each
    has its `place` in the tree: session, parent, kind, segment, branch, turn, note; null: it has none (yet)."""
    name, wanted = scenario_of(app, call), call.params["*"]
    given = only(call.queries(), PAGED)
    limit, after = number(given, "limit", PAGE, MOST), number(given, "after", 0, 2**62)
    found: list[tuple[int, Record]] = await _able(app, "session")(name, wanted, after, limit + 1)
    others = await _joined(app, lambda joined: joined.members(name, wanted, after, limit + 1)) or []
    found = sorted([*found, *await _records(app, name, others)], key=lambda pair: pair[0])
    if not found and not after:
        raise MissingError(f"scenario {name!r} has no session {wanted[:80]!r}", param="session")
    places = await _joined(app, lambda joined: joined.places([record.id for _, record in found]))
    shown = []
    for seq, record in found[:limit]:
        place = (places or {}).get(record.id)
        shown.append(record_view(record) | {"seq": seq, "place": None if place is None else asdict(place)})
    more = found[limit - 1][0] if len(found) > limit else None
    await call.json(200, {"session": wanted, "records": shown, "next": more, "joined": places is not None})


async def _records(app: App, scenario: str, wanted: Sequence[tuple[int, str]]) -> list[tuple[int, Record]]:
    """These records; those that were forgotten meanwhile are left out."""
    found = []
    for seq, receipt in wanted:
        try:
            (record,) = await app.context.store.get([receipt])
        except MissingError:
            continue
        if isinstance(record, Record) and record.scenario == scenario:
            found.append((seq, record))
    return found


async def _joined(app: App, look: Callable[[Sessions], T]) -> T | None:
    """What the learner's file says; None when there is none that can be read."""
    path = app.context.sessions

    def ask() -> T | None:
        if path is None or not path.is_file():
            return None
        try:
            joined = Sessions(path, reading=True)
            try:
                return look(joined)
            finally:
                joined.close()
        except StoreError:
            return None

    return await asyncio.to_thread(ask)


def _able(app: App, name: str) -> Any:
    """A reading method that a store need not have."""
    if (found := getattr(app.context.store, name, None)) is None:
        raise MissingError("this record store cannot list sessions; use records?session=NAME")
    return found
