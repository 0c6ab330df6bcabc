import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.core.nouns import Usage
from reef.engines.sse import Chunks, Events, read_chunks, read_completion

ends = st.sampled_from([b"\n", b"\r", b"\r\n"])
lines = st.one_of(
    st.text(max_size=12).map(lambda text: b"data: " + text.encode("utf-8", "replace")),
    st.text(max_size=12).map(lambda text: b"data:" + text.encode("utf-8", "replace")),
    st.sampled_from(
        [b"", b"", b": a comment", b"event: ping", b"id: 3", b"data", b"data: [DONE]", b"\xef\xbb\xbfdata: x"]
    ),
    st.binary(max_size=8),
)
streams = st.lists(st.tuples(lines, ends), max_size=20).map(lambda parts: b"".join(line + end for line, end in parts))


def parse(pieces):
    events = Events()
    found = [event for piece in pieces for event in events.feed(piece)]
    rest = events.rest
    last = events.finish()
    return found + ([last] if last else []), rest


@settings(deadline=None)
@given(streams, st.data())
def test_any_cuts_give_the_same_events(data, draw):
    whole, _ = parse([data])
    one_by_one, _ = parse([data[place : place + 1] for place in range(len(data))])
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=5)))
    pieces = [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    in_pieces, _ = parse(pieces)
    assert whole == one_by_one == in_pieces
    assert b"".join(event.raw for event in whole) == data


def test_the_format():
    data = (
        b"\xef\xbb\xbfdata: one\r\n\r\n"
        b": comment\ndata:two\ndata:  three\n\n"
        b"event: named\rdata: four\r\r"
        b"id: 7\n\n"
        b"data\n\n"
        b"data: unfinished"
    )
    events = Events()
    found = events.feed(data)
    assert [(event.name, event.data) for event in found] == [
        (None, "one"),
        (None, "two\n three"),
        ("named", "four"),
        (None, None),
        (None, ""),
    ]
    assert events.rest == b"data: unfinished"
    last = events.finish()
    assert last is not None
    assert (last.raw, last.data) == (b"data: unfinished", "unfinished")
    assert events.finish() is None


def test_letters_cut_in_the_middle():
    text = "北京🌍"
    data = f'data: {{"choices":[{{"index":0,"delta":{{"content":"{text}"}},"finish_reason":"stop"}}]}}\r\n\r\n'.encode()
    events, chunks = Events(), Chunks()
    for place in range(len(data)):
        for event in events.feed(data[place : place + 1]):
            chunks.feed(event.data)
    assert chunks.choices()[0].text == text
    assert chunks.finished


def chunk(index=0, finish=None, **delta):
    return {"choices": [{"index": index, "delta": delta, "finish_reason": finish}]}


def together(*chunks):
    made = Chunks()
    for item in chunks:
        made.feed(json.dumps(item))
    return made


def test_usage_in_a_trailing_chunk_without_choices():
    made = together(
        chunk(content="Hi"),
        chunk(finish="stop"),
        {"choices": [], "usage": {"prompt_tokens": 26, "completion_tokens": 2, "total_tokens": 28}},
    )
    assert made.usage == Usage(26, 2)
    assert made.finished
    assert made.choices()[0].text == "Hi"
    assert made.choices()[0].message is None


def call(index, arguments, name=None, id=None):
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {"index": index, "function": function} | ({"id": id} if id else {})


def test_tool_calls_with_one_index_twice_in_a_chunk():
    made = together(
        chunk(tool_calls=[call(0, "", "f", "c1"), call(0, '{"a":')]),
        chunk(tool_calls=[call(0, "1}")], finish="tool_calls"),
    )
    (answer,) = made.choices()
    assert answer.message["content"] is None
    assert answer.message["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    ]


def test_interleaved_tool_calls_and_a_name_in_fragments():
    made = together(
        chunk(tool_calls=[call(0, '{"x"', "get_"), call(1, '{"y"', "set")]),
        chunk(tool_calls=[call(0, ":1}", "weather")]),
        chunk(tool_calls=[call(1, ":2}")], finish="tool_calls"),
    )
    calls = made.choices()[0].message["tool_calls"]
    assert [(item["function"]["name"], item["function"]["arguments"]) for item in calls] == [
        ("get_weather", '{"x":1}'),
        ("set", '{"y":2}'),
    ]


def test_choices_are_kept_apart_and_must_all_finish():
    made = together(chunk(1, content="b"), chunk(0, content="a"), chunk(0, finish="stop"))
    assert [(item.index, item.text) for item in made.choices()] == [(0, "a"), (1, "b")]
    assert not made.finished
    made.add(chunk(1, finish="length"))
    assert made.finished


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["choices", "index", "delta", "content", "tool_calls", "function", "usage", "error", "model"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=20,
    )
)
def test_strange_json_never_raises(value):
    made = Chunks()
    made.feed(json.dumps(value))
    made.choices()
    read_completion(json.dumps(value).encode())


def test_a_piece_of_a_stream():
    data = b"".join(f"data: {json.dumps(chunk(content=word))}\n\n".encode() for word in ("one ", "two"))
    assert read_chunks(data).choices()[0].text == "one two"
    assert read_chunks(data[:-4]).choices()[0].text == "one "


def test_a_whole_completion():
    body = {
        "model": "gpt",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1},
    }
    said = read_completion(json.dumps(body).encode())
    assert (said.model, said.usage, said.choices()[0].text) == ("gpt", Usage(3, 1), "Hi")


@pytest.mark.parametrize("error", [{"message": "overloaded", "type": "x"}, "overloaded"])
def test_an_error_in_a_stream(error):
    assert together(chunk(content="a"), {"error": error}).error == "overloaded"
