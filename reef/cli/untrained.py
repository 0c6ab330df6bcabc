"""`reef records --why-not-trained [ID]`: one true sentence on a record, or a table of reasons with examples.

Knows: where a state folder keeps what tells, and how it is shown. Does not know: reasons (`loop.untrained`).

It reads the state folder, beside a server or without one, and writes nothing to it: sessions are brought up to date in
a copy. Only where there is no such folder, or `--url` names a server, is that asked; it says that it tells less.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import sqlite3
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from reef.cli import filters, gate, options, reader, show
from reef.cli.api import Found, connect, find
from reef.core.errors import MissingError
from reef.core.nouns import Record
from reef.scenario.story import Told

if TYPE_CHECKING:
    from reef.records import Query
    from reef.records.sqlite import SqliteStore

PAGE, MOST = 200, 1000
"""A table is of the newest MOST records (or as many as --limit says, if that is more)."""
_RECEIPT = re.compile(r"(?:rep_)?[0-9a-f]{32}")


def run(args: argparse.Namespace) -> int:
    place = find(args)
    given = getattr(args, "url", None)
    if given or (place.named and not (place.state_dir / "records.db").exists()):
        return _served(args)
    if place.named:
        print(f"reef: read from {place.state_dir}, not from {place.url}", file=sys.stderr)
    if args.id:
        told = asyncio.run(_one(place, args))
        if args.json:
            return show.dump(_shown(told))
        print(f"{told.record}: {told.sentence}")
        return 0
    wanted = filters.query(args, place.scenario)
    found = asyncio.run(_all(place, args, replace(wanted, limit=PAGE)))
    groups: dict[str, list[Told]] = {}
    for told in found:
        groups.setdefault(told.reason, []).append(told)
    rows = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    if args.json:
        return show.dump([{"reason": name, "count": len(all_), "example": _shown(all_[0])} for name, all_ in rows])
    table = [[name, len(all_), all_[0].record, all_[0].sentence] for name, all_ in rows]
    show.table(["reason", "records", "for example", "because"], table)
    print(f"of the newest {show.count(len(found), 'record')}; `reef records --why-not-trained RECEIPT` asks about one")
    return 0


def _served(args: argparse.Namespace) -> int:
    """What a server can tell of its records: what none of its recipes can train on, and what was written down."""
    said = "reef: a server tells less than its state folder; run this there, or with --reef.state_dir, for every reason"
    print(said, file=sys.stderr)
    with connect(args) as api:
        if args.id:
            record = show.one(api, args)
            name = record["agent_record_id"]
            lessons = api.get(f"/reef/why/{quote(name, safe='')}")["lessons"]
            told = [_shown(Told(name, item["fate"], item["said"])) for item in lessons]
            if not told:
                why = record["untrainable"]
                last = "nothing is written down of it: no report has come on it, or its turn has not"
                told = [_shown(Told(name, "untrainable" if why else "pending", why or last))]
            if args.json:
                return show.dump(told)
            print("\n".join(f"{name}: {item['sentence']}" for item in told))
            return 0
        filters.query(args, api.found.scenario)
        path = f"/reef/scenarios/{api.found.scenario}/records"
        found = api.get(path, limit=args.limit, **filters.given(args))
    rows = [item for item in found["records"] if item["untrainable"]]
    if args.json:
        return show.dump({**found, "records": rows})
    table = [[item["agent_record_id"], show.when(item["timing"]["received_at"]), item["untrainable"]] for item in rows]
    if table:
        show.table(["receipt", "received", "why not trained"], table)
    count = show.count(len(found["records"]), "record")
    print(f"{len(table)} of the newest {count} can never train (their answers have no exact tokens)")
    return 0


def _shown(told: Told) -> dict[str, str]:
    return {"agent_record_id": told.record, "reason": told.reason, "sentence": told.sentence}


async def _one(place: Found, args: argparse.Namespace) -> Told:
    async with _store(place) as store:
        named = _RECEIPT.search(args.id)
        entries = await store.get([named[0] if named else args.id])
        if not isinstance(record := entries[0], Record):
            raise MissingError(f"{args.id} is a report; `reef why {args.id}` tells what became of it")
        if args.scenario is not None and record.scenario != args.scenario:
            raise MissingError(f"no record {args.id} in scenario {args.scenario!r}; it is of {record.scenario!r}")
        with contextlib.ExitStack() as stack:
            why = await _asker(replace(place, scenario=record.scenario), args, store, stack)
            return await why(record)


async def _all(place: Found, args: argparse.Namespace, wanted: Query) -> list[Told]:
    found: list[Told] = []
    async with _store(place) as store:
        with contextlib.ExitStack() as stack:
            why = await _asker(place, args, store, stack)
            while len(found) < max(MOST, args.limit) and (page := await store.find(wanted)):
                found += [await why(entry) for _, entry in page if isinstance(entry, Record)]
                wanted = replace(wanted, before=page[-1][0])
    return found


# --- the state folder -------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _store(place: Found) -> AsyncIterator[SqliteStore]:
    from reef.records.sqlite import SqliteStore

    store = SqliteStore(reader.folder(place) / "records.db", owner="why")
    await store.start()
    try:
        yield store
    finally:
        await store.close()


async def _asker(
    place: Found, args: argparse.Namespace, store: SqliteStore, stack: contextlib.ExitStack
) -> Callable[[Record], Awaitable[Told]]:
    """With the recipes that the configuration (or its creation) gives a scenario."""
    from reef.cli import assemble
    from reef.cli.bind import bind
    from reef.cli.route import nowhere, scenario_of
    from reef.evaluation.book import Book

    settings, state, name = options.load(args).settings, place.state_dir, place.scenario
    assemble.known(state, name)
    board = assemble.open_board(state)
    try:
        bound = bind(settings, scenario_of(settings, name, board.scenarios().get(name, {})), nowhere)
    finally:
        board.close()
    book = Book(state / "gate.db", reading=True) if (state / "gate.db").exists() else Book.memory()
    stack.callback(book.close)
    copy = _copied(state / "sessions.db", Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reef-"))))
    held = gate.holdout(bound.settings.gate, name, book)
    return await assemble.untrained(state, bound.settings, bound.recipes, store, stack, holdout=held, sessions=copy)


def _copied(path: Path, folder: Path) -> Path:
    """A copy of the sessions that are known; what is damaged or not there is made again from the records."""
    copy = folder / path.name
    if path.exists():
        with contextlib.suppress(sqlite3.Error), contextlib.ExitStack() as both:
            address = f"{path.absolute().as_uri()}?mode=ro"
            source = both.enter_context(contextlib.closing(sqlite3.connect(address, uri=True)))
            source.backup(both.enter_context(contextlib.closing(sqlite3.connect(copy))))
    return copy
