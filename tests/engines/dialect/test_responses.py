"""Responses answers read, and the provider's own client reading what a chat engine answered."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import APIError, AsyncOpenAI

from reef.core.nouns import Choice, Usage
from reef.engines import Ask, Head, Piece
from reef.engines.dialect import read, reader, translate
from reef.engines.dialect.responses import Translation
from reef.engines.fake import FakeEngine, Fault
from reef.engines.sse import Events
from tests.engines.dialect.responding import (
    AGENTS,
    JSON,
    MESSAGE,
    RECEIPT,
    TALK,
    TOOLS,
    Script,
    chunk,
    sse,
    told,
)


def numbered(*events: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


WEATHER = {
    "id": "fc_1",
    "type": "function_call",
    "call_id": "call_1",
    "name": "get_weather",
    "arguments": '{"city":"Rome"}',
    "status": "completed",
}
SPAWN = {
    "id": "fc_2",
    "type": "function_call",
    "call_id": "call_2",
    "name": "spawn_agent",
    "namespace": "multi_agent_v1",
    "arguments": "{}",
    "status": "completed",
}
REASONING = {"id": "rs_1", "type": "reasoning", "summary": [{"type": "summary_text", "text": "Think."}]}
USAGE = {
    "input_tokens": 26,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": 9,
    "output_tokens_details": {"reasoning_tokens": 3},
    "total_tokens": 35,
}
WHOLE = {
    "id": "resp_1",
    "object": "response",
    "status": "completed",
    "model": "gpt-x",
    "output": [REASONING, MESSAGE, WEATHER, SPAWN],
    "usage": USAGE,
    "big": 123456789012345678901234567890,
}


def at(kind: str, index: int, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "output_index": index, **fields}


STREAM = numbered(
    {"type": "response.created", "response": {**WHOLE, "status": "in_progress", "output": [], "usage": None}},
    {"type": "response.in_progress", "response": {**WHOLE, "status": "in_progress", "output": [], "usage": None}},
    at("response.output_item.added", 0, item={"id": "rs_1", "type": "reasoning", "summary": []}),
    at("response.reasoning_summary_text.delta", 0, item_id="rs_1", summary_index=0, delta="Thi"),
    at("response.reasoning_summary_text.delta", 0, item_id="rs_1", summary_index=0, delta="nk."),
    at("response.output_item.done", 0, item=REASONING),
    at("response.output_item.added", 1, item={**MESSAGE, "content": [], "status": "in_progress"}),
    at("response.content_part.added", 1, item_id="msg_1", content_index=0, part={"type": "output_text", "text": ""}),
    at("response.output_text.delta", 1, item_id="msg_1", content_index=0, delta="Looking 北"),
    # Two calls grow at once, and the text goes on between them.
    at("response.output_item.added", 3, item={**SPAWN, "arguments": "", "status": "in_progress"}),
    at("response.output_item.added", 2, item={**WEATHER, "arguments": "", "status": "in_progress"}),
    at("response.function_call_arguments.delta", 2, item_id="fc_1", delta='{"city"'),
    at("response.function_call_arguments.delta", 3, item_id="fc_2", delta="{"),
    at("response.output_text.delta", 1, item_id="msg_1", content_index=0, delta="京🌍."),
    at("response.function_call_arguments.delta", 2, item_id="fc_1", delta=':"Rome"}'),
    at("response.function_call_arguments.delta", 3, item_id="fc_2", delta="}"),
    at("response.output_text.done", 1, item_id="msg_1", content_index=0, text="Looking 北京🌍."),
    at("response.function_call_arguments.done", 2, item_id="fc_1", arguments='{"city":"Rome"}'),
    at("response.output_item.done", 1, item=MESSAGE),
    at("response.output_item.done", 2, item=WEATHER),
    at("response.output_item.done", 3, item=SPAWN),
    {"type": "response.completed", "response": WHOLE},
)
CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Rome"}'}},
    {"id": "call_2", "type": "function", "function": {"name": "multi_agent_v1__spawn_agent", "arguments": "{}"}},
]
SAID = Choice(
    0,
    "Looking 北京🌍.",
    "tool_calls",
    message={
        "role": "assistant",
        "content": "Looking 北京🌍.",
        "reasoning_content": "Think.",
        "tool_calls": CALLS,
    },
)


@pytest.mark.parametrize("named", [True, False])
def test_a_whole_stream(named: bool) -> None:
    said = read("responses", sse(*STREAM, named=named) + b"data: [DONE]\n\n", stream=True)
    assert said.choices() == (SAID,)
    assert (said.id, said.model, said.usage, said.error) == ("resp_1", "gpt-x", Usage(26, 9), None)
    assert said.finished
    assert said.reply is not None
    assert json.loads(said.reply) == WHOLE


def test_a_whole_body() -> None:
    data = json.dumps(WHOLE).encode()
    said = read("responses", data, stream=False)
    assert said.choices() == (SAID,)
    assert (said.id, said.model, said.usage, said.reply, said.finished) == ("resp_1", "gpt-x", Usage(26, 9), data, True)


def test_only_the_end_ends_a_stream() -> None:
    said = reader("responses")
    (*others, last) = Events().feed(sse(*STREAM))
    assert [said.event(event) for event in others] == [False] * len(others)
    assert not said.finished
    assert said.reply is None
    assert said.choices()[0].finish_reason is None
    assert said.event(last)
    assert said.finished


def test_letters_cut_in_the_middle() -> None:
    """case 6"""
    data = sse(*STREAM).replace(b"\n", b"\r\n")
    events, said = Events(), reader("responses")
    for place in range(len(data)):
        for event in events.feed(data[place : place + 1]):
            said.event(event)
    assert said.choices() == read("responses", data, stream=True).choices() == (SAID,)


def test_a_stream_cut_between_interleaved_calls() -> None:
    said = read("responses", sse(*STREAM[:14]), stream=True)
    (choice,) = said.choices()
    assert (choice.text, choice.finish_reason, said.finished) == ("Looking 北京🌍.", None, False)
    assert [call["function"] for call in choice.message["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city"'},
        {"name": "multi_agent_v1__spawn_agent", "arguments": "{"},
    ]


@settings(deadline=None)
@given(st.integers(0, len(sse(*STREAM))))
def test_a_stream_cut_anywhere(place: int) -> None:
    said = read("responses", sse(*STREAM)[:place], stream=True)
    (text,) = [choice.text for choice in said.choices()] or [""]
    assert "Looking 北京🌍.".startswith(text)
    assert said.finished == (said.reply is not None)


def test_an_end_without_output_is_what_came_before() -> None:
    bare = {"type": "response.completed", "response": {"id": "resp_1", "output": [], "usage": USAGE}}
    said = read("responses", sse(*STREAM[:-1], bare), stream=True)
    assert said.choices() == (SAID,)
    assert json.loads(said.reply or b"")["output"] == [REASONING, MESSAGE, WEATHER, SPAWN]


@pytest.mark.parametrize(
    ("reason", "finish"), [("max_output_tokens", "length"), ("content_filter", "content_filter"), (None, "length")]
)
def test_an_incomplete_answer(reason: str | None, finish: str) -> None:
    response = {**WHOLE, "status": "incomplete", "output": [MESSAGE], "incomplete_details": {"reason": reason}}
    said = read("responses", sse({"type": "response.incomplete", "response": response}), stream=True)
    assert said.finished
    assert said.choices() == (Choice(0, "Looking 北京🌍.", finish),)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "error", "code": "x", "message": "overloaded", "param": None},
        {"type": "error", "error": {"message": "overloaded"}},
        {
            "type": "response.failed",
            "response": {"id": "r", "error": {"code": "server_error", "message": "overloaded"}},
        },
    ],
)
def test_an_error_ends_a_stream(event: dict[str, Any]) -> None:
    said = reader("responses")
    (*others, last) = Events().feed(sse(*STREAM[:9], event))
    assert not any(said.event(each) for each in others)
    assert said.event(last)
    assert (said.error, said.finished, said.choices()[0].text) == ("overloaded", False, "Looking 北")


def test_a_refusal_and_a_custom_tool() -> None:
    refusal = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    patch = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"}
    (choice,) = read("responses", json.dumps({"output": [refusal, patch]}).encode(), stream=False).choices()
    assert choice.message == {
        "role": "assistant",
        "content": None,
        "refusal": "No.",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "apply_patch", "arguments": '{"input":"*** Begin"}'}}
        ],
    }


@pytest.mark.parametrize("data", [b"", b"[]", b"nonsense", b'{"error":{"message":"bad"}}', b"[" * 5000, b'"\xff"'])
def test_a_body_that_is_no_response(data: bytes) -> None:
    said = read("responses", data, stream=False)
    assert (said.choices(), said.finished, said.reply) == ((), False, None)
    assert said.error == ("bad" if b"bad" in data else None)


KINDS = st.sampled_from([event["type"] for event in STREAM] + ["error", "response.failed", "response.incomplete", "x"])


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(KINDS, JSON), max_size=4))
def test_strange_events_never_raise(events: list[tuple[str, Any]]) -> None:
    said = reader("responses")
    for kind, value in events:
        fields = value if isinstance(value, dict) else {"response": value}
        for event in Events().feed(sse({**fields, "type": kind})):
            said.event(event)
    said.choices()


@settings(deadline=None)
@given(JSON)
def test_strange_bodies_never_raise(value: Any) -> None:
    read("responses", json.dumps(value).encode(), stream=False).choices()


@asynccontextmanager
async def client(engine: Any) -> AsyncIterator[AsyncOpenAI]:
    """The provider's own client against a translated engine, over real HTTP."""

    async def respond(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        stream = json.loads(body).get("stream") is True
        made = Translation(Ask(RECEIPT, "r0", "responses", body, stream), [])
        response = web.StreamResponse()
        async with aclosing(made.answer(engine.answer(made.ask))) as items:
            async for item in items:
                if isinstance(item, Head):
                    response = web.StreamResponse(status=item.status, headers=dict(item.headers))
                    await response.prepare(request)
                elif isinstance(item, Piece):
                    await response.write(item.data)
        await response.write_eof()
        return response

    app = web.Application()
    app.router.add_post("/v1/responses", respond)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with AsyncOpenAI(api_key="x", base_url=f"http://127.0.0.1:{port}/v1", max_retries=0) as made:
            yield made
    finally:
        await runner.cleanup()


async def test_the_client_reads_text() -> None:
    async with client(FakeEngine(reply=lambda release, body: "one two")) as openai:
        whole = await openai.responses.create(model="m", input="Hi")
        assert (whole.output_text, whole.status, whole.id) == ("one two", "completed", f"resp_{RECEIPT}")
        assert whole.usage is not None
        assert whole.usage.output_tokens == 2
        words = ""
        async for event in await openai.responses.create(model="m", input="Hi", stream=True):
            words += event.delta if event.type == "response.output_text.delta" else ""
        assert words == "one two"
        async with openai.responses.stream(model="m", input="Hi") as stream:
            snapshots = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert snapshots == ["one", "one two"]
        assert final.output_text == "one two"


async def test_the_client_reads_calls() -> None:
    async with client(Script(*TALK)) as openai:
        tools: Any = TOOLS
        async with openai.responses.stream(model="m", input="Hi", tools=tools) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
        assert [item.type for item in final.output] == [
            "reasoning",
            "message",
            "function_call",
            "function_call",
            "custom_tool_call",
        ]
        spawn, function = final.output[2], final.output[3]
        assert spawn.type == function.type == "function_call"
        assert (spawn.name, spawn.namespace, spawn.call_id, spawn.arguments) == (
            "spawn_agent",
            "multi_agent_v1",
            "c1",
            '{"a":1}',
        )
        assert function.parsed_arguments == {"y": 2}
        assert final.output_text == "Two calls."


async def test_the_client_sees_errors() -> None:
    engine = FakeEngine()
    engine.faults.append(Fault("status", status=429))
    async with client(engine) as openai:
        with pytest.raises(APIError, match="status 429"):
            await openai.responses.create(model="m", input="Hi")
    async with client(Script(chunk(content="Ha"), b'data: {"error":{"message":"overloaded"}}\n\n')) as openai:
        events = [event async for event in await openai.responses.create(model="m", input="Hi", stream=True)]
        last = events[-1]
        assert last.type == "response.failed"
        assert last.response.error is not None
        assert last.response.error.message == "overloaded"


AGENT = {
    "model": "reef-model",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You are an agent."}]},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "<context/>"}, {"type": "input_text", "text": "Write a file."}],
        },
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"type": "function_call", "name": "exec_command", "arguments": '{"cmd":"ls"}', "call_id": "call_a"},
        {"type": "function_call_output", "call_id": "call_a", "output": "Exit code: 0"},
        {
            "type": "function_call",
            "name": "spawn_agent",
            "namespace": "multi_agent_v1",
            "arguments": "{}",
            "call_id": "b",
        },
        {"type": "function_call_output", "call_id": "b", "output": "agent 1"},
    ],
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs a command.",
            "strict": False,
            "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
        },
        AGENTS,
        {"type": "web_search", "external_web_access": True},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": None,
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0197",
    "client_metadata": {"x-codex-installation-id": "1"},
}


async def test_an_agents_request_and_its_answer() -> None:
    engine = FakeEngine(reply=lambda release, body: "Done.")
    made = translate(Ask(RECEIPT, "r0", "responses", json.dumps(AGENT).encode(), True))
    body = json.loads(made.ask.body)
    assert set(body) == {"model", "messages", "tools", "tool_choice", "parallel_tool_calls", "stream", "stream_options"}
    assert [message["role"] for message in body["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
    ]
    assert body["messages"][4]["tool_calls"][0]["function"]["name"] == "multi_agent_v1__spawn_agent"
    assert len(body["tools"]) == 3
    pieces = [item async for item in made.answer(engine.answer(made.ask)) if isinstance(item, Piece)]
    final = told(pieces)[-1]["response"]
    assert (final["tools"], final["store"], final["parallel_tool_calls"]) == (AGENT["tools"], False, False)
    assert final["prompt_cache_key"] == "0197"
    assert final["output"][0]["content"][0]["text"] == "Done."
