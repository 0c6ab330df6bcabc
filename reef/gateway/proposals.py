"""What people ask a scenario to change: mutations of its harness, or an instruction in words; and what became of it.

Knows: the routes and their bodies, and how a proposal is checked at the door against what is served. Does not know: how
an ask is carried out, or whether it will be released: the learner takes it from the queue, and the gate decides.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

from reef.cordis.compose import MAX_MUTATIONS, propose
from reef.cordis.screen import acts, taint
from reef.core.errors import ConflictError, InputError, MissingError, ReefError
from reef.core.nouns import PartName, Record, Serving
from reef.core.text import deeper
from reef.gateway.body import read_json
from reef.gateway.call import Call
from reef.gateway.views import MOST, PAGE
from reef.harness.tree import Mutation
from reef.records import Query
from reef.records.queue import STATES, Ask, Kind, Queue
from reef.scenario import candidates as candidates_room
from reef.scenario.story import BECAME

if TYPE_CHECKING:
    from reef.gateway.app import App

LONGEST_REASON: Final = 500
LONGEST_TEXT: Final = 16_000
DEEPEST: Final = 32
"""Levels of lists and objects in a mutation's config."""
KEYS: Final = ("op", "id", "kind", "config")


async def put(app: App, call: Call) -> None:
    """`{mutations, reason, id?}` → 202 and the ask. 400 has every reason why the edit is not admissible."""
    served = app.known(call)
    _, body = await read_json(call, app.context.limits.report_bytes)
    _only(body, ("mutations", "reason", "id"))
    reason = _words(body, "reason", LONGEST_REASON)
    if "\n" in reason or not reason.isprintable():
        raise InputError("reason must be one line of printable characters", param="reason")
    if (wrong := taint(reason)) is not None:
        raise InputError(f"the reason {wrong}", param="reason")
    if acts(reason):
        raise InputError("the reason holds a command, code or an address; say it in plain words", param="reason")
    mutations = _mutations(body.get("mutations"))
    entries = (await app.shelf.take(served.release_id)).entries
    found = await asyncio.to_thread(propose, entries, mutations)
    if found.entries is None:
        raise InputError(f"the proposal is refused: {'; '.join(found.refused)}", param="mutations")
    given = {"mutations": body["mutations"], "reason": reason}
    await _queue(app, call, served.scenario, "harness", "proposal", given, _id(body))


async def train(app: App, call: Call) -> None:
    """`{text, session?, release_id?, part?, id?}` → 202 and the ask."""
    served = app.known(call)
    _, body = await read_json(call, app.context.limits.report_bytes)
    _only(body, ("text", "session", "release_id", "part", "id"))
    text = _words(body, "text", LONGEST_TEXT)
    name, learning = served.scenario, app.context.learning(served.scenario)
    if not learning.parts:
        raise ConflictError(
            f"no recipe of {name} takes instructions; give it one that does (reef.recipe: harness_evolve), or propose "
            'mutations: reef propose "…" --file FILE (POST /reef/harness/proposals)'
        )
    if learning.trigger == "auto":
        how = "in the configuration file, and restart"
        if name not in app.context.fixed:
            how += f', or now: PATCH /reef/scenarios/{name} with {{"training": {{"trigger": "hybrid"}}}}'
        raise ConflictError(
            f"{name} learns from experience only (training.trigger is auto); set training.trigger: hybrid (both) or "
            f"manual (instructions only) {how}"
        )
    part = body.get("part") or ("harness" if "harness" in learning.parts else learning.parts[0])
    if part not in learning.parts:
        raise InputError(f"part must be one of {', '.join(learning.parts)}", param="part")
    given: dict[str, Any] = {"text": text}
    if (release := _word(body, "release_id")) is not None:
        given["release_id"] = await _still(app, served, release)
    if (session := _word(body, "session")) is not None:
        given["session"] = await _session(app, name, session)
    await _queue(app, call, name, part, "instruction", given, _id(body))


async def listed(app: App, call: Call) -> None:
    """`{proposals, next}`, the newest first. `state`: only those in it."""
    name, state = app.known(call).scenario, call.query("state")
    if state is not None and state not in STATES:
        raise InputError(f"state must be one of {', '.join(STATES)}", param="state")
    limit, before = call.number("limit", PAGE, MOST) or PAGE, call.number("after", None, 2**53)
    # what a person decided on is known of the candidate, so it is looked for among those that were held, too
    states = () if state is None else (state, "held") if state in BECAME.values() else (state,)
    found = await asyncio.to_thread(
        lambda: Queue(app.context.board).list(name, limit + 1, states=states, before=before)
    )
    shown = await asyncio.to_thread(lambda: [_view(app, ask) for ask in found[:limit]])
    more = found[limit - 1].seq if len(found) > limit else None
    await call.json(200, {"proposals": [one for one in shown if state in (None, one["state"])], "next": more})


