"""Is it there, can it answer, what is it doing.

Knows: what must work before traffic is sent here: engine, store, default scenario.
Does not know: how to repair any of it. The learner is shown and never required.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import reef
from reef.core.errors import MissingError, ReefError
from reef.core.nouns import Serving
from reef.core.wire import Look, Looked
from reef.gateway.call import Call
from reef.gateway.errors import message_of
from reef.gateway.views import gain
from reef.scenario.candidates import waiting

if TYPE_CHECKING:
    from reef.gateway.app import App


log = logging.getLogger(__name__)


async def hello(app: App, call: Call) -> None:
    await call.json(200, {"name": "reef", "version": reef.__version__})


async def alive(app: App, call: Call) -> None:
    """The process answers; nothing else is looked at."""
    await call.json(200, {"status": "ok"})


async def ready(app: App, call: Call) -> None:
    """200 when the next request would be answered and stored; else 503 and what is missing."""
    missing = await _missing(app)
    if missing is None:
        await call.json(200, {"status": "ready"})
    else:
        await call.json(503, {"status": "not ready", "reason": missing}, {"retry-after": "1"})


async def status(app: App, call: Call) -> None:
    """What every scenario serves and its learner does. `learner` is null where the learner does not answer."""
    looked = await _look(app)
    shown = {
        name: await view(app, serving) | await _kept(app, serving) | {"learner": looked and looked.scenarios.get(name)}
        for name, serving in sorted(app.context.watch.all().items())
        if call.token.sees(name)
    }
    body = {
        "status": "ok",
        "scenarios": shown,
        "engine": {"ready": await app.context.engine_ready()},
        "learner": {"alive": looked is not None} | ({"webhook": looked.webhook} if looked and looked.webhook else {}),
    }
    serving = {name: at.release_id for name, at in app.context.watch.all().items() if call.token.sees(name)}
    if (remote := await asyncio.to_thread(app.context.remote, serving)) is not None:
        body["remote"] = remote
    await call.json(200, body)


async def view(app: App, serving: Serving) -> dict[str, Any]:
    """One scenario: what it serves, its recipe as people write it, and `trouble` where its engine cannot serve it."""
    try:
        seq = (await app.shelf.take(serving.release_id)).release.seq
    except MissingError:
        seq = None
    trouble = app.context.trouble_of(serving.scenario)
    return {
        "release_id": serving.release_id,
        "seq": seq,
        "epoch": serving.epoch,
        "recipe": app.context.recipe_of(serving.scenario),
        **({"trouble": trouble} if trouble is not None else {}),
    }


async def _kept(app: App, serving: Serving) -> dict[str, Any]:
    """What is written down of a scenario beside what it serves; null where there is nothing, or it cannot be read.

    pin: who keeps it where it is. held: candidates that wait for a person. gain: what the release was measured to be
    worth on fresh tasks, after it was accepted. spent: what its evaluations cost this month. behind: that there is a
    newer release.
    """
    return await asyncio.to_thread(_read, app, serving)


def _read(app: App, serving: Serving) -> dict[str, Any]:
    name, asked = serving.scenario, app.why
    pin = asked.journal.pinned(name)
    shown: dict[str, Any] = {
        "pin": None if pin is None else {key: value for key, value in asdict(pin).items() if key != "scenario"},
        "held": None,
        "gain": gain(asked.journal.about(serving.release_id)),
        "spent": None,
        "behind": None,
    }
    with contextlib.suppress(ReefError):
        head = asked.chain.head(name)
        if head is not None and head.id != serving.release_id:
            shown["behind"] = (
                f"release {head.seq} ({head.id[:12]}) is newer; it is served when its files are whole and the engine "
                "has loaded it (`reef doctor` looks at the files)"
            )
    with contextlib.suppress(ReefError):
        held = waiting(asked.chain, asked.audit, asked.family, name)
        oldest = next((item.look.at for item in held if item.look is not None), None)
        shown["held"] = {"count": len(held), "oldest": oldest, "candidates": [item.candidate.id for item in held]}
    with contextlib.suppress(ReefError):
        shown["spent"] = app.context.spent(name)
    return shown


async def _missing(app: App) -> str | None:
    context = app.context
    if context.watch.get(context.default_scenario) is None:
        return f"the scenario {context.default_scenario!r} is not served yet"
    try:
        if not await context.engine_ready():
            target = context.route(context.default_scenario, None)
            if (why := getattr(target.engine, "why", None)) is not None:  # a provider's; it has no model to load
                return f"provider {target.name} {why}"
            return "the engine is not ready: it is loading its model, or starting again"
        if not await context.store_ready():
            return "the record store cannot be written now"
    except ReefError as error:
        log.warning("not ready: %s", error.message)
        return message_of(error)
    return None


async def _look(app: App) -> Looked | None:
    if app.context.learner is None:
        return None
    try:
        answer = await app.context.learner.call(Look(), timeout=1.0)
    except (ReefError, OSError):
        return None
    return answer if isinstance(answer, Looked) else None
