"""GET /v1/models and /v1/models/{id}: objects that are valid for OpenAI's and Anthropic's clients at once.

Knows: the names this server lists: those of its configuration, else those that the scenario's provider lists.
Does not know: which of them a scenario uses; one engine answers any name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reef.core.errors import ModelError
from reef.gateway.call import Call

if TYPE_CHECKING:
    from reef.gateway.app import App


async def models(app: App, call: Call) -> None:
    """The list, all on one page unless `limit` asks for less (then `after_id` goes on)."""
    found = [_view(name) for name in await _names(app, call)]
    after = call.query("after_id")
    if after is not None:
        places = [place for place, item in enumerate(found) if item["id"] == after]
        found = found[places[0] + 1 :] if places else []
    limit = call.number("limit", None, 1000)
    shown = found[:limit]
    page = {
        "object": "list",
        "data": shown,
        "has_more": len(shown) < len(found),
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
    }
    await call.json(200, page)


async def model(app: App, call: Call) -> None:
    name = call.params["*"]
    if name not in await _names(app, call):
        raise ModelError(f"no model {name!r}; GET /v1/models lists them", param="model")
    await call.json(200, _view(name))


async def _names(app: App, call: Call) -> tuple[str, ...]:
    names = tuple(app.context.engines) if app.context.models is None else app.context.models
    if names:
        return names
    engine = app.context.route(call.scenario or app.context.default_scenario, None).engine
    listed = getattr(engine, "models", None)  # a provider's
    return tuple(await listed()) if listed is not None else ()


def _view(name: str) -> dict[str, Any]:
    # When a model was made is not known, which both providers write as the epoch.
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "owned_by": "reef",
    }
