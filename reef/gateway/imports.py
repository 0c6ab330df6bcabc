"""POST /reef/records and /reef/records/batch: exchanges and reports that happened elsewhere, stored all or none.

Knows: the two forms of an entry, how ids that are no receipts become some, and what of an entry cannot be so here.
Does not know: files, or where the entries come from (`cli/export.py` gives the same ones without a server).

- Our own form is a line of `reef export --shape raw` (`records.raw`); it comes back exactly as it was.
- The envelope `{agent_record_id, request_type, payload}`: an inference's payload is the request with its `response`
  inside, a report's is the body of POST /reef/report.
- Ids may be any text; one that is no receipt gets a receipt that depends on it and the scenario alone, so sending an
  entry again is harmless, and reports may quote either.
- A record whose release is not in this chain is answered by the present one on paper, and never trains.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reef.core.errors import InputError, MissingError, ReefError
from reef.core.ids import is_scenario, parse_receipt
from reef.core.nouns import Choice, Json, Record, Report, Timing
from reef.core.text import deeper, tidy
from reef.engines.dialect import Reader
from reef.engines.dialect import read as read_answer
from reef.gateway import report as reports
from reef.gateway import session
from reef.gateway.body import check_type, parse, read
from reef.gateway.call import Call
from reef.records import RecordStore, codec, raw

if TYPE_CHECKING:
    from reef.gateway.app import App

BYTES = 10 * 1024 * 1024
"""The largest body of these routes."""
MOST = 1000
"""Entries in a batch."""
DEEPEST = 512
"""Levels of an answer's message: what is deeper could be stored, but not surely read again."""
HIGHEST = 2**31 - 1
"""The largest number of a choice."""
IMPORTED = "imported"
FOREIGN = "imported from another release chain, so the model that answered is not known here"
_ENVELOPE = frozenset(
    ["agent_record_id", "request_type", "payload", "created_at", "scenario", "session", "tags", "references"]
) | {"artifact_ref", "release_id"}
_NAMES = ("session", "tags", "answer_id", "upstream_id", "client", "dialect", "model_answered")
_REPORT_ID = re.compile(r"rep_[A-Za-z0-9_-]{1,64}")
_THREAD = 256 * 1024  # bytes from which reading the entries leaves the event loop


async def one(app: App, call: Call) -> None:
    """One entry. 200 and its id, kind, scenario, and whether it was there already."""
    said, duplicates, erased = await _take(app, call, lambda body: [body])
    await call.json(200, {**said[0], "duplicate": bool(duplicates or erased)})


async def batch(app: App, call: Call) -> None:
    """`{records: […]}`, at most MOST. 200 and each entry's id, kind and scenario, in order.

    `duplicates` counts those that were there, or erased here on request, which `erased` counts alone.
    """
    said, duplicates, erased = await _take(app, call, _listed)
    await call.json(200, {"records": said, "duplicates": duplicates + erased, "erased": erased})


def _listed(body: Mapping[str, Json]) -> Sequence[Json]:
    found = body.get("records")
    if not isinstance(found, list) or not found:
        raise InputError("records must be a list with at least one entry", param="records")
    if len(found) > MOST:
        raise InputError(f"{len(found)} records; the limit is {MOST} in a batch", param="records")
    if unknown := sorted(set(body) - {"records"}):
        raise InputError(f"unknown field {unknown[0]!r}; a batch has: records", param=unknown[0])
    return found


async def _take(
    app: App, call: Call, listed: Callable[[dict[str, Json]], Sequence[Json]]
) -> tuple[list[dict[str, str]], int, int]:
    check_type(call.headers.get("content-type"))
    data = await read(call, BYTES)
    body = await asyncio.to_thread(_parse, data) if len(data) > _THREAD else _parse(data)
    entries = listed(body)
    call.scenario = scenario_of(entries, call.scenario) or app.context.default_scenario
    call.token.enter(call.scenario)
    serving = await app.serving(call)

    async def has(release_id: str) -> bool:
        try:
            return (await app.shelf.take(release_id)).release.scenario == serving.scenario
        except MissingError:
            return False

    ground = Ground(serving.scenario, serving.release_id, app.context.store, has)
    found = await bring(entries, ground)
    app.wake(serving.scenario)
    return found


