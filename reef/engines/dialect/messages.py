"""Anthropic Messages: native answers read, and Messages made out of chat for engines that speak chat only.

Knows: how a message grows out of its events, and the order in which an engine's items become a Messages answer.
Does not know: how the request is said in chat (`turns`), or how chat chunks become blocks (`blocks`).

Reading never raises on strange JSON: a field of the wrong type is left out.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from reef.core.errors import EngineError, InputError
from reef.core.nouns import Choice, Json, Usage
from reef.engines import Answer, Ask, Head, Piece
from reef.engines.dialect import turns
from reef.engines.dialect.blocks import (
    Message,
    error_body,
    error_text,
    event,
    number_of,
    objects,
    read_arguments,
    text_of,
)
from reef.engines.dialect.value import DEEP, clean, count_of, dump, load, mend, name_of, read, write
from reef.engines.sse import Event, Events

Object = dict[str, Any]
Items = AsyncGenerator[Head | Piece | Answer]

_FINISH = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
_FINISH |= {"refusal": "content_filter", "model_context_window_exceeded": "length"}
_JSON, _EVENTS = "application/json", "text/event-stream; charset=utf-8"
_LENGTHS = {"content-type", "content-length", "content-encoding"}
_MAX_ERROR = 2000  # characters of an error that is no JSON


class _Draft:
    """One content block being put together: what it began with, and its deltas."""

    __slots__ = ("arguments", "block", "parts")

    def __init__(self, block: Object) -> None:
        self.block = block
        self.parts: dict[str, list[str]] = {}  # by the field that they extend
        self.arguments: list[str] = []

    def add(self, delta: Object) -> None:
        kind = delta.get("type")
        if kind == "input_json_delta":
            self.arguments.append(text_of(delta.get("partial_json")) or "")
        elif kind == "citations_delta":
            found = self.block.get("citations")
            self.block["citations"] = [*(found if isinstance(found, list) else ()), delta.get("citation")]
        elif kind == "signature_delta":
            self.block["signature"] = delta.get("signature")
        else:  # text, thinking, and kinds that are yet to come
            for name, value in delta.items():
                if name == "type":
                    continue
                if isinstance(value, str):
                    self.parts.setdefault(name, []).append(value)
                else:
                    self.block[name] = value

    @property
    def raw(self) -> str:
        """A tool's arguments as they were written."""
        return mend("".join(self.arguments)) or dump(self.block.get("input") or {}).decode()

    def whole(self) -> Object:
        made = dict(self.block)
        for name, pieces in self.parts.items():
            made[name] = (text_of(made.get(name)) or "") + "".join(pieces)
        if text := mend("".join(self.arguments)):
            made["input"] = read_arguments(text) or {}
        return made


