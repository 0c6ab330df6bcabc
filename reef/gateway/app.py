"""The ASGI application: which route answers a request, who may use it, and what an error looks like.

Knows: the route table, tokens and rights per route, the limit on requests at once, waking the learner.
Does not know: what a route does with its request.

A request's way: `__call__` reads the headers once, finds the route, checks the token and its right, then calls the
route's function with (app, call). Everything that function raises is answered in the dialect of the route.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from reef.core.errors import InputError, MissingError, WireError
from reef.core.ids import SCENARIO_RULE, is_scenario
from reef.core.nouns import Json, Serving
from reef.core.wire import Wake
from reef.gateway import (
    candidates,
    events,
    harness,
    health,
    imports,
    inference,
    joined,
    metrics,
    models,
    openapi,
    operate,
    proposals,
    report,
    responses,
    views,
    why,
)
from reef.gateway.call import Call, Gone, Receive, Scope, Send, Work
from reef.gateway.context import Context
from reef.gateway.errors import Refusal, nowhere, status_of
from reef.gateway.shelf import Shelf
from reef.gateway.spool import Spool
from reef.records.journal import Journal
from reef.records.queue import Queue
from reef.scenario.learnt import Family
from reef.scenario.why import Why

log = logging.getLogger(__name__)


class Route(NamedTuple):
    right: str | None  # None: answered without a token
    answer: Callable[[App, Call], Awaitable[None]]


_HELLO = {"GET": Route(None, health.hello), "HEAD": Route(None, health.hello)}
PLAIN: dict[str, dict[str, Route]] = {
    "/v1/chat/completions": {"POST": Route("infer", inference.chat)},
    "/v1/messages": {"POST": Route("infer", inference.messages)},
    "/v1/messages/count_tokens": {"POST": Route("infer", inference.count_tokens)},
    "/v1/responses": {"POST": Route("infer", inference.respond)},
    "/v1/embeddings": {"POST": Route("infer", inference.embeddings)},
    "/reef/report": {"POST": Route("report", report.report)},
    "/reef/train": {"POST": Route("operate", proposals.train)},
    "/reef/harness/proposals": {
        "POST": Route("operate", proposals.put),
        "GET": Route("read", proposals.listed),
    },
    "/reef/records": {"POST": Route("report", imports.one)},
    "/reef/records/batch": {"POST": Route("report", imports.batch)},
    "/v1/models": {"GET": Route("infer", models.models)},
    "/": _HELLO,
    "/api/hello": _HELLO,
    "/healthz": {"GET": Route(None, health.alive), "HEAD": Route(None, health.alive)},
    "/readyz": {"GET": Route(None, health.ready), "HEAD": Route(None, health.ready)},
    "/openapi.json": {"GET": Route(None, openapi.openapi)},
    "/metrics": {"GET": Route("read", metrics.metrics)},
    "/reef/status": {"GET": Route("read", health.status)},
    "/reef/events": {"GET": Route("read", events.events)},
    "/reef/harness": {"GET": Route("infer", harness.served)},
    "/reef/harness/adapters": {"GET": Route("infer", harness.adapters)},
    "/reef/harness/install": {"GET": Route("infer", harness.script)},
    "/reef/harness/releases": {"GET": Route("read", harness.releases)},
    "/reef/scenarios": {"GET": Route("read", operate.scenarios), "POST": Route("operate", operate.create)},
}
"""Routes by their exact path."""

SHAPED: tuple[tuple[str, dict[str, Route]], ...] = (
    ("/v1/responses/{id}", {"GET": Route("infer", responses.fetch)}),
    ("/reef/harness/proposals/{id}", {"GET": Route("read", proposals.one)}),
    ("/v1/models/*", {"GET": Route("infer", models.model)}),
    (
        "/reef/scenarios/{s}",
        {
            "GET": Route("read", operate.scenario),
            "PATCH": Route("operate", operate.change),
            "DELETE": Route("operate", operate.archive),
        },
    ),
    ("/reef/scenarios/{s}/restore", {"POST": Route("operate", operate.restore)}),
    (
        "/reef/scenarios/{s}/pin",
        {"POST": Route("operate", operate.pin), "DELETE": Route("operate", operate.unpin)},
    ),
    ("/reef/scenarios/{s}/candidates", {"GET": Route("read", candidates.candidates)}),
    ("/reef/scenarios/{s}/candidates/{id}", {"GET": Route("read", candidates.candidate)}),
    ("/reef/scenarios/{s}/candidates/{id}/promote", {"POST": Route("operate", candidates.promote)}),
    ("/reef/scenarios/{s}/candidates/{id}/reject", {"POST": Route("operate", candidates.reject)}),
    ("/reef/scenarios/{s}/releases", {"GET": Route("read", views.releases)}),
    ("/reef/scenarios/{s}/releases/{id}", {"GET": Route("read", views.release)}),
    ("/reef/scenarios/{s}/rollback", {"POST": Route("operate", operate.rollback)}),
    ("/reef/scenarios/{s}/records", {"GET": Route("read", views.records)}),
    ("/reef/scenarios/{s}/records/*", {"GET": Route("read", views.record)}),
    ("/reef/scenarios/{s}/reports", {"GET": Route("read", views.reports)}),
    ("/reef/scenarios/{s}/sessions", {"GET": Route("read", joined.sessions)}),
    ("/reef/scenarios/{s}/sessions/*", {"GET": Route("read", joined.session)}),
    ("/reef/why/*", {"GET": Route("read", why.why)}),
)
"""Routes with parts that vary: `{name}` is one part, `*` the rest."""


class App:
    """Bare ASGI. One per gateway process; `shelf` and `work` are its only state beside the context's."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.shelf = Shelf(context.chain)
        self.work = Work(context.limits.concurrent, context.limits.held_bytes)
        self.spool = Spool(context.store)
        self.why = Why(
            context.chain,
            context.store,
            Journal(context.board),
            context.audit,
            Family(context.chain),
            Queue(context.board),
        )
        self.feed = events.Feed(self.why.journal)
        context.watch.on_change(self.feed.poke)
        self.meter = context.meter
        self.metrics = context.metrics
        self.metrics.gauges["reef_in_work"] = lambda: self.work.running
        self.metrics.gauges["reef_store_queue"] = lambda: getattr(context.store, "waiting", 0)
        self._waking: dict[str, bool] = {}  # scenarios being woken, and whether to do it once more
        self._tasks: set[asyncio.Task[None]] = set()
        self._creating: dict[str, asyncio.Lock] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        call = Call(scope, receive, send, scope["path"], headers, work=self.work)
        try:
            await self._answer(call)
        except Gone:
            call.dropped = True
        except Exception as error:
            if call.started:
                call.drop(type(error).__name__)
                log.error("an answer failed after it began", exc_info=error)
            else:
                self.metrics.refused(call.route, status_of(error))
                await call.fail(error)
        finally:
            call.end()

    async def _answer(self, call: Call) -> None:
        path = call.path
        if path.startswith("/s/"):
            _, _, name, rest = [*path.split("/", 3), ""][:4]
            path, call.scenario = "/" + rest, name
            if not path.startswith("/v1/"):
                raise MissingError("no such route: /s/SCENARIO/ goes before /v1/… only")
        methods = PLAIN.get(path)
        if methods is not None:
            call.route = path
        elif (methods := _shaped(call, path)) is None:
            raise MissingError("no such route; /openapi.json lists them")
        route = methods.get(call.method)
        if route is None:
            allowed = ", ".join(sorted(methods))
            raise Refusal(
                405,
                "method_not_allowed",
                f"this route takes {allowed}, not {call.method[:20]}",
                headers={"allow": allowed},
            )
        if route.right is not None:
            call.enter()
            call.token = self.context.tokens.find(call.headers, route=call.route, client=call.scope.get("client"))
            call.token.require(route.right)
            self._place(call)
        await route.answer(self, call)

    def _place(self, call: Call) -> None:
        """Which scenario the request names, if it does: its path and its header must agree."""
        named = call.headers.get("x-reef-scenario")
        placed = call.params.get("s", call.scenario)
        if named is not None and placed is not None and named != placed:
            raise InputError(
                f"the path says scenario {placed!r} and the header x-reef-scenario {named!r}; send one of them",
                param="x-reef-scenario",
            )
        call.scenario = placed if placed is not None else named
        if call.scenario is not None:
            if not is_scenario(call.scenario):
                raise InputError(SCENARIO_RULE, param="x-reef-scenario")
            call.token.enter(call.scenario)

    async def serving(self, call: Call) -> Serving:
        """What the request's scenario serves; a scenario that is new is created, where that is allowed."""
        name = call.scenario or self.context.default_scenario
        if call.scenario is None:
            call.token.enter(name)
        if (serving := self.context.watch.get(name)) is not None:
            return serving
        if name != self.context.default_scenario and not self.context.create_scenarios:
            raise nowhere(name)
        if await asyncio.to_thread(self.context.board.archived, name):
            raise MissingError(
                f"the scenario {name!r} was archived; `reef scenarios restore {name}` brings it back",
                param="x-reef-scenario",
            )
        return await self.create(name, {})

    def known(self, call: Call) -> Serving:
        """The same where nothing may be created: of reading, and of what is said about a scenario."""
        name = call.scenario or self.context.default_scenario
        call.token.enter(name)
        serving = self.context.watch.get(name)
        if serving is None:  # another gateway may have made it a moment ago
            self.context.watch.refresh()
            serving = self.context.watch.get(name)
        if serving is None:
            raise nowhere(name)
        return serving

    async def create(self, name: str, settings: Mapping[str, Json]) -> Serving:
        """Create a scenario, or find it created; once at a time for each name."""
        try:
            async with self._creating.setdefault(name, asyncio.Lock()):
                if (serving := self.context.watch.get(name)) is None:
                    serving = await asyncio.to_thread(self.context.ensure_scenario, name, settings)
                    self.context.watch.refresh()
        finally:
            self._creating.pop(name, None)
        return serving

    def stop(self) -> None:
        """The server begins to drain: what has no end of its own ends now."""
        self.feed.close()

    def wake(self, scenario: str) -> None:
        """Tell the learner to look at a scenario, without waiting. One message at a time; a dead one costs nothing."""
        if self.context.learner is None:
            return
        if scenario in self._waking:
            self._waking[scenario] = True
            return
        self._waking[scenario] = False
        task = asyncio.create_task(self._wake(scenario))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wake(self, scenario: str) -> None:
        assert self.context.learner is not None
        try:
            again = True
            while again:
                self._waking[scenario] = False
                with contextlib.suppress(WireError, OSError):
                    await self.context.learner.call(Wake(scenario=scenario), timeout=2.0)
                again = self._waking[scenario]
        except Exception as error:  # whatever the learner answers is its own affair
            log.warning("the learner answered a wake-up with %s", error)
        finally:
            self._waking.pop(scenario, None)

    async def _live(self, receive: Receive, send: Send) -> None:
        """ASGI's lifespan: follow the board while serving."""
        await receive()
        try:
            await self.context.watch.start()
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        self._tasks.add(asyncio.create_task(self.metrics.follow(), name="reef-metrics"))
        await send({"type": "lifespan.startup.complete"})
        await receive()
        for task in list(self._tasks):
            task.cancel()
        await self.spool.close()
        await self.context.watch.close()
        await send({"type": "lifespan.shutdown.complete"})


def _shaped(call: Call, path: str) -> dict[str, Route] | None:
    parts = path.split("/")
    for shape, methods in SHAPED:
        wanted = shape.split("/")
        if wanted[-1] == "*":
            if len(parts) >= len(wanted) and _fits(wanted[:-1], parts) and any(parts[len(wanted) - 1 :]):
                call.params = _named(wanted[:-1], parts) | {"*": "/".join(parts[len(wanted) - 1 :])}
                return methods
        elif len(parts) == len(wanted) and _fits(wanted, parts):
            call.params = _named(wanted, parts)
            return methods
    return None


def _fits(wanted: list[str], parts: list[str]) -> bool:
    """Whether a path begins with this shape."""
    pairs = zip(wanted, parts, strict=False)
    return all(want == part or (want.startswith("{") and part) for want, part in pairs)


def _named(wanted: list[str], parts: list[str]) -> dict[str, str]:
    return {want[1:-1]: part for want, part in zip(wanted, parts, strict=False) if want.startswith("{")}
