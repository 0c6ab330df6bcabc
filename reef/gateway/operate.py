"""Scenarios: list, create, inspect, change, archive, roll back, pin.

Knows: the routes and their bodies. Does not know: what a scenario is made of (`ensure_scenario` and `check_scenario`
are handed in), or how a rollback works (`scenario.serving`). None of it needs the learner: it finds the new head by
itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from reef.core.errors import ConflictError, InputError, MissingError
from reef.core.ids import is_scenario
from reef.core.nouns import Serving
from reef.core.text import deeper
from reef.gateway.body import check_type, parse, read, read_json
from reef.gateway.call import Call
from reef.gateway.errors import nowhere
from reef.gateway.health import view
from reef.gateway.views import release_view
from reef.gateway.warmth import warm
from reef.scenario import serving as scenarios_room

if TYPE_CHECKING:
    from reef.gateway.app import App

DEEPEST: Final = 16
"""Levels of lists and objects in a scenario's settings."""
TRIES: Final = 8
"""Changes of settings that others make at the same time are followed so often."""
BLOCKS: Final = ("harness", "training")
"""Settings of which a change names keys, and leaves the other keys as they are."""


async def scenarios(app: App, call: Call) -> None:
    """Every scenario the token may see, by name."""
    shown = [await _view(app, served) for served in _all(app, call)]
    await call.json(200, {"scenarios": shown})


async def scenario(app: App, call: Call) -> None:
    await call.json(200, await _view(app, find(app, call)))


async def create(app: App, call: Call) -> None:
    """`{name, …settings}` → 201 and the scenario, with its first release. 409 when there is one of that name."""
    body = await _settings(app, call)
    name = body.pop("name", None)
    if not isinstance(name, str) or not is_scenario(name):
        raise InputError("name must be 1 to 63 of a-z 0-9 . _ - and begin with a letter or digit", param="name")
    call.token.enter(name)
    if name in app.context.fixed:
        raise ConflictError(f"scenario {name!r} is defined in the configuration file; change it there", param="name")
    if app.context.watch.get(name) is not None:
        raise ConflictError(f"there is a scenario {name!r} already; take another name", param="name")
    made = await app.create(name, body)
    there = await asyncio.to_thread(lambda: app.context.board.scenarios().get(name, body))
    if body and there != body:  # somebody else was quicker, and these settings were not taken
        raise ConflictError(f"there is a scenario {name!r} already, with other settings; look at it", param="name")
    await call.json(201, await _view(app, made))


async def change(app: App, call: Call) -> None:
    """`{setting: value}` → the scenario. What is named is replaced, null takes it back; the rest stays as it is.
    Of `BLOCKS`, so do the keys that are not named."""
    served = find(app, call)
    name = _free(app, served.scenario, "change it")
    body = await _settings(app, call)
    for key in ("engine", "model"):
        if key in body:
            raise InputError(
                f"{key} cannot be changed: the scenario's releases belong to its model; create another one", param=key
            )
    if "name" in body:
        raise InputError("a scenario keeps its name; create another one", param="name")
    for _ in range(TRIES):
        was = await asyncio.to_thread(lambda: app.context.board.scenarios().get(name, {}))
        merged = {key: value for key, value in {**was, **body, **_within(was, body)}.items() if value is not None}
        if merged == was:
            break
        await asyncio.to_thread(app.context.check_scenario, name, merged)
        if await asyncio.to_thread(app.context.board.swap_scenario, name, was, merged):
            break
    else:
        raise ConflictError(f"the settings of {name!r} are being changed by others; look at them and try again")
    app.context.watch.refresh()
    app.wake(name)
    await call.json(200, await _view(app, served))


async def archive(app: App, call: Call) -> None:
    """Hide a scenario and stop its learning. Its records, chain and settings stay: `restore` brings it back."""
    name = _free(app, find(app, call).scenario, "take it out")
    if name == app.context.default_scenario:
        raise ConflictError(f"{name!r} is the default scenario, which cannot be archived; name another default first")
    await asyncio.to_thread(
        scenarios_room.archive,
        name,
        app.context.chain,
        app.context.board,
        actor=call.token.name,
        reason=call.query("reason") or "",
    )
    app.context.watch.refresh()
    app.wake(name)
    await call.json(200, {"name": name, "archived": True})


