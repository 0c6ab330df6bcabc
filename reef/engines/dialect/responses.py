"""OpenAI's Responses: an answer read, and a request put to a model that speaks chat only.

Knows: the Responses answer and its events; `items` knows its requests, `output` how an answer is written.
Does not know: records, earlier conversations (their items are handed in), sockets.

- Events are told apart by the `type` in their data; the event's name may be missing.
- An answer that was cut is what came of it: text and calls in the order of their `output_index`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import orjson

from reef.core.errors import EngineError, InputError
from reef.core.nouns import Choice, Json, Usage
from reef.engines import Answer, Ask, Head, Piece
from reef.engines.dialect import chat
from reef.engines.dialect.items import free, join, objects, text, to_chat
from reef.engines.dialect.output import Output
from reef.engines.dialect.value import DEEP, clean, count_of, dump, load, mend, name_of, read, say, write
from reef.engines.sse import Event, Events

_ENDS = {"response.completed": "completed", "response.incomplete": "incomplete", "response.failed": "failed"}
_CALLS = ("function_call", "custom_tool_call")
# What each event adds to: the text's kind, and the field with the part's number. `done` events repeat the whole text.
_DELTAS = {
    "response.output_text": ("text", "content_index", "text"),
    "response.refusal": ("refusal", "content_index", "refusal"),
    "response.reasoning_text": ("thought", "content_index", "text"),
    "response.reasoning_summary_text": ("summary", "summary_index", "text"),
    "response.function_call_arguments": ("arguments", "", "arguments"),
    "response.custom_tool_call_input": ("input", "", "input"),
}
_ECHO: dict[str, Json] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "model": None,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
_HEADERS = {"content-type", "content-length", "cache-control"}


class _Whole(msgspec.Struct):
    response: msgspec.Raw = msgspec.Raw(b"null")


class _Draft:
    """One output item: as it was stated, or as its deltas make it."""

    def __init__(self) -> None:
        self.item: dict[str, Any] = {}
        self.done = False
        self._texts: dict[tuple[str, int], list[str]] = {}

    def grow(self, kind: str, number: int, words: str) -> None:
        self._texts.setdefault((kind, number), []).append(words)

    def settle(self, kind: str, number: int, words: str) -> None:
        self._texts[kind, number] = [words]

    def state(self, item: dict[str, Any], *, done: bool) -> None:
        """Take the item itself. A finished one is the truth; a new one is still empty, or has its first texts."""
        self.item, self.done = item, self.done or done
        for kind, number, words in _texts(item):
            if done or (kind, number) not in self._texts:
                self.settle(kind, number, words)

    def said(self, *kinds: str) -> str:
        found = sorted((kind, number, words) for (kind, number), words in self._texts.items() if kind in kinds)
        return "".join("".join(words) for _, _, words in found)

    def call(self) -> dict[str, Json] | None:
        """As a chat tool call; a custom tool's is the function that stands for it."""
        kind = self.item.get("type")
        if kind not in _CALLS:
            return None
        name = join(text(self.item.get("namespace")), text(self.item.get("name")) or "")
        arguments = free(self.said("input")) if kind == "custom_tool_call" else self.said("arguments")
        call_id = text(self.item.get("call_id")) or text(self.item.get("id"))
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class Reader:
    """Puts a Responses answer together, from its events or whole."""

    def __init__(self) -> None:
        self._drafts: dict[int, _Draft] = {}
        self._ids: dict[str, int] = {}
        self._status: str | None = None  # once the answer is over
        self._reason: str | None = None
        self.usage: Usage | None = None
        self.model: str | None = None
        self.id: str | None = None
        self.error: str | None = None
        self.reply: bytes | None = None

    def event(self, event: Event) -> bool:
        """`response.completed`, `.incomplete`, `.failed` or `error` ends a stream."""
        if event.data is None:
            return False
        data, proper = read(event.data)
        if not isinstance(data, dict):
            return False
        kind = text(data.get("type")) or event.name or ""
        if kind in _ENDS:
            response = data.get("response")
            given = response if isinstance(response, dict) else {}
            self._take({**given, "status": _ENDS[kind]})
            self.reply = self._raw(event.data.encode("utf-8", "replace") if proper else None, given)
            return True
        if kind == "error" or (not kind and data.get("error") is not None):
            self._fail(data.get("error") if data.get("error") is not None else data)
            return True
        if isinstance(response := data.get("response"), dict):
            self._know(response)
        else:
            self._grow(kind, data)
        return False

    def whole(self, data: bytes) -> None:
        body, proper = read(data)
        if not isinstance(body, dict):
            return
        if body.get("object") != "response" and "output" not in body:
            if body.get("error") is not None:
                self._fail(body["error"])
            return
        self._take({"status": "completed", **body})
        if self._status is not None:
            self.reply = bytes(data) if proper else dump(body)

    @property
    def finished(self) -> bool:
        """Whether the answer was completed, or cut by a limit that the request knew of."""
        return self._status in ("completed", "incomplete")

    def choices(self) -> tuple[Choice, ...]:
        """The one choice; none before anything of it was said."""
        if not (self._drafts or self.finished):
            return ()
        drafts = [draft for _, draft in sorted(self._drafts.items())]
        words = mend("".join(draft.said("text") for draft in drafts))
        thought = "".join(draft.said("thought") or draft.said("summary") for draft in drafts)
        refusal = "".join(draft.said("refusal") for draft in drafts)
        calls = [call for draft in drafts if (call := draft.call()) is not None]
        message: dict[str, Json] | None = None
        if calls or thought or refusal:
            message = {"role": "assistant", "content": words or None}
            given = {"reasoning_content": thought, "refusal": refusal, "tool_calls": calls}
            message |= {key: value for key, value in given.items() if value}
        return (Choice(0, words, self._finish(bool(calls)), message=clean(message)),)

    def _finish(self, called: bool) -> str | None:
        if self._status == "completed":
            return "tool_calls" if called else "stop"
        if self._status == "incomplete":
            return "content_filter" if self._reason == "content_filter" else "length"
        return None

    def _know(self, response: dict[str, Any]) -> None:
        self.id = name_of(response.get("id")) or self.id
        self.model = name_of(response.get("model")) or self.model
        self.usage = _usage(response.get("usage")) or self.usage

    def _take(self, response: dict[str, Any]) -> None:
        """A response object that says how far it is."""
        self._know(response)
        # Some servers leave the output out at the end; then it is what came before.
        for index, item in enumerate(objects(response.get("output"))):
            self._drafts.setdefault(index, _Draft()).state(item, done=True)
        status = response.get("status")
        if status == "failed":
            self._fail(response.get("error"))
        if status in ("completed", "incomplete", "failed"):
            self._status = status
        details = response.get("incomplete_details")
        self._reason = text(details.get("reason")) if isinstance(details, dict) else None

    def _fail(self, error: Json) -> None:
        message = error.get("message") if isinstance(error, dict) else error
        self.error = say(message or "the answer failed")

    def _grow(self, kind: str, data: dict[str, Any]) -> None:
        if kind in ("response.output_item.added", "response.output_item.done"):
            item = data.get("item")
            if isinstance(item, dict):
                self._draft(data, text(item.get("id"))).state(item, done=kind.endswith(".done"))
            return
        base, _, stage = kind.rpartition(".")
        if base not in _DELTAS or stage not in ("delta", "done"):
            return
        field, place, full = _DELTAS[base]
        words = text(data.get("delta" if stage == "delta" else full))
        if words is None:
            return
        draft = self._draft(data, text(data.get("item_id")))
        number = _whole(data.get(place)) or 0
        if stage == "delta":
            draft.grow(field, number, words)
        else:
            draft.settle(field, number, words)

    def _draft(self, data: dict[str, Any], known: str | None) -> _Draft:
        index = _whole(data.get("output_index"))
        if index is None:
            index = self._ids.get(known or "", max(self._drafts, default=0))
        if known:
            self._ids[known] = index
        return self._drafts.setdefault(index, _Draft())

    def _raw(self, data: bytes | None, response: dict[str, Any]) -> bytes | None:
        """The response object as it was sent, with the items that came before it where it has none."""
        items = [draft.item for _, draft in sorted(self._drafts.items()) if draft.done]
        try:
            if items and not response.get("output"):
                return dump({**response, "output": items})
            if data is None:  # not quite JSON
                return dump(response)
            raw = bytes(msgspec.json.decode(data, type=_Whole).response)
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError, RecursionError):
            return None
        return raw if raw.startswith(b"{") else None


