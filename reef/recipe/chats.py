"""A recorded request as chat messages, whatever its dialect, and the same with something in it that a teacher reads.

Knows: what the engine was asked, and where a user's words end. Does not know: templates or tokens; the trainer renders
and tokenises what is made here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson

from reef.core.errors import ReefError
from reef.core.nouns import Json, Record, Sample
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


def hinted(chat: Mapping[str, Json], hint: str) -> dict[str, Json]:
    """The chat with the hint appended to the last message of the user; where there is none, as a message of its own."""
    messages: list[dict[str, Json]] = list(chat["messages"])
    places = [place for place, message in enumerate(messages) if message.get("role") == "user"]
    if not places:
        return {**chat, "messages": [*messages, {"role": "user", "content": hint}]}
    last = messages[places[-1]]
    content = last.get("content")
    if isinstance(content, list):
        content = [*content, {"type": "text", "text": f"\n\n{hint}"}]
    else:
        content = f"{content}\n\n{hint}" if content else hint
    messages[places[-1]] = {**last, "content": content}
    return {**chat, "messages": messages}


def shown(demonstration: Json) -> str | None:
    """A demonstration's text; None where it has none (an answer that only calls tools)."""
    content = demonstration.get("content") if isinstance(demonstration, Mapping) else demonstration
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        content = "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) and content.strip() else None


def demonstrated(record: Record, demonstration: Json, choice: int = 0) -> Sample | None:
    """The sample of a demonstration: what was asked, answered as shown. None when there is nothing to learn."""
    chat = spoken(record)
    calls = isinstance(demonstration, Mapping) and demonstration.get("tool_calls")
    if not chat["messages"] or (shown(demonstration) is None and not calls):
        return None
    answer = dict(demonstration) if isinstance(demonstration, Mapping) else {"content": demonstration}
    whole = chat | {"messages": [*chat["messages"], {**answer, "role": "assistant"}]}
    return Sample((), 0, (), (), None, record.id, choice, chat=json.dumps(whole, ensure_ascii=False))
