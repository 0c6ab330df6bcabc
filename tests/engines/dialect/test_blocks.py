"""Chat answers made into Messages answers: what the client gets, and what the record keeps of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.core.errors import EngineError, UpstreamError
from reef.core.nouns import Usage
from reef.engines import Answer, Ask, Head, Piece
from reef.engines.dialect import read, translate
from reef.engines.dialect.blocks import Message
from reef.engines.fake import FakeEngine, Fault
from tests.engines.dialect.script import (
    EVENTS,
    RECEIPT,
    Scripted,
    answered,
    asking,
    call,
    chunk,
    completion,
    events_of,
    streaming,
    usage,
    whole,
)

TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("get", "get_weather", "set")]
TEXT = [chunk(role="assistant", content=""), chunk(content="Hel"), chunk(content="lo"), chunk("stop"), usage(7, 3)]


def kinds(events: list[dict[str, Any]]) -> str:
    """The order of things, with the index of the block each is about."""
    words = (f"{each['type'].removeprefix('content_block_')}{each.get('index', '')}" for each in events)
    return " ".join(words).replace("message_", "")


def tool(name: str, arguments: str, id: str | None = None) -> dict[str, Any]:
    return {"index": 0, "type": "function", "function": {"name": name, "arguments": arguments}} | (
        {"id": id} if id else {}
    )


async def test_text_event_by_event() -> None:
    engine = streaming(*TEXT)
    head, pieces, answer = await answered(engine, asking(stream=True))
    assert (head.status, head.upstream_id) == (200, "up-1")
    assert head.headers == EVENTS
    assert engine.closed
    first = {"input_tokens": 0, "output_tokens": 0, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
    message = {
        "id": f"msg_{RECEIPT}",
        "type": "message",
        "role": "assistant",
        "model": "chat-model",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": first,
    }
    last = first | {"input_tokens": 7, "output_tokens": 3}
    assert events_of(pieces) == [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "lo"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": last},
        {"type": "message_stop"},
    ]
    assert [piece.terminal for piece in pieces] == [*[False] * (len(pieces) - 1), True]
    assert pieces[-1].data == b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    assert answer is not None
    assert (answer.id, answer.model, answer.error) == (f"msg_{RECEIPT}", "up", None)
    assert json.loads(answer.reply or b"") == message | {
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "usage": last,
    }


async def test_text_at_once() -> None:
    body = completion(content="Hello") | {"usage": {"prompt_tokens": 7, "completion_tokens": 3}}
    head, pieces, answer = await answered(whole(body), asking())
    assert (head.status, head.headers) == (200, {"content-type": "application/json"})
    (piece,) = pieces
    assert piece.terminal
    said = json.loads(piece.data)
    assert answer is not None
    assert answer.reply == piece.data
    assert (said["id"], said["model"], said["stop_reason"]) == (f"msg_{RECEIPT}", "chat-model", "end_turn")
    assert said["content"] == [{"type": "text", "text": "Hello"}]
    assert said["usage"]["input_tokens"] == 7


async def test_thinking_text_and_a_tool() -> None:
    """Case 3: two fragments of one call in one chunk."""
    chunks = [
        chunk(reasoning_content="Hm"),
        chunk(reasoning_content="m."),
        chunk(content="I look."),
        chunk(tool_calls=[call(0, "", "get_weather", "call_1"), call(0, '{"ci')]),
        chunk(tool_calls=[call(0, 'ty":1}')]),
        chunk("tool_calls"),
        usage(7, 3, prompt_tokens_details={"cached_tokens": 5}),
    ]
    _, pieces, answer = await answered(streaming(*chunks), asking(stream=True, tools=TOOLS))
    events = events_of(pieces)
    assert kinds(events) == (
        "start start0 delta0 delta0 stop0 start1 delta1 stop1 start2 delta2 delta2 stop2 delta stop"
    )
    assert events[1]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert events[8]["content_block"] == {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {}}
    assert [each["delta"]["partial_json"] for each in events[9:11]] == ['{"ci', 'ty":1}']
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"] == {
        "input_tokens": 2,
        "output_tokens": 3,
        "cache_read_input_tokens": 5,
        "cache_creation_input_tokens": 0,
    }
    assert answer is not None
    assert json.loads(answer.reply or b"")["content"] == [
        {"type": "thinking", "thinking": "Hmm.", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": 1}},
    ]


async def test_parallel_calls_one_after_the_other_are_sent_as_they_come() -> None:
    message = Message(RECEIPT, "m", {"get", "set"})
    sent = [
        message.take(chunk(tool_calls=[call(0, "", "get", "a")])),
        message.take(chunk(tool_calls=[call(0, '{"x":1}')])),
        message.take(chunk(tool_calls=[call(1, "", "set", "b")])),
        message.take(chunk(tool_calls=[call(1, '{"y"')])),
        message.take(chunk("tool_calls", tool_calls=[call(1, ":2}")])),
    ]
    assert [kinds(events_of(each)) for each in sent] == [
        "start",
        "start0 delta0",
        "stop0",
        "start1 delta1",
        "delta1 stop1",
    ]


async def test_interleaved_calls_and_names_in_fragments() -> None:
    """Case 5: blocks never interleave, whatever the fragments do."""
    chunks = [
        chunk(tool_calls=[call(0, '{"x"', "get_"), call(1, '{"y"', "set", "b")]),
        chunk(tool_calls=[call(0, ":1}", "weather")]),
        chunk(content="?"),
        chunk(tool_calls=[call(1, ":2}")]),
        chunk("tool_calls"),
    ]
    _, pieces, _ = await answered(streaming(*chunks), asking(stream=True, tools=TOOLS))
    events = events_of(pieces)
    assert kinds(events) == ("start start0 delta0 stop0 start1 delta1 delta1 stop1 start2 delta2 stop2 delta stop")
    said = read("messages", b"".join(piece.data for piece in pieces), stream=True)
    content = json.loads(said.reply or b"")["content"]
    assert [(each.get("name"), each.get("input"), each.get("text")) for each in content] == [
        ("get_weather", {"x": 1}, None),
        ("set", {"y": 2}, None),
        (None, None, "?"),
    ]
    assert content[0]["id"] == f"toolu_{RECEIPT}_0"
    assert content[1]["id"] == "b"


async def test_arguments_that_are_no_json() -> None:
    chunks = [chunk(tool_calls=[call(0, '{"a": oops', "get", "c")]), chunk("tool_calls")]
    _, pieces, _ = await answered(streaming(*chunks), asking(stream=True, tools=TOOLS))
    deltas = [each["delta"] for each in events_of(pieces) if each["type"] == "content_block_delta"]
    assert deltas == [{"type": "input_json_delta", "partial_json": '{"a": oops'}]
    _, pieces, _ = await answered(
        whole(completion("tool_calls", tool_calls=[tool("get", '{"a": oops', "c")])), asking()
    )
    assert json.loads(pieces[0].data)["content"] == [{"type": "tool_use", "id": "c", "name": "get", "input": {}}]


@pytest.mark.parametrize(
    ("finish", "reason"),
    [("stop", "end_turn"), ("length", "max_tokens"), ("content_filter", "refusal"), ("tool_calls", "tool_use")],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_reasons_to_stop(finish: str, reason: str, stream: bool) -> None:
    engine = streaming(chunk(content="a"), chunk(finish)) if stream else whole(completion(finish, content="a"))
    _, pieces, _ = await answered(engine, asking(stream=stream))
    body = events_of(pieces)[-2]["delta"] if stream else json.loads(pieces[-1].data)
    assert body["stop_reason"] == reason


async def test_a_stop_with_calls_is_for_the_tools() -> None:
    _, pieces, _ = await answered(whole(completion("stop", tool_calls=[tool("get", "{}", "c")])), asking())
    assert json.loads(pieces[0].data)["stop_reason"] == "tool_use"


async def test_an_answer_with_nothing_in_it() -> None:
    _, pieces, _ = await answered(streaming(chunk(role="assistant", content=None), chunk("stop")), asking(stream=True))
    assert kinds(events_of(pieces)) == "start delta stop"


async def test_a_refusal_is_text() -> None:
    _, pieces, _ = await answered(whole(completion(content=None, refusal="No.")), asking())
    body = json.loads(pieces[0].data)
    assert (body["content"], body["stop_reason"]) == ([{"type": "text", "text": "No."}], "refusal")


async def test_a_whole_completion_where_a_stream_was_asked_for() -> None:
    body = completion("tool_calls", content="Hi", tool_calls=[tool("get", '{"a":1}', "c")])
    head, pieces, answer = await answered(whole(body), asking(stream=True))
    assert head.headers["content-type"].startswith("text/event-stream")
    assert kinds(events_of(pieces)) == ("start start0 delta0 stop0 start1 delta1 stop1 delta stop")
    assert answer is not None
    assert json.loads(answer.reply or b"")["usage"]["output_tokens"] == 3


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"message": "busy", "type": "overloaded_error"}, "overloaded_error"),
        ({"message": "busy", "type": "server_error", "code": 429}, "rate_limit_error"),
        ({"message": "busy"}, "api_error"),
        ("busy", "api_error"),
    ],
)
async def test_an_error_in_the_stream_ends_it(error: Any, kind: str) -> None:
    engine = streaming(chunk(content="a"), end=json.dumps({"error": error}))
    _, pieces, answer = await answered(engine, asking(stream=True))
    assert [piece.terminal for piece in pieces] == [False, True]
    body = {"type": "error", "error": {"type": kind, "message": "busy"}, "request_id": RECEIPT}
    assert events_of([pieces[-1]]) == [body]
    assert answer is not None
    assert (answer.error, answer.reply) == ("busy", None)


async def test_an_error_in_the_place_of_a_completion() -> None:
    head, pieces, answer = await answered(whole({"error": {"message": "busy"}}), asking())
    assert head.status == 502
    assert json.loads(pieces[0].data)["error"] == {"type": "api_error", "message": "busy"}
    assert answer is not None
    assert answer.error == "busy"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (418, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (529, "overloaded_error"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_refused_request(status: int, kind: str, stream: bool) -> None:
    engine = FakeEngine()
    engine.faults.append(Fault("status", status=status))
    head, pieces, answer = await answered(engine, asking(stream=stream))
    assert (head.status, head.headers["retry-after"], head.upstream_id) == (status, "30", "up-1")
    (piece,) = pieces
    assert piece.terminal
    assert json.loads(piece.data) == {
        "type": "error",
        "error": {"type": kind, "message": f"status {status}"},
        "request_id": RECEIPT,
    }
    assert answer is not None
    assert answer.untrainable == "refused"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>Bad gateway", "<html>Bad gateway"),
        (b'{"detail":"Not here"}', "Not here"),
        (b"", "the engine answered 404"),
    ],
)
async def test_a_refusal_in_other_words(body: bytes, message: str) -> None:
    _, pieces, _ = await answered(whole(body, 404), asking())
    assert json.loads(pieces[0].data)["error"]["message"] == message


async def test_what_is_no_completion_is_the_engines_failure() -> None:
    for body in (b"<html>", b"[]", {"choices": []}):
        with pytest.raises(EngineError):
            await answered(whole(body), asking())
    for engine in (Scripted(), streaming(), streaming(chunk(content="a"))):
        with pytest.raises(EngineError):
            await answered(engine, asking(stream=True))


@pytest.mark.parametrize("stream", [True, False])
async def test_arguments_that_are_nested_too_deeply_to_be_written(stream: bool) -> None:
    deep = '{"a":' + "[" * 900 + "]" * 900 + "}"
    parts = [call(0, deep, "get", "c")]
    engine = streaming(chunk("tool_calls", tool_calls=parts)) if stream else whole(completion(tool_calls=parts))
    _, _, answer = await answered(engine, asking(stream=stream, tools=TOOLS))
    assert answer is not None
    assert json.loads(answer.reply or b"")["content"][0]["input"] == {}


async def test_failures_of_the_engine_pass() -> None:
    error = UpstreamError("gone")
    for items in ((error,), (Head(200, EVENTS), Piece(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'), error)):
        engine, got = Scripted(*items), []
        made = translate(asking(stream=True))
        with pytest.raises(UpstreamError, match="gone"):
            async for item in made.answer(engine.answer(made.ask)):
                got.append(item)
        assert len(got) == (0 if len(items) == 1 else 2)
        assert engine.closed


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_early_leaves_the_engine(stream: bool) -> None:
    engine = FakeEngine(delay=0.01)
    made = translate(asking(stream=stream))
    items = made.answer(engine.answer(made.ask))
    task = asyncio.ensure_future(anext(items))
    if stream:
        assert isinstance(await task, Head)
        await anext(items)
    else:
        await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await items.aclose()
    assert engine.stopped == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_the_fake_engine_answers_messages_and_its_tokens_stay(stream: bool) -> None:
    ask = asking(stream=stream, system="Be brief.")
    _, pieces, answer = await answered(FakeEngine(), ask)
    said = read("messages", b"".join(piece.data for piece in pieces), stream=stream)
    assert said.finished
    (choice,) = said.choices()
    assert (choice.text, choice.finish_reason) == ("base heard: Hi", "stop")
    assert answer is not None
    (kept,) = answer.choices or ()
    assert (kept.text, len(kept.output_ids or ())) == (choice.text, 3)
    assert answer.sampling is not None
    assert said.usage == answer.usage == Usage(3, 3)
    assert json.loads(said.reply or b"") == json.loads(answer.reply or b"")


@pytest.mark.parametrize("kind", ["cut", "short"])
async def test_a_stream_that_breaks_has_no_end(kind: Any) -> None:
    engine, got = FakeEngine(), []
    engine.faults.append(Fault(kind, at=2))
    made = translate(asking(stream=True))
    try:
        async for item in made.answer(engine.answer(made.ask)):
            got.append(item)
    except EngineError:
        assert kind == "cut"
    pieces = [item for item in got if isinstance(item, Piece)]
    assert not any(piece.terminal for piece in pieces)
    assert not any(b"message_stop" in piece.data or b"message_delta" in piece.data for piece in pieces)
    assert all(item.reply is None for item in got if isinstance(item, Answer))


names = st.sampled_from(["get", "set", "get_weather", "unknown", "", None])
pieces = st.sampled_from(["", "{", '"a":', "1", "}", '{"b":"ü"}', " ", "x"])
parts = st.builds(
    lambda index, arguments, name, id: call(index, arguments, name, id),
    st.integers(0, 2),
    pieces,
    names,
    st.sampled_from([None, "c1"]),
)
chunks = st.lists(
    st.builds(lambda text: chunk(content=text), pieces)
    | st.builds(lambda text: chunk(reasoning_content=text), pieces)
    | st.builds(lambda calls: chunk(tool_calls=calls), st.lists(parts, max_size=3))
    | st.builds(lambda text: chunk(index=1, content=text), pieces)
    | st.just(usage(5, 2)),
    max_size=12,
)


def one_after_the_other(events: list[dict[str, Any]]) -> bool:
    """Whether every block begins, goes on and ends before the next begins, with indexes 0, 1, 2 …"""
    open_at, following = None, 0
    for each in events:
        kind = each["type"]
        if kind == "content_block_start":
            if open_at is not None or each["index"] != following:
                return False
            open_at, following = following, following + 1
        elif kind == "content_block_delta" and each["index"] != open_at:
            return False
        elif kind == "content_block_stop":
            if each["index"] != open_at:
                return False
            open_at = None
    return open_at is None


@settings(deadline=None)
@given(chunks, st.integers(1, 40))
async def test_whatever_the_chunks_do_the_client_gets_what_the_record_says(given_chunks: Any, size: int) -> None:
    """Case 6: also when letters and events are cut anywhere."""
    engine = streaming(*given_chunks, chunk("stop"), size=size)
    _, got, answer = await answered(engine, asking(stream=True, tools=TOOLS))
    data = b"".join(piece.data for piece in got)
    assert one_after_the_other(events_of(data))
    said = read("messages", data, stream=True)
    assert said.finished
    assert answer is not None
    assert json.loads(said.reply or b"") == json.loads(answer.reply or b"")
    chat = read("chat", b"".join(f"data: {json.dumps(each)}\n\n".encode() for each in given_chunks), stream=True)
    expected = next((choice for choice in chat.choices() if choice.index == 0), None)
    (choice,) = said.choices()
    assert choice.text == (expected.text if expected else "")
    said_of, kept_of = choice.message or {}, (expected and expected.message) or {}
    assert said_of.get("reasoning_content") == kept_of.get("reasoning_content")
    told = [each["function"]["arguments"] for each in said_of.get("tool_calls", ())]
    kept = [each["function"]["arguments"] for each in kept_of.get("tool_calls", ())]
    assert len(told) == len(kept)
    for one in told:  # what comes after a whole object is no part of it; a call without arguments has none: {}
        assert any(other.startswith(one) or (not other and one == "{}") for other in kept)


strange = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "index", "delta", "content", "tool_calls", "function", "usage", "name", "id"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=15,
)


@settings(deadline=None)
@given(st.lists(strange, max_size=4))
async def test_strange_json_never_raises(values: list[Any]) -> None:
    engine = streaming(*values, chunk("stop"))
    ask: Ask = asking(stream=True)
    _, got, _ = await answered(engine, ask)
    assert one_after_the_other(events_of(got))
