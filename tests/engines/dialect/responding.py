"""A chat engine that says what a test wants, and the Responses bodies, tools and chat chunks that tests share."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from hypothesis import strategies as st

from reef.engines import Answer, Ask, Head, Piece
from reef.engines.dialect import translate
from reef.engines.sse import Events

RECEIPT = "0197" + "ab" * 14


def sse(*events: dict[str, Any], named: bool = True) -> bytes:
    name = (lambda event: f"event: {event['type']}\n") if named else (lambda event: "")
    return b"".join(f"{name(event)}data: {json.dumps(event)}\n\n".encode() for event in events)


def ask(stream: bool = False, **body: Any) -> Ask:
    return Ask(RECEIPT, "r0", "responses", json.dumps(body).encode(), stream)


def chat(earlier: list[Any] | None = None, stream: bool = False, **body: Any) -> dict[str, Any]:
    body = {"model": "m", "input": "Hi", **body}
    made = translate(ask(stream, **body), earlier or []).ask
    assert (made.dialect, made.receipt, made.stream) == ("chat", RECEIPT, stream)
    return json.loads(made.body)


def messages(*items: Any, earlier: list[Any] | None = None, **body: Any) -> list[dict[str, Any]]:
    return chat(earlier, input=list(items), **body)["messages"]


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def made_call(name: str, call_id: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class Script:
    """A chat engine that answers with the given pieces; the last of them is the terminal one."""

    def __init__(self, *pieces: bytes, stream: bool = True, status: int = 200, error: str | None = None) -> None:
        self.pieces, self.status, self.closed = pieces, status, False
        self.answered = Answer(untrainable="the engine gives no tokens", error=error)
        self.kind = "text/event-stream" if stream else "application/json"

    async def answer(self, ask: Ask) -> AsyncIterator[Head | Piece | Answer]:
        try:
            yield Head(self.status, {"content-type": self.kind, "retry-after": "3"}, "up-1")
            for place, data in enumerate(self.pieces, 1):
                yield Piece(data, terminal=place == len(self.pieces))
            yield self.answered
        finally:
            self.closed = True


def chunk(finish: str | None = None, usage: Any = None, logprobs: Any = None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
    return b"data: " + json.dumps({"model": "real", "choices": [choice]}).encode() + b"\n\n"


def piece(index: int, arguments: str = "", name: str | None = None, id: str | None = None) -> dict[str, Any]:
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {"index": index, "function": function} | ({"id": id, "type": "function"} if id else {})


COUNTS = {
    "prompt_tokens": 11,
    "completion_tokens": 7,
    "total_tokens": 18,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
END = (b"data: " + json.dumps({"choices": [], "usage": COUNTS}).encode() + b"\n\n", b"data: [DONE]\n\n")
TALK = (
    chunk(role="assistant", content=""),
    chunk(reasoning_content="Let me "),
    chunk(reasoning_content="see."),
    chunk(content="Two "),
    chunk(content="calls."),
    chunk(tool_calls=[piece(0, "", "multi_agent_v1__", "c1")]),
    chunk(tool_calls=[piece(0, "", "spawn_agent"), piece(0, '{"a"')]),
    chunk(tool_calls=[piece(1, '{"y"', "f", "c2")]),
    chunk(tool_calls=[piece(0, ":1}")]),
    chunk(tool_calls=[piece(1, ":2}")]),
    chunk(tool_calls=[piece(2, '{"input":"*** ', "apply_patch", "c3")]),
    chunk(tool_calls=[piece(2, 'Begin\\n"}')]),
    chunk(finish="tool_calls"),
    *END,
)


FUNCTION = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
}
AGENTS = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Agents.",
    "tools": [
        {"type": "function", "name": "spawn_agent", "description": "Spawn.", "parameters": {"type": "object"}},
        {"type": "custom", "name": "exec"},
    ],
}


TOOLS = [AGENTS, FUNCTION, PATCH]
MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Looking 北京🌍.", "annotations": []}],
}
# fmt: off
FIELDS = [
    "id", "type", "item", "response", "output", "content", "summary", "text", "delta", "name", "arguments", "input",
    "role", "tools", "call_id", "output_index", "content_index", "part", "status", "error", "usage", "input_tokens",
    "incomplete_details", "reason", "instructions", "namespace", "image_url", "tool_choice", "reasoning", "format",
]
# fmt: on
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(FIELDS),
            inner,
            max_size=6,
        )
    ),
    max_leaves=20,
)


async def run(engine: Any, stream: bool = True, **body: Any) -> tuple[Head, list[Piece], Answer | None]:
    made = translate(ask(stream, **{"model": "m", "input": "Hi", **body}))
    async with aclosing(made.answer(engine.answer(made.ask))) as items:
        found = [item async for item in items]
    assert isinstance(found[0], Head)
    last = found[-1] if isinstance(found[-1], Answer) else None
    return found[0], [item for item in found if isinstance(item, Piece)], last


def told(pieces: list[Piece]) -> list[dict[str, Any]]:
    """The events of a stream, checked for what every one must have."""
    events = Events().feed(b"".join(piece.data for piece in pieces))
    found = [json.loads(event.data or "") for event in events]
    assert [event.name for event in events] == [event["type"] for event in found]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found
