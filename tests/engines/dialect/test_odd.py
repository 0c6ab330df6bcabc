"""Chat servers that write odd streams, read in every dialect and translated: nothing of an answer is lost."""

import json

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.core.errors import InputError
from reef.engines import Ask
from reef.engines.dialect import read, translate
from reef.engines.dialect.value import mend

from . import responding
from .script import RECEIPT, answered, asking, call, chunk, completion, events_of, streaming, whole

SMILE = [chunk(role="assistant", content="smile \ud83d"), chunk(content="\ude00!"), chunk("stop")]
KINDS = {"content": "text", "reasoning_content": "thinking"}


def units(words):
    """A text as its escapes: a character beyond the first 65,536 is two of them."""
    return [chr(code) for code in memoryview(words.encode("utf-16-le", "surrogatepass")).cast("H")]


async def in_messages(*chunks, **body):
    _, pieces, answer = await answered(streaming(*chunks), asking(stream=True, **body))
    return events_of(pieces), orjson.loads(answer.reply)


async def in_responses(*chunks, **body):
    events = [b"data: " + json.dumps(each).encode() + b"\n\n" for each in chunks]
    _, pieces, answer = await responding.run(responding.Script(*events, b"data: [DONE]\n\n"), **body)
    return responding.told(pieces), orjson.loads(answer.reply), answer


async def test_a_smile_in_two_chunks_is_whole_in_messages():
    """case 6"""
    events, message = await in_messages(*SMILE)
    assert "".join(each["delta"]["text"] for each in events if each["type"] == "content_block_delta") == "smile 😀!"
    assert message["content"] == [{"type": "text", "text": "smile 😀!"}]


async def test_a_smile_in_two_chunks_is_whole_in_responses():
    """case 6"""
    events, reply, answer = await in_responses(*SMILE)
    assert "".join(each["delta"] for each in events if each["type"].endswith("text.delta")) == "smile 😀!"
    assert reply["output"][0]["content"][0]["text"] == "smile 😀!"
    assert answer.choices[0].text == "smile 😀!"


@settings(deadline=None)
@given(
    st.text(st.sampled_from("ab😀🌍\ud83d\ude00"), min_size=1, max_size=6),
    st.sampled_from(["content", "reasoning_content", "refusal", "tool_calls"]),
    st.lists(st.sampled_from(["content", "reasoning_content", None, None]), max_size=12),
)
async def test_texts_cut_between_escapes(words, field, others):
    """case 6: whatever is said in between, each kind of text is whole in the end and every event is JSON."""
    chunks, others = [], iter(others)
    for unit in units(words):
        chunks.append(chunk(**{field: [call(0, unit, "f", "c")] if field == "tool_calls" else unit}))
        if (other := next(others, None)) and other != field:
            chunks.append(chunk(**{other: "-"}))
    chunks.append(chunk("stop"))
    events, message = await in_messages(*chunks)
    for event in events:
        orjson.loads(orjson.dumps(event))
    said = "".join(
        text for each in events for name, text in each.get("delta", {}).items() if name in ("text", "thinking")
    )
    assert said == "".join(each.get("text", each.get("thinking", "")) for each in message["content"])
    events, reply, answer = await in_responses(*chunks)
    text = "".join(each["delta"] for each in events if each["type"].endswith("output_text.delta"))
    parts = [part for item in reply["output"] for part in item.get("content", ())]
    assert text == "".join(part.get("text", "") for part in parts)
    if field == "content" and len(chunks) == len(units(words)) + 1:
        assert said == text == mend(words)
    assert orjson.dumps([answer.choices[0].text, answer.choices[0].message])


@pytest.mark.parametrize("odd", [{"content": "a\ud83d"}, {"content": "a", "reasoning_content": "\ude00"}])
@pytest.mark.parametrize("created", ["1", "NaN", "9" * 30, "-Infinity", "9" * 5000])
async def test_odd_whole_answers_are_translated(odd, created):
    """case 13: a half of a character or an odd number in a whole answer costs only itself."""
    body = json.dumps(completion(**odd)).replace('"chatcmpl-1"', f'"chatcmpl-1", "created": {created}').encode()
    head, pieces, _ = await answered(whole(body), asking())
    message = orjson.loads(b"".join(piece.data for piece in pieces))
    assert (head.status, message["content"][-1]["text"]) == (200, odd["content"].replace("\ud83d", "\ufffd"))
    _, pieces, answer = await responding.run(responding.Script(body, stream=False), stream=False)
    reply = orjson.loads(pieces[0].data)
    assert reply["output"][-1]["content"][0]["text"] == odd["content"].replace("\ud83d", "\ufffd")
    assert orjson.dumps([answer.choices[0].text, answer.choices[0].message])


