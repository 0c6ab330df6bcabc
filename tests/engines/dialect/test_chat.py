import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.core.nouns import Usage
from reef.engines.dialect import read
from reef.engines.dialect.chat import Reader
from reef.engines.sse import Events


def test_letters_cut_in_the_middle():
    """case 6: no letter is lost at a cut."""
    text = "北京🌍"
    data = f'data: {{"choices":[{{"index":0,"delta":{{"content":"{text}"}},"finish_reason":"stop"}}]}}\r\n\r\n'.encode()
    events, said = Events(), Reader()
    for place in range(len(data)):
        for event in events.feed(data[place : place + 1]):
            said.event(event)
    assert said.choices()[0].text == text
    assert said.finished


def chunk(index=0, finish=None, **delta):
    return {"choices": [{"index": index, "delta": delta, "finish_reason": finish}]}


def together(*chunks):
    made = Reader()
    for item in chunks:
        made.whole(json.dumps(item))
    return made


def test_usage_in_a_trailing_chunk_without_choices():
    """case 1: a chunk that is usage alone."""
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
    """case 3: both fragments are the one call's."""
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
    """case 5: by index, in order."""
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


def test_parallel_calls_that_are_all_numbered_0():
    made = together(
        chunk(tool_calls=[call(0, '{"a"', "f", "c1")]),
        chunk(tool_calls=[call(0, ":1}")]),
        chunk(tool_calls=[call(0, "{}", "g", "c2")]),
        chunk(tool_calls=[call(0, " ", id="c2"), call(1, "{}", "h", "c3")], finish="tool_calls"),
    )
    calls = made.choices()[0].message["tool_calls"]
    assert sorted((item["id"], item["function"]["name"], item["function"]["arguments"]) for item in calls) == [
        ("c1", "f", '{"a":1}'),
        ("c2", "g", "{} "),
        ("c3", "h", "{}"),
    ]


def test_json_that_is_too_deep_is_passed_over():
    assert read("chat", b"[" * 100_000, stream=False).choices() == ()


def test_choices_are_kept_apart_and_must_all_finish():
    """case 5, for answers: choices in turns."""
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
    made = Reader()
    made.whole(json.dumps(value))
    made.choices()


def test_a_piece_of_a_stream():
    data = b"".join(f"data: {json.dumps(chunk(content=word))}\n\n".encode() for word in ("one ", "two"))
    assert read("chat", data, stream=True).choices()[0].text == "one two"
    assert read("chat", data[:-4], stream=True).choices()[0].text == "one "


def test_a_whole_completion():
    body = {
        "model": "gpt",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1},
    }
    said = read("chat", json.dumps(body).encode(), stream=False)
    assert (said.model, said.usage, said.choices()[0].text) == ("gpt", Usage(3, 1), "Hi")


@pytest.mark.parametrize("error", [{"message": "overloaded", "type": "x"}, "overloaded"])
def test_an_error_in_a_stream(error):
    assert together(chunk(content="a"), {"error": error}).error == "overloaded"
