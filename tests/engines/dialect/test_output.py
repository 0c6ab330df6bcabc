"""Chat answers said as Responses: items and events in the order that clients need."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from reef.core.errors import EngineError
from reef.core.nouns import Choice, Usage
from reef.engines import Answer, Piece
from reef.engines.dialect import read, translate
from reef.engines.fake import FakeEngine, Fault
from reef.engines.sse import Events
from tests.engines.dialect.responding import (
    COUNTS,
    END,
    JSON,
    RECEIPT,
    TALK,
    TOOLS,
    Script,
    ask,
    chunk,
    made_call,
    messages,
    piece,
    run,
    told,
    user,
)


def lines(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


async def test_text_in_the_order_clients_expect() -> None:
    head, pieces, answer = await run(FakeEngine(reply=lambda release, body: "one two"), instructions="Be brief.")
    assert head.headers["content-type"].startswith("text/event-stream")
    events = told(pieces)
    assert lines(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [piece.terminal for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert [event.name for event in Events().feed(pieces[-1].data)] == ["response.completed"]
    final = events[-1]["response"]
    assert final["id"] == f"resp_{RECEIPT}"
    assert final["output"][0]["id"] == f"msg_{RECEIPT}_0"
    assert final["output"][0]["content"][0]["text"] == "one two"
    assert final["usage"]["total_tokens"] == 3 + 2
    assert (final["status"], final["model"], final["instructions"]) == ("completed", "fake", "Be brief.")
    assert answer is not None
    (choice,) = answer.choices or ()
    assert (choice.text, len(choice.output_ids or ()), choice.finish_reason) == ("one two", 2, "stop")
    assert answer.prompt_ids
    assert json.loads(answer.reply or b"") == final
    assert answer.id == final["id"]


async def test_a_whole_answer_says_what_the_stream_says() -> None:
    engine = FakeEngine(reply=lambda release, body: "one two")
    _, streamed, _ = await run(engine)
    head, whole, answer = await run(engine, stream=False)
    assert head.headers["content-type"] == "application/json"
    assert [piece.terminal for piece in whole] == [True]
    final = told(streamed)[-1]["response"]
    body = json.loads(whole[0].data)
    same = {key for key in body if key not in ("created_at", "completed_at")}
    assert {key: body[key] for key in same} == {key: final[key] for key in same}
    assert answer is not None
    assert answer.reply == whole[0].data
    Response.model_validate(body, strict=True)


async def test_reasoning_text_and_interleaved_calls() -> None:
    """case 5: fragments of two calls in turns, a name in two pieces. case 3: one index twice in a chunk."""
    _, pieces, answer = await run(Script(*TALK), tools=TOOLS)
    events = told(pieces)
    items: list[str] = []
    for event in events:  # one item is open at a time
        if event["type"] == "response.output_item.added":
            assert len(items) == event["output_index"]
            items.append("open")
        elif event["type"] == "response.output_item.done":
            assert items[event["output_index"]] == "open"
            items[event["output_index"]] = "done"
        assert items.count("open") <= 1
        if "item_id" in event:
            assert items[event["output_index"]] == "open"
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "custom_tool_call",
    ]
    assert output[0] == {
        "id": f"rs_{RECEIPT}_0",
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "Let me see."}],
    }
    assert output[2] == {
        "id": f"fc_{RECEIPT}_2",
        "type": "function_call",
        "status": "completed",
        "call_id": "c1",
        "name": "spawn_agent",
        "namespace": "multi_agent_v1",
        "arguments": '{"a":1}',
    }
    assert (output[3]["name"], output[3]["arguments"]) == ("f", '{"y":2}')
    assert (output[4]["name"], output[4]["input"]) == ("apply_patch", "*** Begin\n")
    for index in (2, 3):
        deltas = [
            each["delta"]
            for each in events
            if each["type"].endswith("arguments.delta") and each["output_index"] == index
        ]
        assert "".join(deltas) == output[index]["arguments"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output
    assert events[-1]["response"]["usage"] == {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 18,
    }
    assert answer is not None
    (choice,) = answer.choices or ()
    assert (choice.text, choice.finish_reason, answer.usage, answer.model) == (
        "Two calls.",
        "tool_calls",
        Usage(11, 7),
        "real",
    )
    assert [call["function"]["name"] for call in choice.message["tool_calls"]] == [
        "multi_agent_v1__spawn_agent",
        "f",
        "apply_patch",
    ]
    # What was written reads as what the engine said.
    assert read("responses", b"".join(piece.data for piece in pieces), stream=True).choices() == (
        Choice(
            0,
            choice.text,
            choice.finish_reason,
            message={
                **choice.message,
                "tool_calls": [{**call, "function": {**call["function"]}} for call in choice.message["tool_calls"]],
            },
        ),
    )


async def test_a_byte_at_a_time_is_the_same() -> None:
    data = b"".join(TALK)
    _, once, _ = await run(Script(data), tools=TOOLS)
    _, slowly, _ = await run(
        Script(*(data[place : place + 1] for place in range(len(data) - 1)), data[-1:]), tools=TOOLS
    )

    def plain(pieces: list[Piece]) -> list[dict[str, Any]]:
        return [{key: value for key, value in event.items() if key != "response"} for event in told(pieces)]

    assert plain(once) == plain(slowly)


async def test_the_answer_sent_back_is_the_same_conversation() -> None:
    _, pieces, _ = await run(Script(*TALK), tools=TOOLS)
    output = told(pieces)[-1]["response"]["output"]
    results = [
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": "2"},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": "3"},
    ]
    for said in (
        messages(user("Hi"), *output, *results, tools=TOOLS),
        messages(*results, earlier=[user("Hi"), *output]),
    ):
        assert [message["role"] for message in said] == ["user", "assistant", "tool", "tool", "tool"]
        assert said[1] == {
            "role": "assistant",
            "content": "Two calls.",
            "reasoning_content": "Let me see.",
            "tool_calls": [
                made_call("multi_agent_v1__spawn_agent", "c1", '{"a":1}'),
                made_call("f", "c2", '{"y":2}'),
                made_call("apply_patch", "c3", '{"input":"*** Begin\\n"}'),
            ],
        }


async def test_text_after_a_call_and_a_call_without_arguments() -> None:
    engine = Script(
        chunk(tool_calls=[piece(0, "{}", "f")]),
        chunk(content="and"),
        chunk(tool_calls=[piece(1, "", "f")]),
        chunk(content="last"),
        chunk(finish="tool_calls"),
        *END,
    )
    output = told((await run(engine, tools=TOOLS))[1])[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["function_call", "message", "function_call", "message"]
    assert [output[0]["arguments"], output[2]["arguments"]] == ["{}", "{}"]
    assert len({output[0]["call_id"], output[2]["call_id"]}) == 2
    assert [output[1]["content"][0]["text"], output[3]["content"][0]["text"]] == ["and", "last"]


async def test_every_call_numbered_0() -> None:
    engine = Script(
        chunk(tool_calls=[piece(0, '{"a":1}', "f", "c1")]),
        chunk(tool_calls=[piece(0, '{"a":2}', "f", "c2")]),
        chunk(finish="tool_calls"),
        *END,
    )
    output = told((await run(engine, tools=TOOLS))[1])[-1]["response"]["output"]
    assert [(item["call_id"], item["arguments"]) for item in output] == [("c1", '{"a":1}'), ("c2", '{"a":2}')]


async def test_a_brace_that_ends_no_call() -> None:
    engine = Script(
        chunk(tool_calls=[piece(0, '{"a":{"b":1}', "f", "c1")]),
        chunk(tool_calls=[piece(1, "{}", "f", "c2")]),
        chunk(tool_calls=[piece(0, "}")]),
        chunk(finish="tool_calls"),
        *END,
    )
    events = told((await run(engine, tools=TOOLS))[1])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["arguments"] for item in done] == ['{"a":{"b":1}}', "{}"]


async def test_calls_with_one_id_get_two() -> None:
    calls = [piece(0, "{}", "f", "same"), piece(1, "{}", "f", "same")]
    engine = Script(chunk(tool_calls=calls), chunk(finish="tool_calls"), *END)
    output = told((await run(engine, tools=TOOLS))[1])[-1]["response"]["output"]
    assert [item["call_id"] for item in output] == ["same", f"call_{RECEIPT}_1"]


async def test_tokens_stay_and_calls_are_added() -> None:
    drawn = Choice(0, "Hm.", "tool_calls", output_ids=(1, 2), logprobs=(-0.5, -0.25))
    engine = Script(chunk(content="Hm.", tool_calls=[piece(0, "{}", "f", "c1")]), chunk(finish="tool_calls"), *END)
    engine.answered = Answer((drawn,), prompt_ids=(7,))
    _, _, answer = await run(engine, tools=TOOLS)
    assert answer is not None
    message = {"role": "assistant", "content": "Hm.", "tool_calls": [made_call("f", "c1")]}
    assert (answer.choices, answer.prompt_ids) == ((replace(drawn, message=message),), (7,))


@pytest.mark.parametrize(("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
async def test_a_cut_answer_is_incomplete(finish: str, reason: str) -> None:
    _, pieces, _ = await run(Script(chunk(content="Half"), chunk(finish=finish), *END), max_output_tokens=1)
    last = told(pieces)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": reason}
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert last["response"]["max_output_tokens"] == 1
    assert read("responses", pieces[-1].data, stream=True).choices() == (Choice(0, "Half", finish),)


async def test_a_refusal() -> None:
    events = told((await run(Script(chunk(refusal="I "), chunk(refusal="can't."), chunk(finish="stop"), *END)))[1])
    assert events[-1]["response"]["output"][0]["content"] == [{"type": "refusal", "refusal": "I can't."}]
    assert "refusal.done" in lines(events)


async def test_logprobs_beside_and_after_their_text() -> None:
    """case 12: log-probs in a later chunk than their text; those of reasoning are nobody's."""

    def scored(token: str) -> dict[str, Any]:
        return {"content": [{"token": token, "logprob": -0.5, "bytes": None, "top_logprobs": []}]}

    engine = Script(
        chunk(reasoning_content="hm", logprobs=scored("hm")),
        chunk(content="a", logprobs=scored("a")),
        chunk(content="b"),
        chunk(logprobs=scored("b")),
        chunk(finish="stop"),
        *END,
    )
    part = told((await run(engine))[1])[-1]["response"]["output"][1]["content"][0]
    assert (part["text"], [each["token"] for each in part["logprobs"]]) == ("ab", ["a", "b"])


