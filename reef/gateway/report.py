"""POST /reef/report: feedback on answers, checked, stored, and the learner told.

Knows: the fields of a report and what is wrong with each; how its scenario is found from the receipts it quotes.
Does not know: what the feedback is worth. A stored report is answered before anybody has looked at it. A report on a
session quotes what `spoken` finds of it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reef.core.errors import ConfigError, ConflictError, InputError, MissingError
from reef.core.failpoint import failpoint
from reef.core.ids import new_report, parse_receipt
from reef.core.nouns import Json, Record, Report
from reef.core.text import deeper
from reef.gateway import spoken
from reef.gateway.auth import Token
from reef.gateway.body import check_type, parse, read
from reef.gateway.call import Call
from reef.records import Query, RecordStore, Stored

if TYPE_CHECKING:
    from reef.gateway.app import App

MAX_REFERENCES = 1000
RECEIPT = 32  # characters
LARGEST = 1e6
"""Of any number in a report, either sign. Squares and sums of such numbers stay finite in every recipe."""
DEEPEST = 64
"""Levels of lists and objects in feedback, a demonstration or metadata."""
_REPORT_ID = re.compile(r"rep_[A-Za-z0-9_-]{1,64}")
_FIELDS = frozenset(
    [
        "score",
        "metrics",
        "feedback",
        "references",
        "session",
        "per_receipt",
        "choice",
        "demonstration",
        "metadata",
        "agent_record_id",
    ]
)
_SAYING = ("score", "metrics", "per_receipt", "feedback", "demonstration")
_QUOTE = "quote the x-reef-agent-record-id header of an answer"
_OR = f"{_QUOTE}, or give the session's id as session"


async def report(app: App, call: Call) -> None:
    """Store one report and answer with its id."""
    body = await _read(app, call)
    session = spoken.named(body, call.headers)
    if session is None:
        entry, stored = await _quoting(app, call, body)
    else:
        entry, stored = await _about(app, call, body, session)
    failpoint("gateway.report_stored")
    app.wake(entry.scenario)
    answer = {
        "agent_record_id": entry.id,
        "scenario": entry.scenario,
        "request_type": "report",
        "duplicate": stored.duplicate,
    }
    if session is not None:
        answer["records"] = len(entry.references)
    await call.json(200, answer, {"x-reef-scenario": entry.scenario})


async def _quoting(app: App, call: Call, body: dict[str, Any]) -> tuple[Report, Stored]:
    """A report that says itself what it is about."""
    named = names(body)
    if any(len(name) != RECEIPT for name in named):
        seen = [name for name in app.context.watch.all() if call.token.sees(name)]
        places = [call.scenario] if call.scenario is not None else seen
        body = rename(body, await resolve(app.context.store, named, places))
    draft = check(body)
    records = await find(app, call.token, draft.references)
    entry = replace(draft, scenario=_scenario(call, records), created_at=time.time())
    if draft.choice is not None:
        _check_choice(draft.choice, records)
    await _check_scorer(draft.metadata)
    return entry, await app.context.store.append(entry)


async def _about(app: App, call: Call, body: dict[str, Any], session: str) -> tuple[Report, Stored]:
    """A report on a session: what it quotes is found once; sent again, it quotes what it did, whatever came since."""
    scenario = spoken.place(app, call)
    told = {name: value for name, value in body.items() if name not in ("session", "references")}
    report_id = body.get("agent_record_id")
    quoted = await spoken.before(app, call, scenario, session, report_id)
    while True:
        again = quoted is not None
        quoted = quoted or await spoken.records(app, call, scenario, session)
        draft = check(told | {"references": list(quoted)})
        if draft.choice is not None:
            _check_choice(draft.choice, await find(app, call.token, draft.references))
        await _check_scorer(draft.metadata)
        entry = replace(draft, scenario=scenario, created_at=time.time())
        try:
            return entry, await app.context.store.append(entry)
        except ConflictError:  # the same report, sent twice at once, may have been stored a moment ago
            if again or (quoted := await spoken.before(app, call, scenario, session, report_id)) is None:
                raise


async def _read(app: App, call: Call) -> dict[str, Any]:
    check_type(call.headers.get("content-type"))
    data = await read(call, app.context.limits.report_bytes)
    try:
        return parse(data)
    except InputError:
        if (name := _not_finite(data)) is not None:
            raise InputError(f"{name} is not finite; JSON has no NaN or Infinity: leave it out", param=name) from None
        raise


def _shown(demonstration: Json) -> None:
    """InputError when it shows no answer."""
    if isinstance(demonstration, dict):
        content = demonstration.get("content")
        if not (content and isinstance(content, (str, list))) and not demonstration.get("tool_calls"):
            raise InputError("demonstration must be a message with content, or a string", param="demonstration")
        if demonstration.get("role") not in (None, "assistant"):
            raise InputError("demonstration must be the assistant's message (role assistant)", param="demonstration")
    elif demonstration is not None and not (demonstration and isinstance(demonstration, str)):
        said = "demonstration must be a string that is not empty, or a message; leave it out when there is none"
        raise InputError(said, param="demonstration")


def check(body: Mapping[str, Any]) -> Report:
    """A report as the body says it, with an empty scenario and no time. InputError names the field that is wrong."""
    if unknown := sorted(set(body) - _FIELDS):
        raise InputError(f"unknown field {unknown[0]!r}; a report has: {', '.join(sorted(_FIELDS))}", param=unknown[0])
    if body.get("session") is not None:
        raise InputError("session stands for receipts in POST /reef/report only; quote them here", param="session")
    per_receipt = _numbers(body, "per_receipt")
    references = _references(body.get("references"), list(per_receipt))
    scores = {}
    for key, value in per_receipt.items():
        receipt = _receipt(key, "per_receipt")
        if receipt not in references:
            raise InputError(f"per_receipt has {key!r}, which is not in references; add it there", param="per_receipt")
        scores[receipt] = value
    for name in ("feedback", "demonstration", "metadata"):
        if deeper(body.get(name), DEEPEST):
            raise InputError(f"{name} is nested deeper than {DEEPEST}; send what is inside as text", param=name)
    feedback, demonstration = body.get("feedback"), body.get("demonstration")
    if feedback is not None and not isinstance(feedback, (str, dict)):
        raise InputError("feedback must be a string or an object", param="feedback")
    _shown(demonstration)
    metadata, choice = body.get("metadata"), body.get("choice")
    if metadata is not None and not isinstance(metadata, dict):
        raise InputError("metadata must be an object", param="metadata")
    if choice is not None and (not isinstance(choice, int) or isinstance(choice, bool) or choice < 0):
        raise InputError("choice must be a whole number from 0", param="choice")
    score = None if body.get("score") is None else _number(body["score"], "score")
    metrics = _numbers(body, "metrics")
    if all(body.get(name) in (None, "", {}, []) for name in _SAYING):
        raise InputError(f"an empty report: give at least one of {', '.join(_SAYING)}", param="score")
    return Report(
        id=_id(body.get("agent_record_id")),
        scenario="",
        references=references,
        created_at=0.0,
        score=score,
        metrics=metrics,
        per_receipt=scores,
        feedback=feedback,
        choice=choice,
        demonstration=demonstration,
        metadata=metadata,
    )


async def find(app: App, token: Token, references: tuple[str, ...]) -> list[Record]:
    """The records quoted. One that is unknown, or of a scenario the token may not see, is the same error."""
    try:
        entries = await app.context.store.get(references)
    except MissingError as error:
        unknown = next((name for name in references if name in error.message), references[0])
        raise _unknown(unknown) from None
    records = [entry for entry in entries if isinstance(entry, Record)]
    for record in records:
        if not token.sees(record.scenario):
            raise _unknown(record.id)
    return records


def names(body: Mapping[str, Json]) -> list[str]:
    """Every text that a report's body quotes an answer by; it is not checked yet."""
    found = body.get("references") or []
    quoted = [name for name in found if isinstance(name, str)][:MAX_REFERENCES] if isinstance(found, list) else []
    scores = body.get("per_receipt")
    return [*quoted, *(list(scores)[:MAX_REFERENCES] if isinstance(scores, dict) else ())]