class Reader:
    """See `dialect.Reader`. Puts the events of a native stream together into its message."""

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.model: str | None = None
        self.id: str | None = None
        self.error: str | None = None
        self.reply: bytes | None = None
        self._message: Object | None = None
        self._drafts: dict[int, _Draft] = {}
        self._ended = False

    def event(self, event: Event) -> bool:
        """`message_stop` or an error ends a stream."""
        chunk = load(event.data) if event.data else None
        if not isinstance(chunk, dict):
            return False
        kind = chunk.get("type") or event.name
        if kind == "error" or (kind is None and "error" in chunk):
            self.error = error_text(chunk) or "the stream carried an error"
            return True
        if kind == "message_stop":
            self._ended = True
            self._write()
            return True
        if kind == "message_start":
            self._begin(chunk.get("message"))
        elif kind == "message_delta" and self._message is not None:
            delta = chunk.get("delta")
            self._message |= delta if isinstance(delta, dict) else {}
            self._count(chunk.get("usage"))
        elif kind in ("content_block_start", "content_block_delta"):
            index = number_of(chunk.get("index"))
            self._extend(kind, max(self._drafts, default=0) if index is None else index, chunk)
        return False

    def whole(self, data: bytes) -> None:
        body, proper = read(data)
        if not isinstance(body, dict):
            return
        if body.get("type") == "error" or (body.get("error") is not None and "content" not in body):
            self.error = error_text(body) or "the answer is an error"
        elif isinstance(body.get("content"), list):
            self._begin(body)
            self._ended, self.reply = True, bytes(data) if proper else dump(body)

    @property
    def finished(self) -> bool:
        """Whether the message has its reason to stop and its end."""
        return self._ended and self._reason is not None

    def choices(self) -> tuple[Choice, ...]:
        """One choice: a message has no others."""
        if self._message is None:
            return ()
        text, thought, calls = [], [], []
        for _, draft in sorted(self._drafts.items()):
            block = draft.whole()
            kind = block.get("type")
            if kind == "text":
                text.append(text_of(block.get("text")) or "")
            elif kind == "thinking":
                thought.append(text_of(block.get("thinking")) or "")
            elif kind == "tool_use":
                function = {"name": text_of(block.get("name")) or "", "arguments": draft.raw}
                calls.append({"id": text_of(block.get("id")), "type": "function", "function": function})
        said = mend("".join(text))
        message: Json = None
        if calls or any(thought):
            message = {"role": "assistant", "content": said or None}
            message |= {"reasoning_content": "".join(thought)} if any(thought) else {}
            message |= {"tool_calls": calls} if calls else {}
        reason = self._reason
        return (Choice(0, said, _FINISH.get(reason, reason) if reason else None, message=clean(message)),)

    @property
    def _reason(self) -> str | None:
        return name_of(self._message.get("stop_reason")) if self._message is not None else None

    def _begin(self, message: Json) -> None:
        if not isinstance(message, dict):
            return
        self._message = dict(message)
        self._drafts = {number: _Draft(dict(block)) for number, block in enumerate(objects(message.get("content")))}
        self.model = name_of(message.get("model")) or self.model
        self.id = name_of(message.get("id")) or self.id
        given, self._message["usage"] = message.get("usage"), {}
        self._count(given)

    def _extend(self, kind: str, index: int, chunk: Object) -> None:
        given = chunk.get("content_block" if kind == "content_block_start" else "delta")
        if not isinstance(given, dict):
            return
        if kind == "content_block_start":
            self._drafts[index] = _Draft(dict(given))
            return
        if index not in self._drafts:  # a start that was lost
            name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "tool_use"}
            self._drafts[index] = _Draft({"type": name.get(text_of(given.get("type")) or "", "unknown")})
        self._drafts[index].add(given)

    def _count(self, given: Json) -> None:
        """Counts are totals: the last value of each is the one that holds."""
        if self._message is None or not isinstance(given, dict):
            return
        found = self._message.get("usage")  # a strange delta may have written over it
        counts: Object = found if isinstance(found, dict) else {}
        self._message["usage"] = counts
        counts |= {name: value for name, value in given.items() if value is not None or name not in counts}
        fresh = count_of(counts.get("input_tokens"))
        if fresh is not None:
            cached = ("cache_read_input_tokens", "cache_creation_input_tokens")
            prompt = fresh + sum(count_of(counts.get(name)) or 0 for name in cached)
            self.usage = Usage(prompt, count_of(counts.get("output_tokens")) or 0)

    def _write(self) -> None:
        if self._message is None:
            return
        self._message["content"] = [draft.whole() for _, draft in sorted(self._drafts.items())]
        self.reply = dump(self._message)


class Translation:
    """See `dialect.Translation`. A message has no earlier items of its own: the request says them all."""

    def __init__(self, ask: Ask, earlier: Sequence[Json] = ()) -> None:
        body = said_in_chat(ask, lambda given: turns.chat_body(given, stream=ask.stream))
        self.ask = asked(ask, "chat", body)
        self._model = text_of(body.get("model")) or "unknown"
        self._tools = frozenset(tool["function"]["name"] for tool in body.get("tools", ()))

    async def answer(self, items: AsyncIterator[Head | Piece | Answer]) -> Items:
        async with aclosing(cast(Items, items)) as given:
            head = await anext(given, None)
            if not isinstance(head, Head):
                raise EngineError("the engine answered without a head; try again")
            message = Message(self.ask.receipt, self._model, self._tools)
            if head.status != 200:
                made = refused(head, given, self.ask.receipt)
            elif self.ask.stream:
                made = _streamed(head, given, message)
            else:
                made = _whole(head, given, message)
            async with aclosing(made):
                async for item in made:
                    yield item


