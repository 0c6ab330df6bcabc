"""The inference routes: a request's bytes become an ask to an engine and a record of it.

Knows: the few fields of each dialect that concern us, releases that are pinned, which engine answers.
Does not know: what happens to the answer (`exchange`), or how a dialect is translated (`engines.dialect`).

- The release is read once; the engine is asked for exactly that one.
- An engine that speaks the request's dialect gets its bytes as they came; another gets a chat request made of it. With
  the release's rules and skills, where the scenario wishes them, it is another request too. Whatever the engine got
  instead is kept in the record as `rendered`, and its tags name the entries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson

from reef.core.errors import InputError
from reef.core.ids import new_receipt
from reef.core.nouns import Json, Purpose
from reef.engines import Answer, Ask, Head, Piece
from reef.engines.dialect import translate
from reef.engines.dialect.value import write
from reef.gateway import responses
from reef.gateway.body import read_json
from reef.gateway.call import Call
from reef.gateway.context import Target
from reef.gateway.exchange import Exchange, Items
from reef.gateway.session import session_of, tags_of
from reef.harness.apply import NOTHING, Addition, Applied

if TYPE_CHECKING:
    from reef.gateway.app import App

UNASKED = 512  # tokens that an answer without a limit of its own is taken for
NOTED = 128  # characters of the ids of applied entries in a record's tag, which is stored with every one
_SECRET = {"authorization", "x-api-key", "cookie", "proxy-authorization"}


async def chat(app: App, call: Call) -> None:
    """POST /v1/chat/completions"""
    await _infer(app, call, "chat", check_chat)


async def messages(app: App, call: Call) -> None:
    """POST /v1/messages"""
    await _infer(app, call, "messages", check_messages)


async def respond(app: App, call: Call) -> None:
    """POST /v1/responses"""
    await _infer(app, call, "responses", check_responses)


async def count_tokens(app: App, call: Call) -> None:
    """POST /v1/messages/count_tokens: an exchange that leaves no record."""
    await _infer(app, call, "count_tokens", check_messages)


async def embeddings(app: App, call: Call) -> None:
    """POST /v1/embeddings"""
    await _infer(app, call, "embeddings", check_embeddings)


async def _infer(app: App, call: Call, dialect: str, check: Callable[[Mapping[str, Any]], None]) -> None:
    received_at, begun = time.time(), time.perf_counter()
    data, body = await read_json(call, app.context.limits.body_bytes)
    check_common(body)
    check(body)
    capture = _only(call.headers, "x-reef-capture", "false", "have the exchange stored") and dialect != "count_tokens"
    plain = not _only(call.headers, "x-reef-harness", "off", "get the rules and skills that the scenario wishes")
    serving = await app.serving(call)
    purpose: Purpose = "live"
    release_id = serving.release_id
    if (pin := call.token.release_id or call.headers.get("x-reef-release")) is not None:
        if call.token.release_id is None:
            call.token.require("operate")
        release_id, purpose = await _pinned(app, pin, serving.scenario), "evaluation"
    shelved = app.shelf.seen(release_id) or await app.shelf.take(release_id)
    target = app.context.route(serving.scenario, body.get("model"))
    receipt = new_receipt()
    stream = body.get("stream") is True and dialect not in ("count_tokens", "embeddings")
    ask = Ask(
        receipt,
        release_id,
        dialect,
        data,
        stream,
        {name: value for name, value in call.headers.items() if name not in _SECRET},
        0 if purpose == "live" else 1,
        call.scope.get("query_string", b"").decode("latin-1"),
        target.model,
        session_of(call.headers, body),
    )
    earlier: Sequence[Json] = ()
    if dialect == "responses" and body.get("previous_response_id") is not None:
        earlier = await responses.earlier(app, call, serving.scenario, body, target.engine)
    applied = NOTHING if plain else shelved.applied(app.context.wish(serving.scenario))
    rendered, start, added = _plan(ask, body, earlier, target, applied)
    if added is not None and added.left:
        app.metrics.left_out(serving.scenario, added.left)
    facts = {
        "id": receipt,
        "scenario": serving.scenario,
        "release_id": release_id,
        "purpose": purpose,
        "dialect": dialect,
        "request": data,
        "rendered": rendered,
        "model_asked": body.get("model"),
        "session": ask.session,
        "tags": tags_of(call.headers) | _noted(added) | call.token.mark,
        "client": call.headers.get("user-agent"),
    }
    exchange = Exchange(app, call, start, facts, received_at, stream, capture, begun)
    lease = app.meter.reserve(call.token, _estimate(data, body))
    try:
        await exchange.run()
    finally:
        lease.settle(exchange.tokens)
        lease.release()


def _plan(
    ask: Ask, body: dict[str, Any], earlier: Sequence[Json], target: Target, applied: Applied
) -> tuple[bytes | None, Callable[[], Items], Addition | None]:
    """What the engine gets instead of the request (None: the request itself), how its work is started, and what of the
    release's harness it gets."""
    engine, added = target.engine, None
    if ask.dialect in engine.dialects:
        changed = body
        if earlier:
            changed = responses.expand(changed, earlier)
        if applied:
            changed, added = applied.add(changed, ask.dialect)
        rendered = None if changed is body else write(changed, body)
        asked = ask if rendered is None else replace(ask, body=rendered)
        return rendered, lambda: engine.answer(asked), added
    translation = translate(ask, earlier)
    asked = translation.ask
    if asked.dialect == "chat" and "chat" not in engine.dialects:
        spoken = ", ".join(sorted(engine.dialects))
        raise InputError(f"the engine {target.name} does not speak {ask.dialect}; it speaks {spoken}", param="model")
    if asked.dialect == "count" and "count" not in engine.dialects:
        counted = applied.apply(body, ask.dialect) if applied else body
        return None, lambda: _estimated(counted), None
    if applied:
        changed, added = applied.add(orjson.loads(asked.body))
        asked = replace(asked, body=write(changed, body))
    return asked.body, lambda: translation.answer(engine.answer(asked)), added


