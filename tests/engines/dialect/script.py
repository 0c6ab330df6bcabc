"""Chat-only engines that say what a test wrote, cut where it likes; and Messages asks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from reef.engines import Answer, Ask, Head, Piece
from reef.engines.dialect import translate

RECEIPT = "0197" + "cd" * 14
EVENTS = {"content-type": "text/event-stream; charset=utf-8", "openai-version": "2020-10-01"}
JSON = {"content-type": "application/json", "content-length": "17"}


def asking(stream: bool = False, dialect: str = "messages", **fields: Any) -> Ask:
    body = {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": "Hi"}], **fields}
    body = {name: value for name, value in body.items() if value is not ...}
    headers = {"anthropic-version": "2023-06-01", "user-agent": "test"}
    return Ask(RECEIPT, "base", dialect, json.dumps(body).encode(), stream, headers, query="beta=true")


def said_in_chat(**fields: Any) -> Any:
    """The chat body a Messages request becomes."""
    return json.loads(translate(asking(**fields)).ask.body)


def chunk(finish: str | None = None, *, index: int = 0, **delta: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "chat-model", "choices": [choice]}


def call(index: int, arguments: str = "", name: str | None = None, id: str | None = None) -> dict[str, Any]:
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {"index": index, "function": function} | ({"id": id, "type": "function"} if id else {})


def usage(prompt: int, completion: int, **more: Any) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {"id": "chatcmpl-1", "model": "chat-model", "choices": [], "usage": counts | more}


def completion(finish: str = "stop", **message: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return {"id": "chatcmpl-1", "model": "chat-model", "choices": [choice], "usage": usage(7, 3)["usage"]}


class Scripted:
    """`items` are passed on as they are; afterwards `closed` says whether the engine was left properly."""

    def __init__(self, *items: Head | Piece | Answer | Exception) -> None:
        self.items, self.closed = items, False

    async def answer(self, ask: Ask) -> AsyncIterator[Head | Piece | Answer]:
        try:
            for item in self.items:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed = True


def streaming(*chunks: Any, end: str = "[DONE]", size: int | None = None) -> Scripted:
    """An engine that streams these chunks, an event a piece or `size` bytes a piece."""
    events = [f"data: {json.dumps(each)}\n\n".encode() for each in chunks]
    if size is not None:
        data = b"".join(events)
        events = [data[at : at + size] for at in range(0, len(data), size)]
    pieces = [Piece(each) for each in events]
    return Scripted(Head(200, EVENTS, "up-1"), *pieces, Piece(f"data: {end}\n\n".encode(), True), Answer(model="up"))


def whole(body: Any, status: int = 200) -> Scripted:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Scripted(Head(status, JSON), Piece(data[:5]), Piece(data[5:], True), Answer(model="up"))


async def answered(engine: Any, ask: Ask) -> tuple[Head, list[Piece], Answer | None]:
    """What a Messages client and the record get of an engine that speaks chat."""
    made = translate(ask)
    head, *rest = [item async for item in made.answer(engine.answer(made.ask))]
    assert isinstance(head, Head)
    pieces = [item for item in rest if isinstance(item, Piece)]
    answers = [item for item in rest if isinstance(item, Answer)]
    return head, pieces, answers[0] if answers else None


def events_of(data: bytes | Sequence[Piece]) -> list[dict[str, Any]]:
    """The events of a Messages stream; each has its event line, and it agrees."""
    text = (data if isinstance(data, bytes) else b"".join(piece.data for piece in data)).decode()
    assert text.endswith("\n\n")
    found = []
    for event in text[:-2].split("\n\n"):
        name, line = event.split("\n")
        value = json.loads(line.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        found.append(value)
    return found
