"""Releases and records as JSON, and the routes that read them.

Knows: paging (newest first, `after` goes on where a page ended), filters, which fields a person or program gets.
Does not know: anything that is not in the chain or the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, get_args

import orjson

from reef.core.errors import InputError, MissingError, StoreError
from reef.core.ids import parse_receipt
from reef.core.nouns import Act, Choice, Purpose, Record, Release, Report, Status
from reef.core.text import Written
from reef.gateway.call import Call
from reef.gateway.errors import nowhere
from reef.gateway.report import resolve
from reef.records import Query
from reef.scenario.audit import Ruling

if TYPE_CHECKING:
    from reef.gateway.app import App

PAGE = 50
MOST = 500
PAGED = ("after", "limit")
_FILTERS: Mapping[str, tuple[str, ...] | None] = {
    "session": None,
    "release_id": None,
    "status": get_args(Status),
    "purpose": get_args(Purpose),
}
_OLDEST = 1e8  # seconds
_YEAR = re.compile(r"[0-9]{4}")
_RANGES = ("since", "until", "min_score", "max_score")


async def releases(app: App, call: Call) -> None:
    """`{releases, next}`; `next` is the `after` of the following page, or null.

    Each has its `gain` as it was measured again on fresh tasks. `all=true` adds `rulings`: what was turned down or is
    held beside them, newest first; null when the learner's audit cannot be read.
    """
    name = scenario_of(app, call)
    limit = call.number("limit", PAGE, MOST) or PAGE
    after, whole = call.query("after"), call.query("all") in ("true", "1")

    def ask() -> tuple[list[Release], list[dict[str, Any] | None], list[Ruling] | None]:
        found = app.context.chain.history(name, limit + 1, after)
        gains = [gain(app.why.journal.about(item.id)) for item in found[:limit]]
        rulings: list[Ruling] | None = None
        if whole:
            with contextlib.suppress(StoreError):
                rulings = app.why.audit.newest(name, limit, ("reject", "hold"))
        return found, gains, rulings

    found, gains, rulings = await asyncio.to_thread(ask)
    current = _current(app, name)
    shown = [
        release_view(item, current=item.id == current) | {"gain": more}
        for item, more in zip(found[:limit], gains, strict=True)
    ]
    body: dict[str, Any] = {
        "releases": shown,
        "next": shown[-1]["release_id"] if len(found) > limit else None,
    }
    if whole:
        body["rulings"] = None if rulings is None else [ruling_view(row) for row in standing(rulings, found)]
    await call.json(200, body)


async def release(app: App, call: Call) -> None:
    """One release or candidate, by id or unique prefix."""
    name = scenario_of(app, call)
    found = (await app.shelf.take(call.params["id"], name)).release
    await call.json(200, release_view(found, current=found.id == _current(app, name)))


async def records(app: App, call: Call) -> None:
    """`{records, next}`, newest first. See `filters` for what narrows them."""
    name = scenario_of(app, call)
    query = filters(call.queries(), name)
    found = await app.context.store.find(replace(query, limit=query.limit + 1))
    shown = [record_view(item) | {"seq": seq} for seq, item in found[: query.limit] if isinstance(item, Record)]
    await call.json(200, {"records": shown, "next": _next(found, query.limit)})


async def record(app: App, call: Call) -> None:
    """One record, whole: request, what the engine got, choices with their tokens, and the reports that quote it.

    By its receipt, or by another id that a report may quote it by.
    """
    name, wanted = scenario_of(app, call), call.params["*"]
    missing = MissingError(f"scenario {name!r} has no record {wanted[:80]!r}", param="id")
    receipt = wanted if parse_receipt(wanted) == wanted else None
    if receipt is None and (receipt := (await resolve(app.context.store, [wanted], [name])).get(wanted)) is None:
        raise missing
    try:
        (found,) = await app.context.store.get([receipt])
    except MissingError:
        raise missing from None
    if not isinstance(found, Record) or found.scenario != name:
        raise missing
    view = record_view(found, whole=True)
    reports_on = getattr(app.context.store, "reports_on", None)  # a store need not be able to
    if reports_on is not None:
        view["reports"] = [report_view(item) for item in await reports_on(receipt)]
    await call.json(200, view)


async def reports(app: App, call: Call) -> None:
    """`{reports, next}`, newest first, paged like records; filters: since, until, min_score, max_score."""
    name = scenario_of(app, call)
    query = filters(call.queries(), name, kind="report")
    found = await app.context.store.find(replace(query, limit=query.limit + 1))
    shown = [report_view(item) | {"seq": seq} for seq, item in found[: query.limit] if isinstance(item, Report)]
    await call.json(200, {"reports": shown, "next": _next(found, query.limit)})


def filters(given: Mapping[str, str], scenario: str, *, kind: str = "record") -> Query:
    """Query parameters as a query; InputError names one that is unknown or wrong.

    after, limit; since, until (unix seconds or ISO 8601; without an offset it is UTC), min_score, max_score (of the
    reports on a record, or of a report); and for records session, release_id, status, purpose, tag (`name:value`).
    """
    names = (*PAGED, *_RANGES) if kind == "report" else (*PAGED, *_FILTERS, "tag", *_RANGES)
    given = only(given, names)
    texts: dict[str, str] = {}
    for key, allowed in _FILTERS.items():
        if (value := given.get(key)) is not None:
            if allowed is not None and value not in allowed:
                raise InputError(f"{key} must be one of {', '.join(allowed)}", param=key)
            texts[key] = value
    tag: tuple[str, str] | None = None
    if (value := given.get("tag")) is not None:
        name, separator, value = value.partition(":")
        if not separator or not name:
            raise InputError("tag must be name:value", param="tag")
        tag = name, value
    return Query(
        scenario,
        kind=kind,
        before=number(given, "after", 0, 2**62) or None,
        limit=number(given, "limit", PAGE, MOST),
        since=moment(given.get("since"), "since"),
        until=moment(given.get("until"), "until"),
        tag=tag,
        low=_score(given.get("min_score"), "min_score"),
        high=_score(given.get("max_score"), "max_score"),
        **texts,
    )


def moment(text: str | None, name: str) -> float | None:
    """Unix seconds from a number, a year, or an ISO 8601 date or time; one without an offset is UTC.

    A number that would be a moment before March 1973 is no moment (but for 0): it is a year, or a mistake.
    """
    if text is None:
        return None
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(text)):
            if value >= _OLDEST or value == 0:
                return value
            if not _YEAR.fullmatch(text):
                raise _no_moment(text, name)
            text = f"{text}-01-01"
    try:
        # A "+" of the offset that was not escaped has become a space on its way here.
        found = datetime.fromisoformat(text.strip().replace(" ", "+") if "T" in text else text.strip())
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise _no_moment(text, name) from None


def _no_moment(text: str, name: str) -> InputError:
    said = f"{name} must be unix seconds, a date or time like 2025-01-31T12:00:00Z, or a year, not {text[:40]!r}"
    return InputError(said, param=name)


def _score(text: str | None, name: str) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{name} must be a number, not {text[:40]!r}", param=name)
    return value


def number(given: Mapping[str, str], name: str, default: int, most: int) -> int:
    """A whole, positive number, at most `most`."""
    if (text := given.get(name)) is None:
        return default
    if not text.isascii() or not text.isdigit() or not int(text[:18]) > 0:
        raise InputError(f"{name} must be a whole number of 1 or more", param=name)
    return min(int(text[:18]), most)


def only(given: Mapping[str, str], known: Sequence[str]) -> Mapping[str, str]:
    if unknown := sorted(set(given) - set(known)):
        raise InputError(f"no parameter {unknown[0][:40]!r} here; there are: {', '.join(known)}", param=unknown[0])
    return given


def _next(found: Sequence[tuple[int, Record | Report]], limit: int) -> int | None:
    return found[limit - 1][0] if len(found) > limit else None


def standing(rulings: Sequence[Ruling], releases: Sequence[Release]) -> list[Ruling]:
    """Of rulings, newest first, those that still hold: one that held a candidate ends with the decision on it."""
    decided = {item.evaluation.candidate_id for item in releases if item.operation == "promote" and item.evaluation}
    kept = []
    for row in rulings:
        if row.verdict != "hold" or row.candidate not in decided:
            kept.append(row)
        if row.candidate is not None:
            decided.add(row.candidate)
    return kept


def release_view(item: Release, *, current: bool) -> dict[str, Any]:
    """A release as API.md lists it. Part files are `{name: {sha256, bytes}}`."""
    parts = {
        name: {
            "kind": part.kind,
            "files": {file: {"sha256": sha256, "bytes": size} for file, (sha256, size) in part.files.items()},
            "meta": dict(part.meta),
        }
        for name, part in item.parts.items()
    }
    return {
        "release_id": item.id,
        "seq": item.seq,
        "scenario": item.scenario,
        "operation": item.operation,
        "parts": parts,
        "parent": item.parent,
        "base": item.base,
        "step": item.step,
        "line": item.line,
        "evaluation": asdict(item.evaluation) if item.evaluation else None,
        "recipe": item.recipe,
        "consumed": {part: asdict(consumed) for part, consumed in item.consumed.items()},
        "actor": item.actor,
        "reason": item.reason,
        "created_at": item.created_at,
        "current": current,
    }


def gain(acts: Sequence[Act]) -> dict[str, Any] | None:
    """A release's newest measurement on fresh tasks, from what the journal says of it; None: it has none."""
    for act in reversed(acts):
        if act.kind == "measure":
            return {**act.detail, "said": act.reason, "at": act.at}
    return None


