"""Native Messages answers, read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.core.nouns import Usage
from reef.engines.dialect import read, reader
from reef.engines.sse import Events

ID = "msg_01XFDUDYJgAACzvnptvVoYEL"


def sse(*events: dict[str, Any]) -> bytes:
    return b"".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n".encode() for each in events)


def start(**usage: Any) -> dict[str, Any]:
    message = {
        "id": ID,
        "type": "message",
        "role": "assistant",
        "model": "claude-x",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 25, "output_tokens": 1, **usage},
    }
    return {"type": "message_start", "message": message}


def begin(index: int, **block: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def delta(index: int, kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}}


def stop(index: int) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}


def end(reason: str | None = "end_turn", **usage: Any) -> list[dict[str, Any]]:
    change = {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage}
    return [change, {"type": "message_stop"}]


TURN = [
    start(cache_read_input_tokens=100, cache_creation_input_tokens=10),
    {"type": "ping"},
    begin(0, type="thinking", thinking="", signature=""),
    delta(0, "thinking_delta", thinking="I should "),
    delta(0, "thinking_delta", thinking="look 北京🌍."),
    delta(0, "signature_delta", signature="EqQBCgIYAhIM"),
    stop(0),
    begin(1, type="text", text=""),
    delta(1, "text_delta", text="Let me "),
    delta(1, "text_delta", text="look."),
    delta(1, "citations_delta", citation={"type": "char_location", "cited_text": "x"}),
    stop(1),
    begin(2, type="tool_use", id="toolu_1", name="get_weather", input={}),
    delta(2, "input_json_delta", partial_json=""),
    delta(2, "input_json_delta", partial_json='{"city": "Ber'),
    delta(2, "input_json_delta", partial_json='lin"}'),
    stop(2),
    begin(3, type="tool_use", id="toolu_2", name="now", input={}),
    stop(3),
    *end("tool_use", output_tokens=89),
]


def test_a_turn_with_thinking_text_and_tools() -> None:
    said = read("messages", sse(*TURN), stream=True)
    assert said.finished
    assert (said.id, said.model, said.usage, said.error) == (ID, "claude-x", Usage(135, 89), None)
    (choice,) = said.choices()
    assert (choice.index, choice.text, choice.finish_reason) == (0, "Let me look.", "tool_calls")
    assert choice.message == {
        "role": "assistant",
        "content": "Let me look.",
        "reasoning_content": "I should look 北京🌍.",
        "tool_calls": [
            {
                "id": "toolu_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Berlin"}'},
            },
            {"id": "toolu_2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        ],
    }
    assert json.loads(said.reply or b"") == {
        "id": ID,
        "type": "message",
        "role": "assistant",
        "model": "claude-x",
        "content": [
            {"type": "thinking", "thinking": "I should look 北京🌍.", "signature": "EqQBCgIYAhIM"},
            {"type": "text", "text": "Let me look.", "citations": [{"type": "char_location", "cited_text": "x"}]},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Berlin"}},
            {"type": "tool_use", "id": "toolu_2", "name": "now", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 25,
            "output_tokens": 89,
            "cache_read_input_tokens": 100,
            "cache_creation_input_tokens": 10,
        },
    }


def test_whole_and_streamed_say_the_same() -> None:
    streamed = read("messages", sse(*TURN), stream=True)
    whole = read("messages", streamed.reply or b"", stream=False)
    assert whole.finished
    assert (whole.id, whole.model, whole.usage, whole.reply) == (ID, "claude-x", Usage(135, 89), streamed.reply)
    (one,), (other,) = streamed.choices(), whole.choices()
    assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
    for calls in (one.message["tool_calls"], other.message["tool_calls"]):
        calls[0]["function"]["arguments"] = json.loads(calls[0]["function"]["arguments"])
    assert one.message == other.message


def test_plain_text_has_no_message_of_its_own() -> None:
    said = read(
        "messages", sse(start(), begin(0, type="text", text=""), delta(0, "text_delta", text="Hi"), *end()), stream=True
    )
    (choice,) = said.choices()
    assert (choice.text, choice.finish_reason, choice.message) == ("Hi", "stop", None)


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("max_tokens", "length"),
        ("tool_use", "tool_calls"),
        ("refusal", "content_filter"),
        ("pause_turn", "pause_turn"),
    ],
)
def test_reasons_to_stop(reason: str, finish: str) -> None:
    said = read("messages", sse(start(), *end(reason, output_tokens=2)), stream=True)
    assert said.finished
    assert said.choices()[0].finish_reason == finish


def test_an_end_needs_its_reason_and_its_marker() -> None:
    assert not read("messages", sse(start(), *end(None)), stream=True).finished
    assert not read("messages", sse(start(), *end()[:1]), stream=True).finished
    assert not read("messages", sse(*end()), stream=True).finished


def test_counts_that_come_at_the_end_only() -> None:
    said = read(
        "messages", sse(start(input_tokens=0, output_tokens=0), *end(input_tokens=31, output_tokens=4)), stream=True
    )
    assert said.usage == Usage(31, 4)


def test_a_count_that_is_left_out_at_the_end_stays() -> None:
    last = end(input_tokens=None, cache_read_input_tokens=None, output_tokens=4)
    assert read("messages", sse(start(cache_read_input_tokens=9), *last), stream=True).usage == Usage(34, 4)


@pytest.mark.parametrize("stream", [True, False])
def test_an_error(stream: bool) -> None:
    error = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    data = sse(start(), begin(0, type="text", text="a"), error, *end()) if stream else json.dumps(error).encode()
    said = read("messages", data, stream=stream)
    assert (said.error, said.finished, said.reply) == ("Overloaded", False, None)
    assert [choice.text for choice in said.choices()] == (["a"] if stream else [])


def test_arguments_that_are_no_json_are_kept_as_they_were_written() -> None:
    block = begin(0, type="tool_use", id="t", name="f", input={})
    said = read(
        "messages",
        sse(start(), block, delta(0, "input_json_delta", partial_json='{"a": '), *end("tool_use")),
        stream=True,
    )
    assert said.choices()[0].message["tool_calls"][0]["function"]["arguments"] == '{"a": '
    assert json.loads(said.reply or b"")["content"][0]["input"] == {}


def test_blocks_and_deltas_yet_to_come_are_in_the_reply() -> None:
    data = sse(start(), begin(0, type="novel", note="a"), delta(0, "novel_delta", note="b", kept=[1]), *end())
    assert json.loads(read("messages", data, stream=True).reply or b"")["content"] == [
        {"type": "novel", "note": "ab", "kept": [1]}
    ]


def test_numbers_and_depths_that_json_writers_refuse() -> None:
    huge = delta(0, "input_json_delta", partial_json=json.dumps({"n": 10**40}))
    data = sse(start(), begin(0, type="tool_use", id="t", name="f"), huge, *end("tool_use"))
    assert b"1" + b"0" * 40 in (read("messages", data, stream=True).reply or b"")
    deep = delta(0, "input_json_delta", partial_json='{"a":' + "[" * 1000 + "]" * 1000 + "}")
    data = sse(start(), begin(0, type="tool_use", id="t", name="f"), deep, *end("tool_use"))
    assert read("messages", data, stream=True).choices()[0].finish_reason == "tool_calls"


@given(st.integers(0, len(sse(*TURN))))
def test_a_cut_stream_gives_what_came(place: int) -> None:
    data = sse(*TURN)
    said = read("messages", data[:place], stream=True)
    assert said.finished == (said.reply is not None)
    assert said.finished <= (place >= len(data) - 4)
    for choice in said.choices():
        assert "Let me look.".startswith(choice.text)


def test_byte_at_a_time_equals_at_once() -> None:
    data = sse(*TURN).replace(b"\n", b"\r\n")
    events, said = Events(), reader("messages")
    ended = [said.event(each) for place in range(len(data)) for each in events.feed(data[place : place + 1])]
    assert ended == [False] * (len(TURN) - 1) + [True]
    at_once = read("messages", data, stream=True)
    assert (said.reply, said.choices(), said.usage) == (at_once.reply, at_once.choices(), at_once.usage)


WORDS = ["type", "message", "content", "index", "delta", "content_block", "text", "usage", "input_tokens", "error"]
WORDS += ["stop_reason", "input", "partial_json", "signature", "citations", "id", "name", "model", "thinking"]
KINDS = ["message_start", "content_block_start", "content_block_delta", "message_delta", "message_stop", "tool_use"]
KINDS += ["text_delta", "input_json_delta", "citations_delta", "signature_delta", "text", "thinking", "message"]
strange = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(KINDS) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=5),
    max_leaves=20,
)


@settings(deadline=None)
@given(
    st.lists(
        st.builds(
            lambda kind, rest: rest | {"type": kind},
            st.sampled_from(KINDS),
            st.dictionaries(st.sampled_from(WORDS), strange),
        ),
        max_size=6,
    ),
    strange,
)
def test_strange_json_never_raises(events: list[dict[str, Any]], body: Any) -> None:
    said = read("messages", sse(start(), *events), stream=True)
    said.choices()
    said = read("messages", json.dumps(body).encode(), stream=False)
    said.choices()


@given(st.binary(max_size=60))
def test_strange_bytes_never_raise(data: bytes) -> None:
    for stream in (True, False):
        assert read("messages", data, stream=stream).reply is None or data
