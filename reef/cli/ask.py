"""How a recipe asks a model about a unit: a chat body to the text of an answer, by any engine of the configuration.

Knows: the engines by name, and the scenario's own with its base release. Does not know: what is asked, or why.

What is asked this way is no experience: it goes to the engine directly, behind live traffic, and no record is made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reef.config import Settings
from reef.core.errors import EngineError, UpstreamError
from reef.core.ids import new_receipt
from reef.core.nouns import Json
from reef.engines import Ask

if TYPE_CHECKING:
    from reef.engines import Engine
    from reef.recipe import Asking

PRIORITY = 1


def asking(settings: Settings, engines: Mapping[str, Engine], own: str, base_id: str) -> Asking:
    """`own` is the scenario's engine, `base_id` its release 0, which answers where the embedded engine is asked."""

    async def ask(name: str | None, body: Mapping[str, Json]) -> str:
        from reef.evaluation.ask import whole

        name = own if name is None else name
        if (engine := engines.get(name)) is None:
            raise EngineError(f"there is no engine {name!r} to ask; there are {', '.join(sorted(engines))}")
        model = settings.engine(name).model
        given = dict(body) if model is None else {"model": model} | dict(body)
        dialect = "messages" if "chat" not in engine.dialects and "messages" in engine.dialects else "chat"
        sent = _messages(given) if dialect == "messages" else given
        data = json.dumps(sent, ensure_ascii=False).encode("utf-8", "replace")
        status, answered, known = await whole(
            engine, Ask(new_receipt(), base_id, dialect, data, stream=False, priority=PRIORITY)
        )
        if status >= 400:
            raise UpstreamError(f"the engine {name} answered {status}", status=status, body=answered)
        return known.choices[0].text if known.choices else _text(name, answered)

    return ask


def _messages(body: dict[str, Any]) -> dict[str, Any]:
    """A chat body for an engine that speaks only Messages, in which the system prompt has a place of its own."""
    said = body.get("messages") or []
    system = "\n\n".join(str(one.get("content")) for one in said if one.get("role") == "system")
    rest = [one for one in said if one.get("role") != "system"]
    return {"max_tokens": 1024} | body | {"messages": rest} | ({"system": system} if system else {})


def _text(name: str, data: bytes) -> str:
    """The answer's text as a client would read it, of either dialect."""
    try:
        body = json.loads(data)
        content = body["content"] if "content" in body else body["choices"][0]["message"].get("content")
        if isinstance(content, list):
            return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
        return content if isinstance(content, str) else ""
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise EngineError(f"what the engine {name} answered is no completion") from None