def _parse(data: bytes) -> dict[str, Json]:
    try:
        value = raw.load(data)
    except (ValueError, RecursionError):
        return parse(data)  # says where the mistake is
    if not isinstance(value, dict):
        raise InputError("the body must be a JSON object")
    return value


# --- entries ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ground:
    """Where entries are to go: the scenario, its present release, the store, and which releases the chain has."""

    scenario: str
    release_id: str
    store: RecordStore
    has: Callable[[str], Awaitable[bool]]


def scenario_of(entries: Sequence[Json], named: str | None) -> str | None:
    """The scenario that the request names, else the one all entries name; None when nothing does."""
    if named is not None:
        return named
    found: dict[str, int] = {}
    for place, entry in enumerate(entries):
        name = entry.get("scenario") if isinstance(entry, dict) else None
        if name is not None and not (isinstance(name, str) and is_scenario(name)):
            raise _at(place, InputError("scenario is no name of a scenario", param="scenario"))
        if name is not None:
            found.setdefault(name, place)
    if len(found) > 1:
        raise InputError("the entries are of several scenarios; send a batch for each", param="records")
    return next(iter(found), None)


async def bring(entries: Sequence[Json], ground: Ground) -> tuple[list[dict[str, str]], int, int]:
    """Store the entries, all or none. What each is known by now, how many were there already, and how many erased.

    What was erased here on request is passed over, and so are reports on nothing else.
    InputError and ConflictError name the entry (`records[3].score`).
    """
    here = await _look(entries, ground)
    size = sum(len(text) for entry in entries if isinstance(text := entry.get("request"), str))
    made = await asyncio.to_thread(_build, entries, here) if size > _THREAD else _build(entries, here)
    left = [(place, entry) for place, item in enumerate(made) if (entry := _without(item, here.gone)) is not None]
    try:
        stored = await ground.store.append_all([entry for _, entry in left])
    except ReefError as error:
        raise _placed(error, [place for place, _ in left]) from None
    said = [
        {"agent_record_id": entry["agent_record_id"], "request_type": entry["request_type"], "scenario": here.scenario}
        for entry in entries
    ]
    return said, sum(item.duplicate for item in stored), len(made) - len(stored)


@dataclass(frozen=True, slots=True)
class _Here:
    """What this server knows of a batch: records it has already, releases that exist, receipts of what is quoted."""

    scenario: str
    release_id: str
    known: Mapping[str, Record | Report]
    releases: frozenset[str]
    quoted: Mapping[str, str]
    gone: frozenset[str]  # what was erased on request


async def _look(entries: Sequence[Json], ground: Ground) -> _Here:
    for place, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise InputError(f"records[{place}] must be an object", param=f"records[{place}]")
        if not isinstance(name := entry.get("agent_record_id"), str) or not name.strip() or len(name) > 512:
            raise _at(place, InputError("agent_record_id must be text", param="agent_record_id"))
        if entry.get("request_type") not in (raw.INFERENCE, raw.REPORT):
            raise _at(place, InputError("request_type must be inference or report", param="request_type"))
    ids = [_id(entry, ground.scenario) for entry in entries]
    known = await reports.stored(ground.store, ids)
    named = {name for entry in entries if isinstance(name := entry.get("release_id"), str)}
    releases = frozenset([name for name in sorted(named) if await ground.has(name)])
    fresh = {entry["agent_record_id"]: name for entry, name in zip(entries, ids, strict=True)}
    quoted = [name for entry in entries if entry["request_type"] == raw.REPORT for name in _quoted(entry)]
    found = await reports.resolve(ground.store, [name for name in quoted if name not in fresh], [ground.scenario])
    found |= fresh
    lost = {name: parse_receipt(name) or reports.derived(ground.scenario, name) for name in quoted if name not in found}
    erased = getattr(ground.store, "erased", None)  # a store need not be able to tell
    gone = frozenset(await erased([*ids, *lost.values()]) if erased else ())
    found |= {name: receipt for name, receipt in lost.items() if receipt in gone}
    return _Here(ground.scenario, ground.release_id, known, releases, found, gone)


