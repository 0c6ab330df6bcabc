"""A chat answer said as a Responses answer: output items, their events in order, the response object.

Knows: chat chunks, the Responses events and what clients rely on in their order.
Does not know: requests (their echo is handed in), sockets, or when an answer ended.

One item is open at a time and closed before the next begins, as clients that keep only a current item need it. A call
is whole when its arguments are whole JSON; fragments that come for a later item meanwhile wait for their turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from reef.core.nouns import Json
from reef.engines.dialect.items import Tools, objects, text
from reef.engines.dialect.value import LOST, dump, load, mend, ready, say, split

Emit = Callable[..., None]
"""`emit(type, **fields)` writes one event."""


class Item(Protocol):
    """One output item. `advance` writes what can be written now; `close` the rest and the item's end."""

    @property
    def whole(self) -> bool: ...
    def advance(self, emit: Emit) -> None: ...
    def close(self, emit: Emit, status: str) -> None: ...
    def json(self) -> dict[str, Json]: ...


class Message:
    """Text and refusals, each run of either a content part."""

    whole = True

    def __init__(self, receipt: str, index: int) -> None:
        self.place: dict[str, Json] = {"item_id": f"msg_{receipt}_{index}", "output_index": index}
        self._status = "in_progress"
        self._opened = False
        self._parts: list[dict[str, Any]] = []
        self._waiting: list[tuple[str, str, list[Json]]] = []

    def put(self, kind: str, words: str, logprobs: list[Json]) -> None:
        self._waiting.append((kind, words, logprobs))

    def advance(self, emit: Emit, *, ended: bool = False) -> None:
        if not self._opened:
            self._opened = True
            emit("response.output_item.added", output_index=self.place["output_index"], item=self.json())
        for kind, words, logprobs in self._ready(ended):
            if not self._parts or self._parts[-1]["type"] != kind:
                self._end(emit)
                self._begin(emit, kind)
            part = self._parts[-1]
            part[_field(kind)] += words
            if kind == "refusal":
                if words:
                    emit("response.refusal.delta", **self._at(), delta=words)
                continue
            part["logprobs"] += logprobs
            if words:
                emit("response.output_text.delta", **self._at(), delta=words, logprobs=logprobs)

    def close(self, emit: Emit, status: str) -> None:
        if not self._waiting and not self._parts:
            self._waiting.append(("output_text", "", []))
        self.advance(emit, ended=True)
        self._end(emit)
        self._status = status
        emit("response.output_item.done", output_index=self.place["output_index"], item=self.json())

    def json(self) -> dict[str, Json]:
        return {
            "id": self.place["item_id"],
            "type": "message",
            "status": self._status,
            "role": "assistant",
            "content": [dict(part) for part in self._parts],
        }

    def _ready(self, ended: bool) -> Iterator[tuple[str, str, list[Json]]]:
        """What waits, but for half a character at its end, whose other half may come."""
        waiting, self._waiting = self._waiting, []
        half, scored = "", list[Json]()
        for place, (kind, given, logprobs) in enumerate(waiting, 1):
            words, half = split(half + given)
            scored = [*scored, *logprobs]
            following = waiting[place][0] if place < len(waiting) else None
            if half and (following == kind or (following is None and not ended)):
                if following is None:
                    self._waiting.append((kind, half, [] if words else scored))
                if not words:
                    continue
            elif half:
                words, half = words + LOST, ""
            yield kind, mend(words), scored
            scored = []

    def _at(self) -> dict[str, Json]:
        return {**self.place, "content_index": len(self._parts) - 1}

    def _begin(self, emit: Emit, kind: str) -> None:
        part: dict[str, Any] = {"type": kind, _field(kind): ""}
        if kind == "output_text":
            part |= {"annotations": [], "logprobs": []}
        self._parts.append(part)
        emit("response.content_part.added", **self._at(), part=part)

    def _end(self, emit: Emit) -> None:
        if not self._parts:
            return
        part = self._parts[-1]
        if part["type"] == "refusal":
            emit("response.refusal.done", **self._at(), refusal=part["refusal"])
        else:
            emit("response.output_text.done", **self._at(), text=part["text"], logprobs=part["logprobs"])
        emit("response.content_part.done", **self._at(), part=part)


