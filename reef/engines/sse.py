"""Server-sent events out of bytes that arrive in any pieces, and chat chunks put together into answers.

Knows: the event-stream format (the WHATWG HTML standard's), and OpenAI's chat completion chunks.
Does not know: sockets, timing, or who reads the result. Both classes are pure: bytes or JSON in, values out.

- `raw` of all events plus `rest` is exactly the input, whatever the cuts: an event's bytes can be passed on untouched.
- Feeding one byte at a time gives the events that feeding everything at once gives.
- Assembling never raises on strange JSON: a field of the wrong type is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from reef.core.nouns import Choice, Json, Usage

DONE = "[DONE]"
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `raw` is its exact bytes with the blank line that ends it; `data` is None when it had no data line."""

    raw: bytes
    data: str | None
    name: str | None = None


class Events:
    """Cuts an event stream into events. Lines end with CR, LF or CRLF, in any mixture."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._line = 0  # where the line being read begins
        self._seen = 0  # bytes already searched for a line end
        self._data: list[str] = []
        self._name: str | None = None
        self._first = True

    @property
    def rest(self) -> bytes:
        """Bytes of an event that has not ended yet."""
        return bytes(self._buffer)

    def feed(self, data: bytes) -> list[Event]:
        """The events that these bytes complete."""
        self._buffer += data
        found: list[Event] = []
        while (end := self._line_end()) is not None:
            stop, begin = end
            line = bytes(self._buffer[self._line : stop])
            self._line = self._seen = begin
            if line:
                self._take(line)
            else:
                found.append(self._event(begin))
        return found

    def finish(self) -> Event | None:
        """At the end of the input: what an unfinished event would have been, or None when nothing is left.

        The standard drops it; a reader that must know whether the end marker came does not want to.
        """
        if not self._buffer:
            return None
        if line := bytes(self._buffer[self._line :]).rstrip(b"\r"):
            self._take(line)
        return self._event(len(self._buffer))

    def _line_end(self) -> tuple[int, int] | None:
        """Where the current line stops and the next begins. A CR at the very end waits: a LF may follow."""
        buffer = self._buffer
        lf = buffer.find(b"\n", self._seen)
        cr = buffer.find(b"\r", self._seen, lf if lf >= 0 else len(buffer))
        if cr >= 0:
            if cr + 1 == len(buffer):
                self._seen = cr
                return None
            return cr, cr + 2 if buffer[cr + 1] == 10 else cr + 1
        if lf >= 0:
            return lf, lf + 1
        self._seen = len(buffer)
        return None

    def _take(self, line: bytes) -> None:
        if self._first:
            line, self._first = line.removeprefix(_BOM), False
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value.decode("utf-8", "replace"))
        elif name == b"event":
            self._name = value.decode("utf-8", "replace")

    def _event(self, end: int) -> Event:
        event = Event(bytes(self._buffer[:end]), "\n".join(self._data) if self._data else None, self._name)
        del self._buffer[:end]
        self._line = self._seen = 0
        self._data, self._name, self._first = [], None, False
        return event


class _Draft:
    """One choice being put together."""

    __slots__ = ("calls", "finish", "refusal", "text", "thought")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.thought: list[str] = []
        self.refusal: list[str] = []
        self.calls: dict[int, dict[str, Any]] = {}
        self.finish: str | None = None


class Chunks:
    """Puts chat completion chunks together: text, tool calls by index, finish reasons, usage wherever it comes."""

    def __init__(self) -> None:
        self._drafts: dict[int, _Draft] = {}
        self.usage: Usage | None = None
        self.model: str | None = None
        self.id: str | None = None
        self.error: str | None = None

    def feed(self, data: str) -> None:
        """Take one event's data. What is not a JSON object is passed over."""
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            return
        if isinstance(chunk, dict):
            self.add(chunk)

    def add(self, chunk: dict[str, Any]) -> None:
        if (error := chunk.get("error")) is not None:
            text = error.get("message") if isinstance(error, dict) else error
            self.error = str(text or "the stream carried an error")
        self.model = _text(chunk.get("model")) or self.model
        self.id = _text(chunk.get("id")) or self.id
        self.usage = read_usage(chunk.get("usage")) or self.usage
        for item in _objects(chunk.get("choices")):
            index = item.get("index")
            draft = self._drafts.setdefault(index if isinstance(index, int) else 0, _Draft())
            draft.finish = _text(item.get("finish_reason")) or draft.finish
            # A whole answer has `message` where a chunk has `delta`; the fields are the same.
            delta = item.get("delta") or item.get("message")
            if isinstance(delta, dict):
                _extend(draft, delta)

    @property
    def finished(self) -> bool:
        """Whether at least one choice was begun and each has its finish reason."""
        return bool(self._drafts) and all(draft.finish for draft in self._drafts.values())

    def choices(self) -> tuple[Choice, ...]:
        """The choices so far, by index. `message` is set when an answer is more than text."""
        found = []
        for index, draft in sorted(self._drafts.items()):
            text = "".join(draft.text)
            found.append(Choice(index, text, draft.finish, message=_message(draft, text)))
        return tuple(found)


def read_usage(value: Json) -> Usage | None:
    """Token counts as a provider states them; None when it states none."""
    if not isinstance(value, dict):
        return None
    prompt, completion = value.get("prompt_tokens"), value.get("completion_tokens")
    if not isinstance(prompt, int) or isinstance(prompt, bool):
        return None
    return Usage(prompt, completion if isinstance(completion, int) else 0)


def read_chunks(data: bytes) -> Chunks:
    """What a piece of a chat event stream says, also when it was cut anywhere."""
    events, chunks = Events(), Chunks()
    last = events.feed(data)
    if (end := events.finish()) is not None:
        last.append(end)
    for event in last:
        if event.data is not None and event.data != DONE:
            chunks.feed(event.data)
    return chunks


def read_completion(data: bytes) -> Chunks:
    """What a whole chat completion says. Bytes that are not one give no choices."""
    chunks = Chunks()
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return chunks
    if isinstance(body, dict):
        chunks.add(body)
    return chunks


def _extend(draft: _Draft, delta: dict[str, Any]) -> None:
    content = delta.get("content")
    if isinstance(content, list):  # some providers answer with content parts
        content = "".join(_text(part.get("text")) or "" for part in _objects(content))
    for pieces, value in (
        (draft.text, content),
        (draft.thought, delta.get("reasoning_content") or delta.get("reasoning")),
        (draft.refusal, delta.get("refusal")),
    ):
        if isinstance(value, str) and value:
            pieces.append(value)
    for place, part in enumerate(_objects(delta.get("tool_calls"))):
        index = part.get("index")
        call = draft.calls.setdefault(
            index if isinstance(index, int) else place, {"id": None, "type": "function", "name": "", "arguments": ""}
        )
        call["id"] = _text(part.get("id")) or call["id"]
        call["type"] = _text(part.get("type")) or call["type"]
        function = part.get("function")
        if isinstance(function, dict):
            call["name"] += _text(function.get("name")) or ""
            call["arguments"] += _text(function.get("arguments")) or ""


def _message(draft: _Draft, text: str) -> Json:
    if not (draft.calls or draft.thought or draft.refusal):
        return None
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    if draft.thought:
        message["reasoning_content"] = "".join(draft.thought)
    if draft.refusal:
        message["refusal"] = "".join(draft.refusal)
    if draft.calls:
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": call["type"],
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for _, call in sorted(draft.calls.items())
        ]
    return message


def _text(value: Json) -> str | None:
    return value if isinstance(value, str) else None


def _objects(value: Json) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