def _without(entry: Record | Report, gone: frozenset[str]) -> Record | Report | None:
    """The entry without what was erased; None when nothing is left of it."""
    if entry.id in gone:
        return None
    if isinstance(entry, Report) and not gone.isdisjoint(entry.references):
        left = tuple(name for name in entry.references if name not in gone)
        scores = {name: value for name, value in entry.per_receipt.items() if name in left}
        return dataclasses.replace(entry, references=left, per_receipt=scores) if left else None
    return entry


def _build(entries: Sequence[Json], here: _Here) -> list[Record | Report]:
    made: list[Record | Report] = []
    for place, entry in enumerate(entries):
        try:
            made.append(_report(entry, here) if entry["request_type"] == raw.REPORT else _record(entry, here))
        except InputError as error:
            raise _at(place, error) from None
        except RecursionError:
            raise _at(place, InputError("the entry is nested too deeply")) from None
    return made


def _record(entry: Mapping[str, Any], here: _Here) -> Record:
    receipt = _id(entry, here.scenario)
    known = here.known.get(receipt)
    if "payload" in entry:
        made = _exchange(entry, receipt, here)
        plain = made
    else:
        named = entry.get("release_id")
        plain = raw.read_record(
            entry, receipt=receipt, scenario=here.scenario, release_id=named if isinstance(named, str) else ""
        )
        if plain.release_id and plain.release_id not in here.releases:
            made = dataclasses.replace(plain, release_id=here.release_id, untrainable=plain.untrainable or FOREIGN)
        else:
            made = dataclasses.replace(plain, release_id=plain.release_id or here.release_id)
        if made.untrainable is None and not _whole(made):
            made = _bare(made)
    if not isinstance(known, Record):
        _check(made, entry)
        return made
    # What an import filled in stays as it was the first time: the present release may be another one by now.
    same = dataclasses.replace(made, release_id=known.release_id, untrainable=known.untrainable)
    if codec.content(known) in (codec.content(plain), codec.content(same)) and known.status != "open":
        return known
    _check(made, entry)
    return made


def _check(record: Record, entry: Mapping[str, Any]) -> None:
    """What no record of ours has: an answer that is no JSON object, a response that goes on from itself."""
    if record.reply is not None and not isinstance(_value(record.reply), dict | None):  # null: too deep to be kept
        raise InputError("reply must be the answer as a JSON object; leave it out when there is none", param="reply")
    asked = _value(record.request)
    before = asked.get("previous_response_id") if isinstance(asked, dict) else None
    own = (record.id, record.answer_id, entry["agent_record_id"])
    if isinstance(before, str) and (before in own or parse_receipt(before) == record.id):
        field = "payload.previous_response_id" if "payload" in entry else "request"
        raise InputError("previous_response_id is the response itself; it must be an earlier one", param=field)
    for name in _NAMES:
        words = getattr(record, name)
        for word in (*words, *words.values()) if isinstance(words, Mapping) else (words or "",):
            if tidy(word) != word:
                raise InputError(f"{name} has half a character", param=name if name in entry else "payload")
    for place, choice in enumerate(record.choices):
        if not 0 <= choice.index <= HIGHEST:
            field = "payload.response" if "payload" in entry else f"choices[{place}].index"
            raise InputError(f"the index of a choice must be a whole number from 0 to {HIGHEST}", param=field)
        if deeper(choice.message, DEEPEST):
            field = "payload.response" if "payload" in entry else f"choices[{place}].message"
            raise InputError(f"the message is nested deeper than {DEEPEST}", param=field)


def _value(data: bytes) -> Json:
    """The JSON value; False when it is none."""
    try:
        return raw.load(data)
    except (ValueError, RecursionError):
        return False


def _whole(record: Record) -> bool:
    """Whether all that was sampled is there."""
    return (
        record.prompt_ids is not None
        and record.sampling is not None
        and bool(record.choices)
        and all(choice.output_ids is not None and choice.logprobs is not None for choice in record.choices)
    )


def _bare(record: Record) -> Record:
    choices = tuple(dataclasses.replace(choice, output_ids=None, logprobs=None, spans=()) for choice in record.choices)
    return dataclasses.replace(record, prompt_ids=None, choices=choices, untrainable=IMPORTED)


