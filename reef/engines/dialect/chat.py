"""OpenAI's chat completions, read: chunks or a whole body put together into choices.

Knows: the fields of chunks and completions. Assembling never raises on strange JSON: a field of the wrong type is left
out. Does not know: requests, or how a chat answer is written.
"""

from __future__ import annotations

from typing import Any

from reef.core.nouns import Choice, Json, Usage
from reef.engines.dialect.value import clean, count_of, load, mend, name_of, say
from reef.engines.sse import Event

DONE = "[DONE]"


class _Draft:
    """One choice being put together."""

    __slots__ = ("calls", "finish", "last", "refusal", "text", "thought")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.thought: list[str] = []
        self.refusal: list[str] = []
        self.calls: dict[int, dict[str, Any]] = {}
        self.last: dict[int, int] = {}  # an index as streamed, and the call that it means now
        self.finish: str | None = None


class Reader:
    """Puts chat completion chunks together: text, tool calls by index, finish reasons, usage wherever it comes."""

    reply: bytes | None = None  # the choices tell all

    def __init__(self) -> None:
        self._drafts: dict[int, _Draft] = {}
        self.usage: Usage | None = None
        self.model: str | None = None
        self.id: str | None = None
        self.error: str | None = None

    def event(self, event: Event) -> bool:
        """`[DONE]` or an error ends a stream. What is not a JSON object is passed over."""
        if event.data is None:
            return False
        if event.data == DONE:
            return True
        self.whole(event.data)
        return self.error is not None

    def whole(self, data: bytes | str) -> None:
        if isinstance(chunk := load(data), dict):
            self.add(chunk)

    def add(self, chunk: dict[str, Any]) -> None:
        if (error := chunk.get("error")) is not None:
            text = error.get("message") if isinstance(error, dict) else error
            self.error = say(text or "the stream carried an error")
        self.model = name_of(chunk.get("model")) or self.model
        self.id = name_of(chunk.get("id")) or self.id
        self.usage = read_usage(chunk.get("usage")) or self.usage
        for item in _objects(chunk.get("choices")):
            index = item.get("index")
            draft = self._drafts.setdefault(count_of(index) or 0, _Draft())
            draft.finish = name_of(item.get("finish_reason")) or draft.finish
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
            text = mend("".join(draft.text))
            found.append(Choice(index, text, draft.finish, message=clean(_message(draft, text))))
        return tuple(found)


def read_usage(value: Json) -> Usage | None:
    """Token counts as a provider states them; None when it states none."""
    if not isinstance(value, dict):
        return None
    prompt = count_of(value.get("prompt_tokens"))
    return None if prompt is None else Usage(prompt, count_of(value.get("completion_tokens")) or 0)


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
        call = _call(draft, index if isinstance(index, int) else place, _text(part.get("id")))
        call["type"] = _text(part.get("type")) or call["type"]
        function = part.get("function")
        if isinstance(function, dict):
            call["name"] += _text(function.get("name")) or ""
            call["arguments"] += _text(function.get("arguments")) or ""


def _call(draft: _Draft, index: int, id: str | None) -> dict[str, Any]:
    """The call that a fragment belongs to: the last one of its index. Some servers number all calls 0: an id that is
    another than that call's begins a new one."""
    call = draft.calls.get(draft.last.get(index, index))
    if call is None or (id is not None and call["id"] not in (None, id)):
        key = index if index not in draft.calls else max(draft.calls) + 1
        draft.last[index] = key
        call = draft.calls[key] = {"id": None, "type": "function", "name": "", "arguments": ""}
    call["id"] = id or call["id"]
    return call


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