class Thought:
    """Reasoning, as summary text: what every client shows, and sends back with the next request."""

    whole = True

    def __init__(self, receipt: str, index: int) -> None:
        self.place: dict[str, Json] = {"item_id": f"rs_{receipt}_{index}", "output_index": index}
        self._opened = False
        self._said = ""
        self._waiting: list[str] = []

    def put(self, words: str) -> None:
        self._waiting.append(words)

    def advance(self, emit: Emit, *, ended: bool = False) -> None:
        at = {**self.place, "summary_index": 0}
        if not self._opened:
            self._opened = True
            emit("response.output_item.added", output_index=self.place["output_index"], item=self.json())
            emit("response.reasoning_summary_part.added", **at, part={"type": "summary_text", "text": ""})
        for words in ready(self._waiting, ended=ended):
            self._said += words
            emit("response.reasoning_summary_text.delta", **at, delta=words)

    def close(self, emit: Emit, status: str) -> None:
        self.advance(emit, ended=True)
        at = {**self.place, "summary_index": 0}
        emit("response.reasoning_summary_text.done", **at, text=self._said)
        emit("response.reasoning_summary_part.done", **at, part={"type": "summary_text", "text": self._said})
        emit("response.output_item.done", output_index=self.place["output_index"], item=self.json())

    def json(self) -> dict[str, Json]:
        summary = [{"type": "summary_text", "text": self._said}] if self._said else []
        return {"id": self.place["item_id"], "type": "reasoning", "summary": summary}


class Call:
    """A function call, or a custom tool's, whose free text comes at the end, in one piece."""

    def __init__(self, receipt: str, index: int, tools: Tools) -> None:
        self._ids = {True: f"ctc_{receipt}_{index}", False: f"fc_{receipt}_{index}"}
        self._index = index
        self._tools = tools
        self._status = "in_progress"
        self._opened = False
        self._waiting: list[str] = []
        self._sent: list[str] = []
        self._name = ""
        self._identified = False
        self.call_id = f"call_{receipt}_{index}"

    @property
    def place(self) -> dict[str, Json]:
        return {"item_id": self._ids[self._tools.named(self._name).custom], "output_index": self._index}

    @property
    def whole(self) -> bool:
        if not self._name or not (self._waiting or self._sent or [""])[-1].endswith("}"):
            return False
        return load(self._arguments()) is not None

    def identify(self, call_id: str) -> bool:
        """Take the server's id, if none was told to the client yet."""
        if self._opened or self._identified:
            return False
        self.call_id, self._identified = mend(call_id), True
        return True

    def put(self, name: str, arguments: str) -> None:
        """Some servers tell the name behind the arguments; it is not grown once both are there."""
        if name and not (self._name and (self._sent or self._waiting)):
            self._name += mend(name)
        if arguments:
            self._waiting.append(arguments)

    def advance(self, emit: Emit, *, ended: bool = False) -> None:
        if not self._waiting or not (self._name or ended):
            return  # the name may not be whole yet
        self._open(emit)
        custom = self._tools.named(self._name).custom
        for arguments in ready(self._waiting, ended=ended):
            self._sent.append(arguments)
            if not custom:
                emit("response.function_call_arguments.delta", **self.place, delta=arguments)

    def close(self, emit: Emit, status: str) -> None:
        custom = self._tools.named(self._name).custom
        if not self._arguments().strip() and not custom:
            self._waiting = ["{}"]  # a call without arguments, as some servers have it; clients parse them
        self._open(emit)
        self.advance(emit, ended=True)
        if custom:
            given = self._input()
            if given:
                emit("response.custom_tool_call_input.delta", **self.place, delta=given)
            emit("response.custom_tool_call_input.done", **self.place, input=given)
        else:
            name = self._tools.named(self._name).name
            emit("response.function_call_arguments.done", **self.place, name=name, arguments=self._arguments())
        self._status = status
        emit("response.output_item.done", output_index=self._index, item=self.json())

    def json(self) -> dict[str, Json]:
        tool = self._tools.named(self._name)
        item: dict[str, Json] = {
            "id": self._ids[tool.custom],
            "type": "custom_tool_call" if tool.custom else "function_call",
            "status": self._status,
            "call_id": self.call_id,
            "name": tool.name,
        }
        item |= {"input": self._input()} if tool.custom else {"arguments": "".join(self._sent)}
        return item if tool.namespace is None else {**item, "namespace": tool.namespace}

    def _open(self, emit: Emit) -> None:
        if not self._opened:
            self._opened = True
            emit("response.output_item.added", output_index=self._index, item=self.json())

    def _arguments(self) -> str:
        return mend("".join([*self._sent, *self._waiting]))

    def _input(self) -> str:
        """The free text. A model that did not keep to the function's form is taken by its word."""
        arguments = "".join(self._sent)
        given = load(arguments)
        words = given.get("input") if isinstance(given, dict) else None
        return mend(words) if isinstance(words, str) else arguments