def body_of(dialect, words):
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": words}]}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": words}]}
    return {
        "chat": {"choices": [{"message": {"content": words, "refusal": words}, "finish_reason": "stop"}]},
        "responses": {"object": "response", "output": [thought, message]},
        "messages": {
            "content": [{"type": "thinking", "thinking": words}, {"type": "text", "text": words}],
            "stop_reason": "end_turn",
        },
    }[dialect] | {"id": f"id{words}", "model": f"m{words}"}


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
@pytest.mark.parametrize("words", ["x\ud83d", "\ude00 y", "\ud83d\ude00"])
def test_readers_give_no_half_characters(dialect, words):
    """case 13: what a record keeps of an answer can be written by everybody."""
    said = read(dialect, json.dumps(body_of(dialect, words)).encode(), stream=False)
    right = words.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    assert said.finished
    assert (said.model, said.id) == (f"m{right}", f"id{right}")
    assert said.choices()[0].text == right
    assert right in orjson.dumps(said.choices()[0].message).decode()
    if said.reply is not None:
        assert orjson.loads(said.reply)


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
@pytest.mark.parametrize("count", [-5, 10**30, 2**64, 1.5, "3", True])
def test_counts_that_nobody_can_keep_are_left_out(dialect, count):
    counts = {"prompt_tokens": count, "input_tokens": count, "completion_tokens": 2, "output_tokens": 2}
    said = read(dialect, json.dumps(body_of(dialect, "x") | {"usage": counts}).encode(), stream=False)
    assert (said.finished, said.usage) == (True, None)


LATE = [
    chunk(tool_calls=[call(1, '{"b"')]),
    chunk(tool_calls=[call(0, '{"a":')]),
    chunk(tool_calls=[{"index": 1, "id": "call_b", "type": "function", "function": {"name": "fb"}}]),
    chunk(tool_calls=[call(0, "1}", "fa", "call_a")]),
    chunk(tool_calls=[call(1, ":2}")]),
    chunk("tool_calls"),
]
WHOLE_FIRST = [
    chunk(tool_calls=[call(0, '{"a":1}')]),
    chunk(tool_calls=[call(1, '{"b":2}')]),
    chunk(tool_calls=[call(0, "", "fa", "call_a")]),
    chunk(tool_calls=[call(1, "", "fb", "call_b")]),
    chunk("tool_calls"),
]
CALLS = {("fa", "call_a", '{"a":1}'), ("fb", "call_b", '{"b":2}')}


@pytest.mark.parametrize("chunks", [LATE, WHOLE_FIRST])
async def test_a_call_named_behind_its_arguments(chunks):
    """case 5: names and ids that come last are those that the client gets."""
    events, reply, answer = await in_responses(*chunks)
    done = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    added = [each["item"] for each in events if each["type"] == "response.output_item.added"]
    assert {(item["name"], item["call_id"], item["arguments"]) for item in done} == CALLS
    assert {(item["name"], item["call_id"]) for item in added} == {found[:2] for found in CALLS}
    assert reply["output"] == done
    events, message = await in_messages(*chunks)
    begun = [each["content_block"] for each in events if each["type"] == "content_block_start"]
    assert {(block["name"], block["id"]) for block in begun} == {found[:2] for found in CALLS}
    assert {
        (each["name"], each["id"], json.dumps(each["input"]).replace(" ", "")) for each in message["content"]
    } == CALLS
    calls = answer.choices[0].message["tool_calls"]
    assert {(each["function"]["name"], each["id"], each["function"]["arguments"]) for each in calls} == CALLS


async def test_calls_that_are_all_number_0_in_messages():
    """case 5: another id begins another call."""
    chunks = [chunk(tool_calls=[call(0, '{"a":1}', "fa", "c1")]), chunk(tool_calls=[call(0, '{"b":2}', "fb", "c2")])]
    _, message = await in_messages(*chunks, chunk("tool_calls"))
    assert [(each["id"], each["name"], each["input"]) for each in message["content"]] == [
        ("c1", "fa", {"a": 1}),
        ("c2", "fb", {"b": 2}),
    ]


def nested(levels):
    value = 1
    for _ in range(levels):
        value = {"a": value}
    return value


CALL = {"type": "function_call", "name": "f", "call_id": "c"}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": nested(260)}]}
TOOL = {"name": "f", "input_schema": {"a": nested(260)}}


@pytest.mark.parametrize(
    ("dialect", "fields", "param"),
    [
        ("responses", {"input": "x", "metadata": nested(260)}, "metadata"),
        ("responses", {"input": "x", "metadata": nested(252)}, "metadata"),
        ("responses", {"input": "x", "unknown": nested(300)}, "unknown"),
        ("responses", {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": nested(260)}]}, "tools"),
        ("responses", {"input": [{**CALL, "arguments": nested(260)}]}, "input[0].arguments"),
        ("messages", {"messages": [USE]}, "messages[0].content[0].input"),
        ("messages", {"tools": [TOOL]}, "tools"),
        ("messages", {"output_config": {"format": {"type": "json_schema", "schema": nested(260)}}}, "output_config"),
    ],
)
def test_what_nobody_can_write_is_refused(dialect, fields, param):
    """Deep nesting is the client's error, and it is told where."""
    body = (
        {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]} if dialect == "messages" else {}
    )
    with pytest.raises(InputError, match="levels deep") as caught:
        translate(Ask(RECEIPT, "r0", dialect, json.dumps(body | fields).encode(), False))
    assert caught.value.param == param


@pytest.mark.parametrize("levels", [100, 190])
async def test_what_is_nested_less_passes(levels):
    engine = responding.Script(*responding.TALK)
    _, pieces, _ = await responding.run(engine, metadata=nested(levels))
    assert responding.told(pieces)[-1]["response"]["metadata"] == nested(levels)