async def one(app: App, call: Call) -> None:
    """One ask, and what became of it."""
    name = app.known(call).scenario
    found = await asyncio.to_thread(Queue(app.context.board).get, call.params["id"])
    if found.scenario != name:
        raise MissingError(
            f"{name} has no proposal {found.id[:80]!r}; GET /reef/harness/proposals lists them", param="id"
        )
    await call.json(200, await asyncio.to_thread(_view, app, found))


async def _queue(
    app: App, call: Call, name: str, part: PartName, kind: Kind, body: dict[str, Any], own: str | None
) -> None:
    queue = Queue(app.context.board)
    ask, duplicate = await asyncio.to_thread(lambda: queue.put(name, part, kind, body, actor=call.token.name, id=own))
    app.wake(name)
    await call.json(202, await asyncio.to_thread(_view, app, ask) | {"duplicate": duplicate})


def _view(app: App, ask: Ask) -> dict[str, Any]:
    """An ask as it is shown. Of a held candidate that a person decided on since, what was decided."""
    state: str = ask.state
    said, release = ask.said, ask.release
    if ask.state == "held" and ask.candidate is not None:
        asked = app.why
        with contextlib.suppress(ReefError):
            item = candidates_room.one(asked.chain, asked.audit, asked.family, asked.chain.get(ask.candidate))
            if (became := BECAME.get(item.state)) is not None:
                state, release = became, item.became.id if item.became else None
                said = item.look.reason if item.look is not None and became == "rejected" else said
    return {
        "id": ask.id,
        "seq": ask.seq,
        "scenario": ask.scenario,
        "part": ask.part,
        "kind": ask.kind,
        "state": state,
        "said": said,
        "candidate": ask.candidate,
        "release_id": release,
        "actor": ask.actor,
        "created_at": ask.created_at,
        "changed_at": ask.changed_at,
        **ask.body,
    }


# --- bodies -----------------------------------------------------------------------------------------------------------


def _only(body: dict[str, Any], names: tuple[str, ...]) -> None:
    if unknown := sorted(set(body) - set(names)):
        raise InputError(f"unknown field {unknown[0]!r}; send {', '.join(names)}", param=unknown[0])


def _words(body: dict[str, Any], name: str, most: int) -> str:
    text = body.get(name)
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{name} must be a text that is not empty", param=name)
    if len(text) > most:
        raise InputError(f"{name} has {len(text)} characters; the limit is {most}", param=name)
    return text.strip()


def _word(body: dict[str, Any], name: str) -> str | None:
    given = body.get(name)
    if given is None:
        return None
    if not isinstance(given, str) or not given:
        raise InputError(f"{name} must be a string that is not empty", param=name)
    return given


def _id(body: dict[str, Any]) -> str | None:
    return _word(body, "id")


def _mutations(given: Any) -> list[Mutation]:
    """The mutations of a body, as far as their shape goes; cordis says what is wrong inside."""
    if not isinstance(given, list) or not given or len(given) > MAX_MUTATIONS:
        raise InputError(f"mutations must be a list of 1 to {MAX_MUTATIONS} objects", param="mutations")
    found = []
    for place, item in enumerate(given):
        where = f"mutations[{place}]"
        if not isinstance(item, dict):
            raise InputError(f"{where} must be an object with {', '.join(KEYS)}", param=where)
        if unknown := sorted(set(item) - set(KEYS)):
            raise InputError(f"{where}: unknown field {unknown[0]!r}; send {', '.join(KEYS)}", param=where)
        for name in ("op", "id"):
            if not isinstance(item.get(name), str):
                raise InputError(f"{where}.{name} must be a string", param=f"{where}.{name}")
        if not isinstance(item.get("kind", ""), str | None):
            raise InputError(f"{where}.kind must be a string", param=f"{where}.kind")
        if deeper(item.get("config"), DEEPEST):
            raise InputError(f"{where}.config is nested at most {DEEPEST} deep", param=f"{where}.config")
        found.append(Mutation(item["op"], item["id"], item.get("kind"), item.get("config")))
    return found


async def _still(app: App, served: Serving, release: str) -> str:
    """The release that an instruction is about must still be served: the words may not fit another."""
    found = await app.shelf.take(release, served.scenario)
    if found.release.id != served.release_id:
        raise ConflictError(
            f"{served.scenario} serves {served.release_id[:12]} by now, not {found.release.id[:12]}: look whether the "
            "instruction still fits, then send it without release_id",
            param="release_id",
        )
    return found.release.id


async def _session(app: App, scenario: str, session: str) -> str:
    if await app.context.store.find(Query(scenario, session=session, purpose="live", limit=1)):
        return session
    with contextlib.suppress(MissingError):  # one that no client named has its first receipt's name
        (found,) = await app.context.store.get([session])
        if isinstance(found, Record) and found.scenario == scenario and found.purpose == "live":
            return session
    raise MissingError(f"scenario {scenario!r} has no session {session[:80]!r}", param="session")
