"""Candidates: list them, see what one changes and why it is held, promote it or turn it down.

Knows: the routes and their bodies. Does not know: how a promotion is made or which decision excludes which
(`scenario.decide`). None of it needs the learner: it is woken, and finds the decision by itself when it is back.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from reef.core.errors import ChainError, InputError, MissingError
from reef.core.nouns import Release
from reef.gateway import diff
from reef.gateway.call import Call
from reef.gateway.errors import message_of
from reef.gateway.operate import find, texts
from reef.gateway.views import MOST, PAGE, release_view
from reef.gateway.warmth import warm
from reef.gateway.why import view
from reef.scenario import candidates as candidates_room
from reef.scenario import decide, serving
from reef.scenario.candidates import Proposal
from reef.scenario.story import STATES, CandidateStory, Page
from reef.scenario.why import Why

if TYPE_CHECKING:
    from reef.gateway.app import App

log = logging.getLogger(__name__)


async def candidates(app: App, call: Call) -> None:
    """`{candidates, known}`, the newest look first. `state`: only those in it; `known` false: the audit is lost."""
    served, limit, state = find(app, call), call.number("limit", PAGE, MOST) or PAGE, call.query("state")
    if state is not None and state not in STATES:
        raise InputError(f"state must be one of {', '.join(STATES)}", param="state")
    asked = app.why
    found = await asyncio.to_thread(candidates_room.listed, asked.chain, asked.audit, asked.family, served.scenario)
    shown = [candidate_view(item) for item in found.found if state in (None, item.state)]
    await call.json(200, {"candidates": shown[:limit], "known": found.known})


async def candidate(app: App, call: Call) -> None:
    """One candidate: state, evidence of every look, and what it changes."""
    name, asked = find(app, call).scenario, app.why
    found = await asyncio.to_thread(decide.own, name, call.params["id"], asked.chain)
    await call.json(200, await whole(asked, found))


async def whole(asked: Why, found: Release) -> dict[str, Any]:
    """A candidate with its looks and its diff; also for `reef candidates` without a server."""
    shown = await asyncio.to_thread(candidates_room.one, asked.chain, asked.audit, asked.family, found)
    story = await asked.release(found, Page())
    assert isinstance(story, CandidateStory)
    changed: dict[str, Any]
    try:
        base = await asked.find(found.base or "")
        changed = await asyncio.to_thread(diff.diff, asked.chain, found, base, shown.part)
    except (ChainError, MissingError) as error:  # files that are damaged or were removed: the rest is worth reading
        log.warning("candidate %s cannot be compared: %s", found.id, error.message)
        changed = {"part": shown.part, "error": message_of(error)}
    return candidate_view(shown) | {
        "diff": changed,
        "looks": view(story.looks),
        "acts": view(story.acts),
        "learnt": view(story.learnt),
        "unknown": list(story.unknown),
    }


async def promote(app: App, call: Call) -> None:
    """`{reason?, expected?, force?}` → the new release. Asked twice, it is promoted once."""
    name, asked = find(app, call).scenario, app.why
    body = await texts(app, call, ("reason", "expected"), flags=("force",))
    serving.check(body["reason"])
    await warm(app, await asyncio.to_thread(decide.own, name, call.params["id"], asked.chain))
    head = await asyncio.to_thread(
        decide.promote,
        name,
        call.params["id"],
        asked.chain,
        app.context.board,
        asked.audit,
        actor=call.token.name,
        reason=body["reason"],
        expected=body["expected"] or None,
        force=body["force"],
    )
    app.context.watch.refresh()
    app.wake(name)
    served = app.context.watch.get(name)
    await call.json(200, release_view(head, current=served is not None and served.release_id == head.id))


async def reject(app: App, call: Call) -> None:
    """`{reason?, expected?}` → the candidate, turned down. Its line ends; the next begins from the head."""
    name, asked = find(app, call).scenario, app.why
    body = await texts(app, call, ("reason", "expected"))
    await asyncio.to_thread(
        decide.reject,
        name,
        call.params["id"],
        asked.chain,
        app.context.board,
        asked.audit,
        asked.family,
        actor=call.token.name,
        reason=body["reason"],
        expected=body["expected"] or None,
    )
    app.wake(name)
    found = await asyncio.to_thread(decide.own, name, call.params["id"], asked.chain)
    shown = await asyncio.to_thread(candidates_room.one, asked.chain, asked.audit, asked.family, found)
    await call.json(200, candidate_view(shown))


def candidate_view(item: Proposal) -> dict[str, Any]:
    """A candidate as it is listed; `fits` false: what it would replace has changed since it was measured."""
    made, look = item.candidate, item.look
    return {
        "candidate_id": made.id,
        "scenario": made.scenario,
        "part": item.part,
        "state": item.state,
        "fits": item.fits,
        "base": made.base,
        "line": made.line,
        "step": made.step,
        "recipe": made.recipe,
        "units": sum(len(held.units) for held in made.consumed.values()),
        "created_at": made.created_at,
        "looks": item.looks,
        "verdict": look.verdict if look else None,
        "reason": look.reason if look else None,
        "actor": look.actor if look else None,
        "decided_at": look.at if look else None,
        "evaluation": asdict(look.evaluation) if look and look.evaluation else None,
        "release_id": item.became.id if item.became else None,
    }