def ruling_view(row: Ruling) -> dict[str, Any]:
    """An audit row."""
    return asdict(row)


def record_view(item: Record, *, whole: bool = False) -> dict[str, Any]:
    """A record; `whole` adds the bodies and the sampled tokens."""
    view = {
        "agent_record_id": item.id,
        "scenario": item.scenario,
        "release_id": item.release_id,
        "purpose": item.purpose,
        "dialect": item.dialect,
        "status": item.status,
        "timing": asdict(item.timing),
        "usage": asdict(item.usage) if item.usage else None,
        "model_asked": item.model_asked,
        "model_answered": item.model_answered,
        "session": item.session,
        "tags": dict(item.tags),
        "client": item.client,
        "upstream_id": item.upstream_id,
        "answer_id": item.answer_id,
        "error": item.error,
        "untrainable": item.untrainable,
    }
    if not whole:
        choices = [{"index": c.index, "text": c.text, "finish_reason": c.finish_reason} for c in item.choices]
        return view | {"choices": choices}
    return view | {
        "choices": [_choice(choice) for choice in item.choices],
        "request": _json(item.request),
        "rendered": None if item.rendered is None else _json(item.rendered),
        "reply": None if item.reply is None else _json(item.reply),
        "prompt_ids": item.prompt_ids,
        "sampling": asdict(item.sampling) if item.sampling else None,
    }


def _choice(item: Choice) -> dict[str, Any]:
    """Field by field: a message may be nested deeper than `asdict` goes."""
    whole = {field.name: getattr(item, field.name) for field in fields(item)}
    return whole | {"spans": [asdict(span) for span in item.spans]}


def report_view(item: Report) -> dict[str, Any]:
    return {
        "agent_record_id": item.id,
        "scenario": item.scenario,
        "references": list(item.references),
        "created_at": item.created_at,
        "score": item.score,
        "metrics": dict(item.metrics),
        "per_receipt": dict(item.per_receipt),
        "feedback": item.feedback,
        "choice": item.choice,
        "demonstration": item.demonstration,
        "metadata": item.metadata,
    }


def _json(body: bytes) -> Any:
    """A body for a JSON answer: as it is when it is JSON, else as text."""
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace")
    return Written(body)


def scenario_of(app: App, call: Call) -> str:
    name = call.params["s"]
    if app.context.watch.get(name) is None:  # another gateway may have made it a moment ago
        app.context.watch.refresh()
    if app.context.watch.get(name) is None:
        raise nowhere(name, "scenario")
    return name


def _current(app: App, name: str) -> str | None:
    served = app.context.watch.get(name)
    return served.release_id if served else None