def _noted(added: Addition | None) -> dict[str, str]:
    """What a record's tags say of the harness: the ids of the entries in its request (where that is long, how many
    rules and the ids of the skills), and how many had no room."""
    if added is None or not (added.ids or added.left):
        return {}
    names = " ".join(added.ids)
    if len(names) > NOTED:
        names = " ".join((f"rules:{added.rules}", *added.ids[added.rules :]))
    return ({"harness": names} if names else {}) | ({"harness-left-out": str(added.left)} if added.left else {})


async def _estimated(body: dict[str, Any]) -> Items:
    """A count of tokens by an engine that cannot count: about right, and it says so."""
    from reef.engines.dialect import count

    yield Head(200, {"content-type": "application/json", "x-reef-estimated": "true"})
    yield Piece(count.estimate(body), terminal=True)
    yield Answer()


def _estimate(data: bytes, body: Mapping[str, Any]) -> int:
    """About how many tokens a request may come to, for a token's limit: settled when the answer is there."""
    asked = body.get("max_completion_tokens") or body.get("max_output_tokens") or body.get("max_tokens") or UNASKED
    return len(data) // 4 + int(asked) * (body.get("n") or 1)


def check_common(body: Mapping[str, Any]) -> None:
    """InputError for what no engine should be asked, in any dialect. Fields that are not known pass."""
    for name, kind, what in (("model", str, "a string"), ("stream", bool, "true or false")):
        if body.get(name) is not None and not isinstance(body[name], kind):
            raise InputError(f"{name} must be {what}", param=name)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n"):
        value = body.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise InputError(f"{name} must be a whole number of 1 or more", param=name)


def check_chat(body: Mapping[str, Any]) -> None:
    listed = body.get("messages")
    if not isinstance(listed, list) or not listed:
        raise InputError("messages must be a list with at least one message", param="messages")
    for place, message in enumerate(listed):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError(f"messages[{place}] must be an object with a role", param=f"messages[{place}]")


check_messages = check_chat
"""Messages has its list under the same name; what it needs beyond that, its engine or translation checks."""


def check_responses(body: Mapping[str, Any]) -> None:
    for name in ("previous_response_id", "instructions"):
        if body.get(name) is not None and not isinstance(body[name], str):
            raise InputError(f"{name} must be a string", param=name)
    given = body.get("input")
    if given is None and (body.get("previous_response_id") is not None or body.get("prompt") is not None):
        return
    if not isinstance(given, (str, list)) or not given:
        raise InputError("input must be a string or a list with at least one item", param="input")
    if isinstance(given, list):
        for place, item in enumerate(given):
            if not isinstance(item, dict):
                raise InputError(f"input[{place}] must be an object", param=f"input[{place}]")


def check_embeddings(body: Mapping[str, Any]) -> None:
    if not isinstance(body.get("input"), (str, list)) or not body["input"]:
        raise InputError("input must be a string or a list", param="input")


def _only(headers: Mapping[str, str], name: str, word: str, otherwise: str) -> bool:
    """Whether a header that can only take something away is not there. InputError when it says anything else."""
    value = headers.get(name)
    if value is not None and value.strip().lower() != word:
        raise InputError(f"{name} can only be {word}; leave it out to {otherwise}", param=name)
    return value is None


async def _pinned(app: App, pin: str, scenario: str) -> str:
    """The full id of the release a request pins: one of its own scenario's, or a candidate."""
    return (await app.shelf.take(pin.strip(), scenario)).release.id