def _exchange(entry: Mapping[str, Any], receipt: str, here: _Here) -> Record:
    """The record of an envelope: its payload without `response` is the request."""
    if unknown := sorted(set(entry) - _ENVELOPE):
        raise InputError(f"unknown field {unknown[0]!r}; an envelope has: payload", param=unknown[0])
    payload = entry["payload"]
    if not isinstance(payload, dict):
        raise InputError("payload must be an object", param="payload")
    request = {name: value for name, value in payload.items() if name != "response"}
    if "messages" not in request and "input" not in request:
        raise InputError("the payload needs messages (or input): the request as it was", param="payload.messages")
    response = payload.get("response")
    dialect = _dialect(request, response)
    said: Reader | None = None
    choices: tuple[Choice, ...] = ()
    if isinstance(response, str):
        choices = (Choice(0, response, "stop"),)
    elif isinstance(response, dict):
        said = read_answer(dialect, raw.dump(response), stream=False)
        choices = said.choices()
    elif response is not None:
        raise InputError("response must be the answer's JSON object, or its text", param="payload.response")
    foreign = entry["agent_record_id"] if entry["agent_record_id"] != receipt else None
    tags, group = entry.get("tags") or {}, entry.get("session")
    if not isinstance(tags, dict) or not all(isinstance(value, str) for value in tags.values()):
        raise InputError("tags must be an object of texts", param="tags")
    if group is not None and not isinstance(group, str):
        raise InputError("session must be text", param="session")
    model = request.get("model")
    return Record(
        id=receipt,
        scenario=here.scenario,
        release_id=here.release_id,
        purpose="live",
        dialect=dialect,
        status="complete",
        request=raw.dump(request).rstrip(b"\n"),
        timing=Timing(_time(entry)),
        reply=said.reply if said else None,
        choices=choices,
        usage=said.usage if said else None,
        model_asked=model if isinstance(model, str) else None,
        model_answered=said.model if said else None,
        session=group or session.session_of({}, request),
        tags=tags,
        answer_id=(said.id if said else None) or (tidy(foreign) if foreign else None),
        untrainable=IMPORTED,
    )


def _dialect(request: Mapping[str, Json], response: Json) -> str:
    if "input" in request and "messages" not in request:
        return "responses"
    if isinstance(response, dict) and response.get("type") == "message":
        return "messages"
    return "chat"


def _report(entry: Mapping[str, Any], here: _Here) -> Report:
    body = entry.get("payload", {k: v for k, v in entry.items() if k not in ("request_type", "scenario", "created_at")})
    if not isinstance(body, dict):
        raise InputError("payload must be an object", param="payload")
    body = {name: value for name, value in body.items() if name != "agent_record_id"}
    draft = reports.check(reports.rename(body, here.quoted))
    return dataclasses.replace(draft, id=_id(entry, here.scenario), scenario=here.scenario, created_at=_time(entry))


def _quoted(entry: Mapping[str, Any]) -> list[str]:
    body = entry.get("payload", entry)
    return reports.names(body) if isinstance(body, dict) else []


def _id(entry: Mapping[str, Any], scenario: str) -> str:
    name: str = entry["agent_record_id"]
    if entry["request_type"] == raw.REPORT:
        return name if _REPORT_ID.fullmatch(name) else "rep_" + reports.derived(scenario, name)
    return parse_receipt(name) or reports.derived(scenario, name)


def _time(entry: Mapping[str, Any]) -> float:
    value = entry.get("created_at")
    if value is None:
        return time.time()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InputError("created_at must be a time in unix seconds", param="created_at")
    return float(value)


def _at(place: int, error: InputError) -> InputError:
    where = f"records[{place}]" + (f".{error.param}" if error.param else "")
    return InputError(f"{where}: {error.message}", param=where)


def _placed(error: ReefError, places: Sequence[int]) -> ReefError:
    """A store's error about one of several entries, as one about this request. `places`: theirs in the request."""
    found = re.match(r"entry (\d+): ", error.message)
    if found is None:
        return error
    where = f"records[{places[int(found[1])]}]" + (error.param or "").partition("]")[2]
    kind = InputError if isinstance(error, MissingError) else type(error)
    return kind(f"{where}: {error.message[found.end() :]}", param=where)