class Output:
    """One answer. `take()` gives the events so far as bytes, `last()` the event that ends it."""

    def __init__(self, receipt: str, echo: dict[str, Json], tools: Tools) -> None:
        self._receipt, self._echo, self._tools = receipt, echo, tools
        self._created = int(time.time())
        self._events: list[bytes] = []
        self._number = 0
        self._begun = False
        self._items: list[Item] = []
        self._head = 0  # the first item that is not closed
        self._calls: dict[int, Call] = {}
        self._given: set[str] = set()  # the calls' ids
        self._logprobs: list[Json] = []
        self._usage: dict[str, Json] | None = None
        self._status = "in_progress"
        self._error: dict[str, Json] | None = None
        self.finish: str | None = None  # chat's finish reason

    def add(self, chunk: dict[str, Any]) -> None:
        """Take a chat chunk, or a whole chat completion."""
        if model := text(chunk.get("model")):
            self._echo["model"] = model
        self._usage = _usage(chunk.get("usage")) or self._usage
        if not self._begun:
            self._begin()
        if chunk.get("error") is not None:
            self._fail(chunk["error"])
            return
        for choice in objects(chunk.get("choices"))[:1]:
            if choice.get("index") not in (None, 0):
                continue
            delta = choice.get("delta") or choice.get("message")
            delta = delta if isinstance(delta, dict) else {}
            scored = choice.get("logprobs")
            if isinstance(scored, dict) and (delta.get("content") or not _other(delta)):
                self._logprobs += objects(scored.get("content"))
            self._extend(delta)
            self.finish = text(choice.get("finish_reason")) or self.finish
        self._pump()

    def close(self) -> None:
        """The answer is whole: write the end of every item."""
        if not self._begun:
            self._begin()
        if self._error is not None:
            return
        cut = self.finish in ("length", "content_filter")
        if not self._items:
            self._items.append(Message(self._receipt, 0))
        if self._logprobs and isinstance(message := self._items[-1], Message):
            message.put("output_text", "", self._logprobs)
        self._pump(final=True, cut=cut)
        self._status = "incomplete" if cut else "completed"

    def take(self) -> bytes:
        data = b"".join(self._events)
        self._events.clear()
        return data

    def last(self) -> bytes:
        """The event that ends the answer, alone."""
        self._emit(f"response.{self._status}", response=self.response())
        return self.take()

    def response(self) -> dict[str, Json]:
        details = None
        if self._status == "incomplete":
            reason = "max_output_tokens" if self.finish == "length" else "content_filter"
            details = {"reason": reason}
        made = {
            "id": f"resp_{self._receipt}",
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "error": self._error,
            "incomplete_details": details,
            **self._echo,
            "output": [item.json() for item in self._items],
            "usage": self._usage,
        }
        return made | {"completed_at": int(time.time())} if self._status == "completed" else made

    def _begin(self) -> None:
        self._begun = True
        self._emit("response.created", response=self.response())
        self._emit("response.in_progress", response=self.response())

    def _emit(self, kind: str, **fields: Json) -> None:
        data = dump({"type": kind, "sequence_number": self._number, **fields})
        self._events.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))
        self._number += 1

    def _extend(self, delta: dict[str, Any]) -> None:
        if thought := text(delta.get("reasoning_content")) or text(delta.get("reasoning")):
            last = self._items[-1] if self._items else None
            if not isinstance(last, Thought):
                last = Thought(self._receipt, len(self._items))
                self._items.append(last)
            last.put(thought)
        content = delta.get("content")
        if isinstance(content, list):  # some providers answer with content parts
            content = "".join(text(part.get("text")) or "" for part in objects(content))
        for kind, words in (("output_text", content), ("refusal", delta.get("refusal"))):
            if isinstance(words, str) and words:
                self._speak(kind, words)
        for place, part in enumerate(objects(delta.get("tool_calls"))):
            self._fragment(part, place)

    def _speak(self, kind: str, words: str) -> None:
        last = self._items[-1] if self._items else None
        if not isinstance(last, Message):
            last = Message(self._receipt, len(self._items))
            self._items.append(last)
        scored: list[Json] = []
        if kind == "output_text":
            scored, self._logprobs = self._logprobs, []
        last.put(kind, words, scored)

    def _fragment(self, part: dict[str, Any], place: int) -> None:
        index = part.get("index")
        key = index if isinstance(index, int) else place
        call, function = self._calls.get(key), part.get("function")
        # Some servers number every call 0: a name after whole arguments begins another call.
        if call is None or (isinstance(function, dict) and function.get("name") and call.whole):
            call = self._calls[key] = Call(self._receipt, len(self._items), self._tools)
            self._items.append(call)
        # Clients match results by this id, so it must be there and be the only one.
        given = text(part.get("id"))
        if given and given not in self._given and call.identify(given):
            self._given.add(given)
        if isinstance(function, dict):
            call.put(text(function.get("name")) or "", text(function.get("arguments")) or "")

    def _pump(self, *, final: bool = False, cut: bool = False) -> None:
        """Write on, item by item, as far as the order allows."""
        while self._head < len(self._items):
            item = self._items[self._head]
            item.advance(self._emit)
            last = self._head + 1 == len(self._items)
            if not final and (last or not item.whole):
                return
            item.close(self._emit, "incomplete" if cut and last else "completed")
            self._head += 1

    def _fail(self, error: Json) -> None:
        given = error if isinstance(error, dict) else {"message": error}
        message = say(given.get("message") or "the model's answer broke off")
        self._error = {"code": text(given.get("code")) or "server_error", "message": message}
        self._status = "failed"


def _other(delta: dict[str, Any]) -> bool:
    """Whether a delta holds reasoning or calls: the log-probs of their tokens are not the text's."""
    return bool(delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls"))


def _field(kind: str) -> str:
    return "refusal" if kind == "refusal" else "text"


def _usage(given: Json) -> dict[str, Json] | None:
    """Token counts in this dialect's names. Clients need every field, so parts that were not told are 0."""
    if not isinstance(given, dict) or not _count(given, "prompt_tokens", -1) >= 0:
        return None
    asked, answered = given.get("prompt_tokens_details"), given.get("completion_tokens_details")
    prompt, completion = _count(given, "prompt_tokens"), _count(given, "completion_tokens")
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": _count(asked, "cached_tokens"),
            "cache_write_tokens": _count(asked, "cache_write_tokens"),
        },
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": _count(answered, "reasoning_tokens")},
        "total_tokens": _count(given, "total_tokens", prompt + completion),
    }


def _count(given: Json, name: str, default: int = 0) -> int:
    value = given.get(name) if isinstance(given, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else default