async def test_an_empty_answer_has_a_message() -> None:
    events = told((await run(Script(chunk(role="assistant", content=""), chunk(finish="stop"), *END)))[1])
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


async def test_a_refused_request_passes_as_it_is() -> None:
    engine = FakeEngine()
    engine.faults.append(Fault("status", status=429))
    head, pieces, answer = await run(engine)
    assert (head.status, head.headers["retry-after"]) == (429, "30")
    assert json.loads(pieces[0].data)["error"]["message"] == "status 429"
    assert answer is not None
    assert (answer.untrainable, answer.reply, answer.id) == ("refused", None, None)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_in_the_stream_is_a_failed_response(stream: bool) -> None:
    error = b'data: {"error":{"message":"overloaded","code":"rate_limit_exceeded"}}\n\n'
    _, pieces, answer = await run(Script(chunk(content="Ha"), error, error="overloaded"), stream=stream)
    last = told(pieces)[-1]["response"] if stream else json.loads(pieces[-1].data)
    assert (last["status"], last["error"]) == ("failed", {"code": "rate_limit_exceeded", "message": "overloaded"})
    assert last["output"][0]["content"][0]["text"] == "Ha"
    assert [piece.terminal for piece in pieces][-1:] == [True]
    assert answer is not None
    assert answer.error == "overloaded"


