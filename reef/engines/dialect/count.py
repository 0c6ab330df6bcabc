"""Anthropic's count_tokens: how many tokens a Messages request's prompt has.

Knows: the answer's one field, and how an engine is asked for the count (`count`: a chat body whose prompt is counted).
Does not know: tokenizers. Where no engine can count, `estimate` stands in, and says no more than that.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

import orjson

from reef.core.errors import EngineError
from reef.core.nouns import Choice, Json, Usage
from reef.engines import Answer, Ask, Head, Piece
from reef.engines.dialect import turns
from reef.engines.dialect.blocks import error_text
from reef.engines.dialect.messages import Items, asked, refused, said_in_chat
from reef.engines.dialect.value import count_of, load
from reef.engines.sse import Event

_BYTES = 4  # of text in a token: about right for English and code
_IMAGE = 1600  # tokens of a picture or a file, whatever its size
_MARKS = ("type", "cache_control", "media_type", "signature", "metadata", "model")


class Reader:
    """See `dialect.Reader`. There are no streams."""

    id: str | None = None
    reply: bytes | None = None
    model: str | None = None

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.error: str | None = None

    def event(self, event: Event) -> bool:
        return False

    def whole(self, data: bytes) -> None:
        body = load(data)
        if not isinstance(body, dict):
            return
        count = count_of(body.get("input_tokens"))
        if count is not None:
            self.usage = Usage(count, 0)
        elif "error" in body:
            self.error = error_text(body)

    @property
    def finished(self) -> bool:
        return self.usage is not None

    def choices(self) -> tuple[Choice, ...]:
        return ()


class Translation:
    """See `dialect.Translation`. The engine is asked for a count, whose answer is Anthropic's already."""

    def __init__(self, ask: Ask, earlier: Sequence[Json] = ()) -> None:
        body = said_in_chat(ask, lambda given: turns.chat_body(given, limited=False))
        self.ask = replace(asked(ask, "count", body), stream=False)

    async def answer(self, items: AsyncIterator[Head | Piece | Answer]) -> Items:
        async with aclosing(cast(Items, items)) as given:
            head = await anext(given, None)
            if not isinstance(head, Head):
                raise EngineError("the engine answered without a head; try again")
            if head.status != 200:
                async with aclosing(refused(head, given, self.ask.receipt)) as made:
                    async for item in made:
                        yield item
                return
            yield head
            async for item in given:
                yield item


def estimate(body: dict[str, Any]) -> bytes:
    """An answer for a Messages body that nothing can count. An estimate: a token for every four bytes of its text.

    System prompt, messages and tools count with all their words and JSON; a picture or file counts as 1,600.
    """
    size = tokens = 0
    waiting: list[Json] = [body.get("system"), body.get("messages"), body.get("tools")]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            size += len(value.encode("utf-8", "replace"))
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            if value.get("type") in ("base64", "url", "file"):
                tokens += _IMAGE
                continue
            for name, each in value.items():
                if name not in _MARKS:
                    size += len(name)
                    waiting.append(each)
        elif value is not None:
            size += _BYTES  # a number or a truth value: about one token
    return orjson.dumps({"input_tokens": max(1, tokens + -(-size // _BYTES))})
