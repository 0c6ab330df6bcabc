"""Responses that Reef recorded: fetched again, and continued by `previous_response_id`.

Knows: how a recorded conversation is put together from the records it is spread over.
Does not know: how an engine answers. A receipt is valid on every worker at once, so a response is too.

- A response is found by the id Reef made (`resp_<receipt>`) or by the provider's own, in the token's scenarios.
- `store: false` in its request means it is neither fetched nor continued, though its record is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from reef.core.errors import InputError, MissingError
from reef.core.ids import parse_receipt
from reef.core.nouns import Json, Record
from reef.engines import Engine
from reef.gateway.call import Call
from reef.records import Query

if TYPE_CHECKING:
    from reef.gateway.app import App

LONGEST = 1000  # responses in one conversation


class _Lost(InputError):
    code = "previous_response_not_found"


async def fetch(app: App, call: Call) -> None:
    """GET /v1/responses/{id}"""
    name = call.scenario or app.context.default_scenario
    call.token.enter(name)
    wanted = call.params["id"]
    record = await _find(app, name, wanted)
    if record is None or record.reply is None or not _kept(record):
        raise MissingError(
            f"no response {wanted[:80]!r} in scenario {name!r}; it takes the id of a finished response with store on",
            param="response_id",
        )
    headers = {"content-type": "application/json", "x-reef-agent-record-id": record.id}
    await call.reply(200, record.reply, headers)


async def earlier(app: App, call: Call, scenario: str, body: Mapping[str, Any], engine: Engine) -> list[Json]:
    """The items of the conversation that a request continues; empty when its provider keeps it itself."""
    wanted: str | None = body["previous_response_id"]
    native = "responses" in engine.dialects
    parts: list[list[Json]] = []
    while wanted is not None:
        record = await _find(app, scenario, wanted)
        if native and not parts and (record is None or (record.answer_id == wanted and _same(app, record, engine))):
            return []  # the provider's own: it knows what came before
        if record is None or not _kept(record):
            raise _Lost(f"no response {wanted[:80]!r} to go on from", param="previous_response_id")
        if record.reply is None:
            raise _Lost(f"the response {wanted[:80]!r} did not come to its end", param="previous_response_id")
        asked, answered = orjson.loads(record.request), orjson.loads(record.reply)
        parts.append([*items(asked.get("input")), *items(answered.get("output"))])
        wanted = asked.get("previous_response_id")
        if len(parts) > LONGEST:
            raise InputError(f"a conversation of more than {LONGEST} responses", param="previous_response_id")
    return [item for part in reversed(parts) for item in part]


def expand(body: Mapping[str, Any], before: Sequence[Json]) -> dict[str, Any]:
    """The request with the conversation in its input, for an engine that does not have it."""
    whole = {name: value for name, value in body.items() if name != "previous_response_id"}
    return whole | {"input": [*before, *items(body.get("input"))]}


def items(given: Json) -> list[Json]:
    """`input` or `output` as a list of items."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return list(given) if isinstance(given, list) else []


async def _find(app: App, scenario: str, wanted: str) -> Record | None:
    """The newest record of a response of this scenario."""
    receipt = parse_receipt(wanted)
    if receipt is not None:
        try:
            (found,) = await app.context.store.get([receipt])
        except MissingError:
            found = None
        if isinstance(found, Record) and found.scenario == scenario and found.dialect == "responses":
            return found
    page = await app.context.store.find(Query(scenario, limit=1, answer_id=wanted))
    return next((entry for _, entry in page if isinstance(entry, Record)), None)


def _same(app: App, record: Record, engine: Engine) -> bool:
    """Whether a record's answer came from this engine, as far as routes are what they were: others do not know it."""
    try:
        return app.context.route(record.scenario, record.model_asked).engine is engine
    except MissingError:
        return False


def _kept(record: Record) -> bool:
    return orjson.loads(record.request).get("store") is not False