async def test_a_stream_without_its_end_gets_none() -> None:
    engine = FakeEngine()
    engine.faults.append(Fault("short"))
    _, pieces, answer = await run(engine)
    assert not any(piece.terminal for piece in pieces)
    assert "completed" not in lines(told(pieces))
    assert answer is not None
    assert answer.reply is None


@pytest.mark.parametrize("pieces", [(chunk(content="Ha"), b"data: [DONE]\n\n"), (b"data: [DONE]\n\n",)])
async def test_a_stream_without_a_finish_reason_breaks_off(pieces: tuple[bytes, ...]) -> None:
    with pytest.raises(EngineError):
        await run(Script(*pieces))


async def test_what_the_engine_raises_passes() -> None:
    engine = FakeEngine()
    engine.faults += [Fault("refuse"), Fault("cut", at=1)]
    for _ in range(2):
        with pytest.raises(EngineError):
            await run(engine)
    with pytest.raises(EngineError):
        await run(Script(b"<html>", stream=False), stream=False)


async def test_closing_early_stops_the_engine() -> None:
    engine = Script(*TALK)
    made = translate(ask(True, input="Hi"))
    items = made.answer(engine.answer(made.ask))
    async for item in items:
        if isinstance(item, Piece):
            break
    await items.aclose()
    assert engine.closed


async def test_a_server_that_does_not_stream() -> None:
    message = {"role": "assistant", "content": "Hi.", "tool_calls": [made_call("f", "c1")]}
    body = {
        "model": "real",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": COUNTS,
    }
    head, pieces, _ = await run(Script(json.dumps(body).encode(), stream=False), tools=TOOLS)
    assert head.headers["content-type"].startswith("text/event-stream")
    assert [item["type"] for item in told(pieces)[-1]["response"]["output"]] == ["message", "function_call"]


PIECES = st.lists(
    st.one_of(
        st.builds(lambda text: {"content": text}, st.text(max_size=3)),
        st.builds(lambda text: {"reasoning_content": text}, st.text(max_size=3)),
        st.builds(lambda text: {"refusal": text}, st.text(max_size=3)),
        st.builds(
            lambda index, arguments: {"tool_calls": [piece(index, arguments, "f")]},
            st.integers(0, 2),
            st.sampled_from(["", "{}", '{"a"', ":1}", "x"]),
        ),
        JSON.filter(lambda value: isinstance(value, dict)),
    ),
    max_size=8,
)


@settings(deadline=None, max_examples=75)
@given(PIECES, st.sampled_from(["stop", "length", "tool_calls"]))
async def test_any_chunks_make_an_ordered_stream(deltas: list[dict[str, Any]], finish: str) -> None:
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    data = [f"data: {json.dumps(item)}\n\n".encode() for item in chunks]
    _, pieces, _ = await run(Script(*data, chunk(finish=finish), *END), tools=TOOLS)
    events = told(pieces)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    written = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert written == read("responses", pieces[-1].data, stream=True).choices()[0].text