class Translation:
    """A Responses request to an engine that speaks chat, and the chat answer as a Responses answer."""

    def __init__(self, ask: Ask, earlier: Sequence[Json]) -> None:
        try:
            body = orjson.loads(ask.body)
        except orjson.JSONDecodeError as error:
            raise InputError(f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise InputError("the body must be a JSON object with `input`")
        try:
            said, tools = to_chat(body, earlier, stream=ask.stream)
        except RecursionError:
            message = f"input is nested more than {DEEP} levels deep; make it flatter"
            raise InputError(message, param="input") from None
        echo = {key: body[key] if body.get(key) is not None else value for key, value in _ECHO.items()}
        write([[[echo]]], body)  # in an event it is that deep
        self.ask = replace(ask, dialect="chat", body=write(said, body))
        self._output = Output(ask.receipt, echo, tools)
        self._events = Events()
        self._said = chat.Reader()
        self._reply: bytes | None = None

    async def answer(self, items: AsyncIterator[Head | Piece | Answer]) -> AsyncGenerator[Head | Piece | Answer]:
        """The engine's items as a Responses answer. A refusal (a Head that is not 200) has the right form already."""
        refused = streamed = False
        whole = bytearray()
        try:
            async for item in items:
                if isinstance(item, Head):
                    refused = item.status != 200
                    streamed = "event-stream" in item.headers.get("content-type", "")
                    yield item if refused else _head(item, stream=self.ask.stream)
                elif isinstance(item, Answer):
                    yield item if refused else self._answered(item)
                elif refused:
                    yield item
                elif streamed:
                    for piece in self._pieces(item):
                        yield piece
                else:
                    whole += item.data
                    if item.terminal:
                        self._take_whole(bytes(whole))
                        for piece in self._ending(strict=False):
                            yield piece
        finally:
            if isinstance(items, AsyncGenerator):
                await items.aclose()

    def _pieces(self, item: Piece) -> list[Piece]:
        """What one piece of a chat stream becomes."""
        found = self._events.feed(item.data)
        if item.terminal and (last := self._events.finish()) is not None:
            found.append(last)
        for event in found:
            if self._said.event(event) and self._said.error is None:
                break
            if event.data is not None and isinstance(chunk := load(event.data), dict):
                self._output.add(chunk)
        if item.terminal:
            return self._ending(strict=True)
        data = self._output.take() if self.ask.stream else b""
        return [Piece(data)] if data else []

    def _take_whole(self, data: bytes) -> None:
        body = load(data)
        if not isinstance(body, dict) or not (body.get("choices") or body.get("error")):
            raise EngineError("the engine answered 200 with something that is not a chat completion")
        self._said.whole(data)
        self._output.add(body)

    def _ending(self, *, strict: bool) -> list[Piece]:
        """The end of all items, then the event that ends the stream, alone; or the whole response."""
        if strict and self._said.error is None and self._output.finish is None:
            raise EngineError("the engine ended its answer without a finish_reason")
        self._output.close()
        self._reply = dump(self._output.response())
        if not self.ask.stream:
            return [Piece(self._reply, terminal=True)]
        data = self._output.take()
        ending = Piece(self._output.last(), terminal=True)
        return [Piece(data), ending] if data else [ending]

    def _answered(self, answer: Answer) -> Answer:
        """The engine's own knowledge (tokens, and so on), with what only its bytes said."""
        said = {choice.index: choice for choice in self._said.choices()}
        choices = answer.choices
        if choices is None:
            choices = tuple(said.values()) or None
        else:
            choices = tuple(
                replace(choice, message=said[choice.index].message)
                if choice.message is None and choice.index in said
                else choice
                for choice in choices
            )
        return replace(
            answer,
            choices=choices,
            usage=answer.usage or self._said.usage,
            model=answer.model or self._said.model,
            reply=self._reply,
            id=f"resp_{self.ask.receipt}",
            error=answer.error or self._said.error,
        )


def _head(head: Head, *, stream: bool) -> Head:
    kept = {name: value for name, value in head.headers.items() if name not in _HEADERS}
    if stream:
        return replace(
            head, headers={**kept, "content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        )
    return replace(head, headers={**kept, "content-type": "application/json"})


def _texts(item: dict[str, Any]) -> list[tuple[str, int, str]]:
    """The texts of an item: kind, number, words."""
    found: list[tuple[str, int, Json]] = []
    for number, part in enumerate(objects(item.get("content"))):
        kind = part.get("type")
        if kind == "refusal":
            found.append(("refusal", number, part.get("refusal")))
        elif kind in ("output_text", "text", "reasoning_text"):
            found.append(("thought" if item.get("type") == "reasoning" else "text", number, part.get("text")))
    for number, part in enumerate(objects(item.get("summary"))):
        found.append(("summary", number, part.get("text")))
    found += [(name, 0, item[name]) for name in ("arguments", "input") if item.get("type") in _CALLS and name in item]
    return [(kind, number, words) for kind, number, words in found if isinstance(words, str) and words]


def _usage(given: Json) -> Usage | None:
    if not isinstance(given, dict) or (prompt := count_of(given.get("input_tokens"))) is None:
        return None
    return Usage(prompt, count_of(given.get("output_tokens")) or 0)


def _whole(value: Json) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