def said_in_chat(ask: Ask, make: Callable[[Object], Object]) -> Object:
    """The chat body that `make` gives for a Messages request."""
    given = turns.read(ask.body)
    try:
        body = make(given)
    except RecursionError:
        raise InputError(
            f"messages are nested more than {DEEP} levels deep; make them flatter", param="messages"
        ) from None
    write(body, given)
    return body


def asked(ask: Ask, dialect: str, body: Object) -> Ask:
    """The same request in another dialect, without what was for Anthropic's ears."""
    headers = {name: value for name, value in ask.headers.items() if not name.lower().startswith("anthropic-")}
    return replace(ask, dialect=dialect, body=dump(body), headers=headers, query="")


async def refused(head: Head, items: Items, receipt: str) -> Items:
    """A refusal in Anthropic's form. The status and the other headers stay."""
    parts: list[bytes] = []
    yield _headed(head, _JSON)
    async for item in items:
        if isinstance(item, Piece):
            parts.append(item.data)
            if item.terminal:
                data = b"".join(parts)
                plain = data.decode("utf-8", "replace").strip()[:_MAX_ERROR]
                text = error_text(load(data)) or plain or f"the engine answered {head.status}"
                yield Piece(dump(error_body(text, receipt, status=head.status)), terminal=True)
        elif isinstance(item, Answer):
            yield item


async def _whole(head: Head, items: Items, message: Message) -> Items:
    """One object. The head waits for it: an error inside is then still an error of its own status."""
    parts: list[bytes] = []
    async for item in items:
        if isinstance(item, Answer):
            yield _told(item, message)
        elif isinstance(item, Piece):
            parts.append(item.data)
            if not item.terminal:
                continue
            message.take(load(b"".join(parts)))
            if message.error is not None:
                yield replace(_headed(head, _JSON), status=502)
                yield Piece(dump(message.failure()), terminal=True)
            elif message.begun:
                yield _headed(head, _JSON)
                yield Piece(dump(message.whole()), terminal=True)
            else:
                raise EngineError("the engine answered with something that is not a chat completion; try again")


async def _streamed(head: Head, items: Items, message: Message) -> Items:
    """Events as the chunks come; the last is alone in the terminal piece. A whole completion becomes events too."""
    yield _headed(head, _EVENTS)
    content = next((value for name, value in head.headers.items() if name.lower() == "content-type"), _EVENTS)
    events = Events() if content.startswith("text/event-stream") else None
    parts: list[bytes] = []
    async for item in items:
        if isinstance(item, Answer):
            yield _told(item, message)
        elif isinstance(item, Piece):
            if events is None:
                parts.append(item.data)
                found = [b"".join(parts)] if item.terminal else []
            else:
                cut = events.feed(item.data)
                if item.terminal and (last := events.finish()) is not None:
                    cut.append(last)
                found = [each.data.encode() for each in cut if each.data]
            data = b"".join([message.take(load(each)) for each in found])
            if not item.terminal:
                if data:
                    yield Piece(data)
            elif message.error is not None:
                if data:
                    yield Piece(data)
                yield Piece(event("error", message.failure()), terminal=True)
            elif not message.finished:
                raise EngineError("the engine ended its stream without a finish_reason; try again")
            else:
                yield Piece(data + message.close())
                yield Piece(event("message_stop", {}), terminal=True)


def _headed(head: Head, content: str) -> Head:
    headers = {name: value for name, value in head.headers.items() if name.lower() not in _LENGTHS}
    return replace(head, headers=headers | {"content-type": content})


def _told(answer: Answer, message: Message) -> Answer:
    """What is recorded: the engine's own knowledge, and the message that the client got."""
    if message.error is not None:
        return replace(answer, id=message.id, error=answer.error or message.error)
    reply = dump(message.whole()) if message.closed else None
    return replace(answer, id=message.id, reply=reply)
