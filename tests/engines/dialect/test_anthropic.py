"""The provider's own Python client reads what is made out of chat: whole answers, streams, tools, errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from reef.engines import Ask, Engine, Head, Piece
from reef.engines.dialect import translate
from reef.engines.fake import FakeEngine, Fault
from tests.engines.dialect.script import RECEIPT, call, chunk, completion, streaming, usage, whole

anthropic = pytest.importorskip("anthropic")

TOOL = {"name": "get_weather", "description": "Weather", "input_schema": {"type": "object", "properties": {"city": {}}}}
QUESTION: dict[str, Any] = {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": "Hi"}]}


@asynccontextmanager
async def client_of(engine: Any) -> AsyncIterator[Any]:
    """The client, and a server that answers it with an engine that speaks chat only."""

    async def handle(request: web.Request) -> web.StreamResponse:
        dialect = "count_tokens" if request.path.endswith("count_tokens") else "messages"
        data = await request.read()
        made = translate(Ask(RECEIPT, "base", dialect, data, json.loads(data).get("stream") is True))
        response = web.StreamResponse()
        async for item in made.answer(engine.answer(made.ask)):
            if isinstance(item, Head):
                response = web.StreamResponse(status=item.status, headers=dict(item.headers))
                await response.prepare(request)
            elif isinstance(item, Piece):
                await response.write(item.data)
        return response

    app = web.Application()
    app.router.add_post("/v1/messages", handle)
    app.router.add_post("/v1/messages/count_tokens", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    client = anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0)
    try:
        yield client
    finally:
        await client.close()
        await runner.cleanup()


def fake() -> Engine:
    return FakeEngine(model="fake-model")


async def test_text_at_once() -> None:
    async with client_of(fake()) as client:
        message = await client.messages.create(**QUESTION, system="Be brief.")
    assert (message.id, message.model, message.role) == (f"msg_{RECEIPT}", "fake-model", "assistant")
    assert [(block.type, block.text) for block in message.content] == [("text", "base heard: Hi")]
    assert (message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == ("end_turn", 3, 3)


async def test_text_in_a_stream() -> None:
    async with client_of(fake()) as client, client.messages.stream(**QUESTION) as stream:
        words = [text async for text in stream.text_stream]
        message = await stream.get_final_message()
    assert words == ["base", " heard:", " Hi"]
    assert message.content[0].text == "base heard: Hi"
    assert (message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == ("end_turn", 1, 3)


@pytest.mark.parametrize("stream", [True, False])
async def test_thinking_and_two_tools(stream: bool) -> None:
    calls = [call(0, '{"city": "Bern"}', "get_weather", "call_a"), call(1, '{"city": "Rome"}', "get_weather", "call_b")]
    chunks = [chunk(reasoning_content="Hm."), chunk(content="I look.")]
    chunks += [chunk(tool_calls=[each]) for each in calls]
    engine = (
        streaming(*chunks, chunk("tool_calls"), usage(20, 9))
        if stream
        else whole(completion("tool_calls", reasoning_content="Hm.", content="I look.", tool_calls=calls))
    )
    async with client_of(engine) as client:
        if stream:
            async with client.messages.stream(**QUESTION, tools=[TOOL]) as events:
                message = await events.get_final_message()
        else:
            message = await client.messages.create(**QUESTION, tools=[TOOL])
    thinking, text, *tools = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Hm.")
    assert (text.type, text.text) == ("text", "I look.")
    assert [(each.type, each.id, each.name, each.input) for each in tools] == [
        ("tool_use", "call_a", "get_weather", {"city": "Bern"}),
        ("tool_use", "call_b", "get_weather", {"city": "Rome"}),
    ]
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens == (9 if stream else 3)
    # What the client sends back is said in chat again.
    results = [{"type": "tool_result", "tool_use_id": each.id, "content": "12 °C"} for each in tools]
    spoken = FakeEngine(reply=lambda _, body: body["messages"][-1]["content"])
    async with client_of(spoken) as client:
        turn = [*QUESTION["messages"], {"role": "assistant", "content": message.content}]
        turn.append({"role": "user", "content": results})
        final = await client.messages.create(**QUESTION | {"messages": turn}, tools=[TOOL])
    assert final.content[0].text == "12 °C"
    _, assistant, *answers = json.loads(spoken.asked[0].body)["messages"]
    assert [each["function"]["arguments"] for each in assistant["tool_calls"]] == ['{"city":"Bern"}', '{"city":"Rome"}']
    assert (assistant["content"], assistant["reasoning_content"]) == ("I look.", "Hm.")
    assert [each["tool_call_id"] for each in answers] == ["call_a", "call_b"]


async def test_errors_are_of_the_clients_own_classes() -> None:
    engine = FakeEngine()
    engine.faults.extend([Fault("status", status=429), Fault("status", status=400)])
    async with client_of(engine) as client:
        with pytest.raises(anthropic.RateLimitError) as limited:
            await client.messages.create(**QUESTION)
        assert limited.value.body["error"] == {"type": "rate_limit_error", "message": "status 429"}
        with pytest.raises(anthropic.BadRequestError, match="status 400"):
            await client.messages.create(**QUESTION, stream=True)


async def test_an_error_in_a_stream_is_raised() -> None:
    async with client_of(streaming(chunk(content="a"), end='{"error":{"message":"worn out"}}')) as client:
        with pytest.raises(anthropic.APIStatusError, match="worn out"):
            async for _ in await client.messages.create(**QUESTION, stream=True):
                pass


async def test_counting() -> None:
    async with client_of(fake()) as client:
        count = await client.messages.count_tokens(model="m", messages=QUESTION["messages"], system="Be brief.")
    assert count.input_tokens == 3