def rename(body: Mapping[str, Json], receipts: Mapping[str, str]) -> dict[str, Json]:
    """The body with receipts in the place of other ids."""
    made = dict(body)
    if isinstance(found := body.get("references"), list):
        made["references"] = [receipts.get(name, name) if isinstance(name, str) else name for name in found]
    if isinstance(scores := body.get("per_receipt"), dict):
        made["per_receipt"] = {receipts.get(name, name): value for name, value in scores.items()}
    return made


async def resolve(store: RecordStore, quoted: Sequence[str], scenarios: Sequence[str]) -> dict[str, str]:
    """Receipts of what is quoted otherwise: by the id inside a provider's answer, or an import's own id.

    A provider's id may look like one made of a receipt; it is one only when there is such a record. Of several records
    with an id it is the newest. What is not found is left out.
    """
    others = [name for name in dict.fromkeys(quoted) if parse_receipt(name) != name and not name.startswith("rep_")]
    wrapped = {name: receipt for name in others if (receipt := parse_receipt(name)) is not None}
    there = await stored(store, list(wrapped.values()))
    found = {name: receipt for name, receipt in wrapped.items() if receipt in there}
    places = list(scenarios)
    for name in others:
        if name in found:
            continue
        imported = await stored(store, [derived(place, name) for place in places])
        best = max(imported.values(), key=lambda entry: entry.id, default=None)
        newest = -1
        for place in places:
            for seq, record in await store.find(Query(place, answer_id=name, limit=1)):
                if seq > newest:
                    newest, best = seq, record
        if best is not None:
            found[name], places = best.id, [best.scenario]  # all references of a report are of one scenario
        elif len(places) > 1:
            break  # the report is refused anyway: spare the look-ups of the others
    return found


