"""Scenarios: list, create, inspect, roll back.

Knows: the routes and their bodies. Does not know: what a scenario is made of (`ensure_scenario` is handed in), or how a
rollback works (`scenario.serving`). Neither needs the learner: it finds the new head by itself.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from reef.core.errors import ConflictError, InputError, MissingError
from reef.core.ids import is_scenario
from reef.core.nouns import Serving
from reef.gateway.body import read_json
from reef.gateway.call import Call
from reef.gateway.health import view
from reef.gateway.views import release_view
from reef.scenario import serving as scenarios_room

if TYPE_CHECKING:
    from reef.gateway.app import App


async def scenarios(app: App, call: Call) -> None:
    """Every scenario the token may see, by name."""
    shown = [await _view(app, served) for served in _all(app, call)]
    await call.json(200, {"scenarios": shown})


async def scenario(app: App, call: Call) -> None:
    await call.json(200, await _view(app, find(app, call)))


async def create(app: App, call: Call) -> None:
    """`{name, …settings}` → 201 and the scenario, with its first release. 409 when there is one of that name."""
    _, body = await read_json(call, app.context.limits.report_bytes)
    name = body.pop("name", None)
    if not isinstance(name, str) or not is_scenario(name):
        raise InputError("name must be 1 to 63 of a-z 0-9 . _ - and begin with a letter or digit", param="name")
    call.token.enter(name)
    if name in app.context.fixed:
        raise ConflictError(f"scenario {name!r} is defined in the configuration file; change it there", param="name")
    if app.context.watch.get(name) is not None:
        raise ConflictError(f"there is a scenario {name!r} already; take another name", param="name")
    await call.json(201, await _view(app, await app.create(name, body)))


async def rollback(app: App, call: Call) -> None:
    """`{release_id, reason?, expected?}` → the new head. 409 with the present head when it is not `expected`."""
    served = find(app, call)
    _, body = await read_json(call, app.context.limits.report_bytes)
    if unknown := sorted(set(body) - {"release_id", "reason", "expected"}):
        raise InputError(f"unknown field {unknown[0]!r}; send release_id, reason, expected", param=unknown[0])
    texts: dict[str, str] = {}
    for name in ("release_id", "reason", "expected"):
        value = body.get(name) or ""
        if not isinstance(value, str) or (name == "release_id" and not value):
            raise InputError(f"{name} must be a string", param=name)
        texts[name] = value
    head = await asyncio.to_thread(
        scenarios_room.rollback,
        served.scenario,
        texts["release_id"],
        app.context.chain,
        app.context.board,
        actor=call.token.name,
        reason=texts["reason"],
        expected=texts["expected"] or None,
    )
    app.context.watch.refresh()
    app.wake(served.scenario)
    await call.json(200, release_view(head, current=True))


def find(app: App, call: Call) -> Serving:
    """The scenario that the path names."""
    name = call.params["s"]
    served = app.context.watch.get(name)
    if served is None:  # another gateway may have made it a moment ago
        app.context.watch.refresh()
        served = app.context.watch.get(name)
    if served is None:
        raise MissingError(f"no scenario {name!r}; `reef scenarios` lists them", param="scenario")
    return served


def _all(app: App, call: Call) -> list[Serving]:
    return [served for name, served in sorted(app.context.watch.all().items()) if call.token.sees(name)]


async def _view(app: App, served: Serving) -> dict[str, Any]:
    return {"name": served.scenario, **await view(app, served), "fixed": served.scenario in app.context.fixed}