async def restore(app: App, call: Call) -> None:
    """`{reason?}` → the scenario, as it was when it was archived."""
    name = call.params["s"]
    body = await texts(app, call, ("reason",))
    if app.context.watch.get(name) is None:
        try:
            await asyncio.to_thread(
                scenarios_room.restore,
                name,
                app.context.chain,
                app.context.board,
                actor=call.token.name,
                reason=body["reason"],
            )
        except MissingError:
            app.context.watch.refresh()
            if app.context.watch.get(name) is None:  # else somebody was quicker
                raise
        app.context.watch.refresh()
        app.wake(name)
    await call.json(200, await _view(app, find(app, call)))


async def pin(app: App, call: Call) -> None:
    """`{release_id?, reason?}` → the head. What is accepted from now on is held; without an id: at what is served."""
    served = find(app, call)
    body = await texts(app, call, ("release_id", "reason"))
    await _warm(app, served.scenario, body["release_id"] or served.release_id, body["reason"])
    head = await asyncio.to_thread(
        scenarios_room.pin,
        served.scenario,
        body["release_id"] or served.release_id,
        app.context.chain,
        app.context.board,
        actor=call.token.name,
        reason=body["reason"],
    )
    app.context.watch.refresh()
    app.wake(served.scenario)
    await call.json(200, release_view(head, current=True))


async def unpin(app: App, call: Call) -> None:
    """→ `{name, unpinned}`; false: it was not pinned."""
    name = find(app, call).scenario
    done = await asyncio.to_thread(
        scenarios_room.unpin, name, app.context.board, actor=call.token.name, reason=call.query("reason") or ""
    )
    app.wake(name)
    await call.json(200, {"name": name, "unpinned": done})


async def rollback(app: App, call: Call) -> None:
    """`{release_id, reason?, expected?}` → the new head. 409 with the present head when it is not `expected`."""
    served = find(app, call)
    body = await texts(app, call, ("release_id", "reason", "expected"))
    if not body["release_id"]:
        raise InputError("release_id must be a string", param="release_id")
    await _warm(app, served.scenario, body["release_id"], body["reason"])
    head = await asyncio.to_thread(
        scenarios_room.rollback,
        served.scenario,
        body["release_id"],
        app.context.chain,
        app.context.board,
        actor=call.token.name,
        reason=body["reason"],
        expected=body["expected"] or None,
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
        raise nowhere(name, "scenario")
    return served


async def texts(app: App, call: Call, names: Sequence[str], *, flags: Sequence[str] = ()) -> dict[str, Any]:
    """A body of strings (empty where not given) and flags; no body is an empty one. InputError names what is wrong."""
    data = await read(call, app.context.limits.report_bytes)
    if data:
        check_type(call.headers.get("content-type"))
    body = parse(data) if data else {}
    if unknown := sorted(set(body) - set(names) - set(flags)):
        raise InputError(f"unknown field {unknown[0]!r}; send {', '.join((*names, *flags))}", param=unknown[0])
    found: dict[str, Any] = {}
    for name in names:
        found[name] = body.get(name) or ""
        if not isinstance(found[name], str):
            raise InputError(f"{name} must be a string", param=name)
    for name in flags:
        found[name] = body.get(name) or False
        if not isinstance(found[name], bool):
            raise InputError(f"{name} must be true or false", param=name)
    return found


async def _settings(app: App, call: Call) -> dict[str, Any]:
    _, body = await read_json(call, app.context.limits.report_bytes)
    if deeper(body, DEEPEST):
        raise InputError(f"settings are nested at most {DEEPEST} deep")
    return body


def _within(was: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """The blocks that a change names, whole: as they were, but for the keys that it names."""
    found: dict[str, Any] = {}
    for name in BLOCKS:
        before, given = was.get(name), body.get(name)
        if isinstance(before, dict) and isinstance(given, dict):
            found[name] = {key: value for key, value in {**before, **given}.items() if value is not None}
    return found


async def _warm(app: App, name: str, release_id: str, reason: str) -> None:
    """See `warm`; what the decision would refuse anyway is refused before."""
    scenarios_room.check(reason)
    await warm(app, await asyncio.to_thread(scenarios_room.target, name, release_id, app.context.chain))


def _free(app: App, name: str, what: str) -> str:
    """ConflictError for a scenario of the configuration file."""
    if name in app.context.fixed:
        raise ConflictError(f"scenario {name!r} is defined in the configuration file; {what} there", param="name")
    return name


def _all(app: App, call: Call) -> list[Serving]:
    return [served for name, served in sorted(app.context.watch.all().items()) if call.token.sees(name)]


async def _view(app: App, served: Serving) -> dict[str, Any]:
    return {"name": served.scenario, **await view(app, served), "fixed": served.scenario in app.context.fixed}