def derived(scenario: str, name: str) -> str:
    """The receipt of a record that was imported with an id that is none."""
    whole = f"{scenario}\0{name}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(whole, digest_size=16, person=b"reef imported").hexdigest()


async def stored(store: RecordStore, ids: Sequence[str]) -> dict[str, Record | Report]:
    """Those of these entries that are in the store."""
    known = getattr(store, "known", None)  # a store need not be able to tell
    if known is not None:
        ids = await known(ids)
    try:
        return {entry.id: entry for entry in await store.get(ids)} if ids else {}
    except MissingError:
        if len(ids) == 1:
            return {}
        half = len(ids) // 2
        return await stored(store, ids[:half]) | await stored(store, ids[half:])


def _scenario(call: Call, records: list[Record]) -> str:
    scenario = records[0].scenario
    for record in records:
        if record.scenario != scenario:
            raise InputError(
                f"{record.id} is of another scenario than {records[0].id}; send one report for each scenario",
                param="references",
            )
    if call.scenario is not None and call.scenario != scenario:
        raise InputError(
            f"the header x-reef-scenario says {call.scenario!r}, but the references are not of it; leave it out",
            param="x-reef-scenario",
        )
    return scenario


def _check_choice(choice: int, records: list[Record]) -> None:
    for record in records:
        if record.status == "complete" and choice not in {given.index for given in record.choices}:
            raise InputError(f"{record.id} has no choice {choice}; it has {len(record.choices)}", param="choice")


async def _check_scorer(metadata: Json) -> None:
    """`metadata.check` says how a prompt's answers are judged: one that cannot is said now, not at some later look."""
    if not isinstance(metadata, dict) or metadata.get("check") is None:
        return
    from reef.evaluation.scorers import reported  # few reports bring one, and it reads much

    try:
        await reported(metadata["check"])
    except ConfigError as error:
        raise InputError(error.message, param=error.param) from None


def _references(value: Json, quoted: list[str]) -> tuple[str, ...]:
    if value is None:
        value = quoted
    if not isinstance(value, list) or not value:
        raise InputError(f"references must be a list with at least one receipt; {_OR}", param="references")
    if len(value) > MAX_REFERENCES:
        raise InputError(f"{len(value)} references; the limit is {MAX_REFERENCES}", param="references")
    return tuple(dict.fromkeys(_receipt(item, "references") for item in value))


def _receipt(value: Json, param: str) -> str:
    if isinstance(value, str) and value.startswith("rep_"):
        raise InputError(f"{value[:80]!r} is a report's id, which cannot be quoted; {_QUOTE}", param=param)
    if not isinstance(value, str) or (receipt := parse_receipt(value)) is None:
        shown = repr(value[:80]) if isinstance(value, str) else type(value).__name__
        raise InputError(f"{shown} is not a receipt; {_QUOTE}", param=param)
    return receipt


def _unknown(name: str) -> InputError:
    return InputError(f"no record with the receipt {name}; {_QUOTE} of this server", param="references")


def _id(value: Json) -> str:
    if value is None:
        return new_report()
    if not isinstance(value, str) or not _REPORT_ID.fullmatch(value):
        raise InputError(
            "agent_record_id must be rep_ and 1 to 64 letters, digits, - or _; leave it out to get one",
            param="agent_record_id",
        )
    return value


def _number(value: Json, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{name} must be a number, not {type(value).__name__}", param=name)
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{name} must be finite", param=name)
    if not -LARGEST <= value <= LARGEST:
        raise InputError(f"{name} must be between {-LARGEST:,.0f} and {LARGEST:,.0f}; scale it down", param=name)
    return float(value)


def _numbers(body: Mapping[str, Any], name: str) -> dict[str, float]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InputError(f"{name} must be an object of numbers", param=name)
    return {key: _number(item, f"{name}.{key}") for key, item in value.items()}


def _not_finite(data: bytes) -> str | None:
    """The first field with a NaN or Infinity, in a body that is JSON but for those; None for any other mistake."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    found: list[str] = []

    def look(item: Any, name: str) -> None:
        if isinstance(item, float) and not math.isfinite(item):
            found.append(name)
        elif isinstance(item, dict):
            for key, inner in item.items():
                look(inner, f"{name}.{key}" if name else key)
        elif isinstance(item, list):
            for inner in item:
                look(inner, name)

    look(value, "")
    return found[0] if found else None
