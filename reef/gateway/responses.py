"""Responses that Reef recorded: fetched again, and continued by `previous_response_id`.

Knows: how a recorded conversation is put together from the records it is spread over.
Does not know: how an engine answers. A receipt is valid on every worker at once, so a response is too.

- A response is found by the id Reef made (`resp_<receipt>`) or by the provider's own, in the token's scenarios.
- A provider's id that is another scenario's is refused: the provider would answer from it.
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


class _Lost(InputError):
    code = "previous_response_not_found"


async def fetch(app: App, call: Call) -> None:
    """GET /v1/responses/{id}"""
    name = call.scenario or app.context.default_scenario
    call.token.enter(name)
    wanted = call.params["id"]
    record = await _find(app, name, wanted)
    if record is None or record.reply is None or _object(record.request).get("store") is False:
        raise MissingError(
            f"no response {wanted[:80]!r} in scenario {name!r}; it takes the id of a finished response with store on",
            param="response_id",
        )
    headers = {"content-type": "application/json", "x-reef-agent-record-id": record.id}
    await call.reply(200, record.reply, headers)


async def earlier(app: App, call: Call, scenario: str, body: Mapping[str, Any], engine: Engine) -> list[Json]:
    """The items of the conversation that a request continues; empty when its provider keeps it itself."""
    wanted: str | None = body["previous_response_id"]
    parts: list[list[Json]] = []
    seen: set[str] = set()
    left = app.context.limits.body_bytes
    while wanted is not None:
        record = await _find(app, scenario, wanted)
        native = "responses" in engine.dialects and not parts
        if native and (record is None or (record.answer_id == wanted and _same(app, record, engine))):
            if record is None and await _elsewhere(app, scenario, wanted):
                raise _Lost(f"no response {wanted[:80]!r} to go on from", param="previous_response_id")
            return []  # the provider's own: it knows what came before
        asked = _object(record.request) if record is not None else {}
        if record is None or asked.get("store") is False:
            raise _Lost(f"no response {wanted[:80]!r} to go on from", param="previous_response_id")
        if record.reply is None:
            raise _Lost(f"the response {wanted[:80]!r} did not come to its end", param="previous_response_id")
        left -= len(record.request) + len(record.reply)
        if record.id in seen or left < 0:
            what = "goes in a circle" if record.id in seen else "is too long to be sent on; begin a new one"
            raise _Lost(f"the conversation before {wanted[:80]!r} {what}", param="previous_response_id")
        seen.add(record.id)
        parts.append([*items(asked.get("input")), *items(_object(record.reply).get("output"))])
        before = asked.get("previous_response_id")
        wanted = before if isinstance(before, str) else None
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


async def _elsewhere(app: App, scenario: str, wanted: str) -> bool:
    """Whether a response is another scenario's. Its provider would go on with it: the key is the same for all."""
    for name in app.context.watch.all():
        if name != scenario and await _find(app, name, wanted) is not None:
            return True
    return False


def _same(app: App, record: Record, engine: Engine) -> bool:
    """Whether a record's answer came from this engine, as far as routes are what they were: others do not know it."""
    try:
        return app.context.route(record.scenario, record.model_asked).engine is engine
    except MissingError:
        return False


def _object(data: bytes) -> dict[str, Any]:
    """A JSON object; an empty one for anything else (an imported record may hold whatever was sent)."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
