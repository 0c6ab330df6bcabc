"""The dialects that clients speak: what an answer says, and Responses and Messages made out of chat.

    chat  OpenAI Chat Completions      responses  OpenAI Responses      messages  Anthropic Messages

Knows: each dialect's JSON and events. Does not know: sockets, records, engines' insides.

- A `Reader` watches an answer pass, whole or event by event, and never changes it.
- A `Translation` turns one request into a chat request, and the chat answer into an answer of the request's dialect,
  for engines that speak chat only (`Engine.dialects` says what one speaks).
- Each dialect is one module with `Reader`, and, but for chat, `Translation`.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Protocol, cast

from reef.core.errors import InputError
from reef.core.nouns import Choice, Json, Usage
from reef.engines import Answer, Ask, Head, Piece
from reef.engines.sse import Event, Events

MODULES = {
    "chat": "reef.engines.dialect.chat",
    "responses": "reef.engines.dialect.responses",
    "messages": "reef.engines.dialect.messages",
    "count_tokens": "reef.engines.dialect.count",
    "embeddings": "reef.engines.dialect.embeddings",
}


class Reader(Protocol):
    """What one answer says. Nothing here raises on strange input: what cannot be read is left out."""

    usage: Usage | None
    model: str | None
    id: str | None  # the answer's own id
    error: str | None  # the message of an in-band error
    reply: bytes | None  # see nouns.Record.reply; None until the answer is whole

    def event(self, event: Event) -> bool:
        """Take one event of a stream. True: it is the dialect's end marker, or the error event that ends it."""

    def whole(self, data: bytes) -> None:
        """Take an answer that was not streamed."""

    @property
    def finished(self) -> bool:
        """Whether the answer came to its proper end (every choice has its finish reason)."""

    def choices(self) -> tuple[Choice, ...]:
        """The choices so far in chat terms. `message` is a chat assistant message, set when there is more than text."""


class Translation(Protocol):
    """One request to an engine that does not speak its dialect. Made as `Translation(ask, earlier)`.

    `earlier` are the conversation's items before this request (Responses with `previous_response_id`). InputError names
    what cannot be said in chat.
    """

    ask: Ask
    """What the engine is asked instead: a chat (or `count`) body, the same receipt, release, stream and priority."""

    def answer(self, items: AsyncIterator[Head | Piece | Answer]) -> AsyncGenerator[Head | Piece | Answer]:
        """The engine's items as items of the request's dialect; token fields of `Answer` stay as they are.

        Keeps the engine's order of things: nothing comes before its Head, one terminal piece, exceptions pass. A Head
        that is not 200 passes with its body, made into the dialect's error form.
        """


def reader(dialect: str) -> Reader:
    """A fresh reader for an answer of this dialect."""
    return cast(Reader, importlib.import_module(MODULES[dialect]).Reader())


def translate(ask: Ask, earlier: Sequence[Json] = ()) -> Translation:
    """The translation of a request into chat. InputError when it cannot be said in chat."""
    made: Any = getattr(importlib.import_module(MODULES[ask.dialect]), "Translation", None)
    if made is None:
        raise InputError(f"this model's engine does not speak {ask.dialect}; ask it by its provider's own route")
    return cast(Translation, made(ask, earlier))


def read(dialect: str, data: bytes, *, stream: bool) -> Reader:
    """What an answer says, also when it was cut anywhere."""
    said = reader(dialect)
    if not stream:
        said.whole(data)
        return said
    events = Events()
    found = events.feed(data)
    if (last := events.finish()) is not None:
        found.append(last)
    for event in found:
        if said.event(event):
            break
    return said
