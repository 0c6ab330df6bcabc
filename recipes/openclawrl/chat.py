"""A recorded request as chat messages, whatever its dialect, and the same with a hint in it.

Knows: what the engine was asked. Does not know: templates or tokens; a teacher's chat is tokenised by the trainer.
"""

from __future__ import annotations

from typing import Any

import orjson

from reef.core.errors import ReefError
from reef.core.nouns import Json, Record
from reef.engines import Ask
from reef.engines.dialect import translate


def spoken(record: Record) -> dict[str, Json]:
    """`{"messages": […], "tools": […]}` (tools only where there are some) as the engine got it: with the rules that
    were rendered into the request. Without messages when the request cannot be said in chat."""
    data = record.rendered or record.request
    try:
        body: Any = orjson.loads(data)
        if isinstance(body, dict) and ("input" in body or (record.dialect == "messages" and record.rendered is None)):
            ask = Ask(record.id, record.release_id, record.dialect, data, stream=False)
            body = orjson.loads(translate(ask).ask.body)
    except (orjson.JSONDecodeError, ReefError):
        body = None
    found = body if isinstance(body, dict) else {}
    messages = [one for one in found.get("messages") or () if isinstance(one, dict)]
    tools = found.get("tools")
    return {"messages": messages} | ({"tools": tools} if isinstance(tools, list) and tools else {})


def hinted(chat: dict[str, Json], hint: str) -> dict[str, Json]:
    """The chat with the hint appended to the last message of the user; where there is none, as a message of its own."""
    messages: list[dict[str, Json]] = list(chat["messages"])
    places = [place for place, message in enumerate(messages) if message.get("role") == "user"]
    if not places:
        return chat | {"messages": [*messages, {"role": "user", "content": hint}]}
    last = messages[places[-1]]
    content = last.get("content")
    if isinstance(content, list):
        content = [*content, {"type": "text", "text": f"\n\n{hint}"}]
    else:
        content = f"{content}\n\n{hint}" if content else hint
    messages[places[-1]] = {**last, "content": content}
    return chat | {"messages": messages}
