"""Cutting bodies: whatever the bytes, the slices are ordered, disjoint and inside; equal parts are equal slices."""

import base64
import json

from hypothesis import given
from hypothesis import strategies as st

from reef.records.body import CROWDED, LONG, SMALL, cuts

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=60),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
messages = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": values}), max_size=6)
bodies = st.one_of(
    st.binary(max_size=600),
    st.builds(
        lambda m, v, i: json.dumps({"messages": m, "x": v}, indent=i).encode(), messages, values, st.none() | st.just(2)
    ),
    st.builds(lambda m: json.dumps({"messages": m}, ensure_ascii=False).encode("utf-8", "replace"), messages),
    st.builds(lambda b, n: b'{"messages": [' + b * n + b"]}", st.binary(max_size=40), st.integers(0, 200)),
)


def slices(body):
    return [body[start:end] for start, end in cuts(body)]


@given(bodies)
def test_cuts_are_ordered_disjoint_and_inside(body):
    cursor, joined = 0, b""
    for start, end in cuts(body):
        assert cursor <= start < end <= len(body)
        joined += body[cursor:start] + body[start:end]
        cursor = end
    assert joined + body[cursor:] == body


def test_each_message_and_tool_is_one_slice_as_it_was_written():
    first = b'{"role": "user",  "content": "one question, long enough to share"}'
    second = b'{"role":"assistant","content":"\\u00e9 and \\"quotes\\" and ] in the answer"}'
    tool = b'{"type":"function","function":{"name":"read","parameters":{"a":[1,2]}}}'
    body = b'{ "model":"m", "messages" : [' + first + b" ,\n" + second + b'], "tools":[' + tool + b"]}"
    assert slices(body) == [first, second, tool]


def test_equal_messages_of_a_longer_transcript_are_equal_slices():
    turns = [{"role": "user", "content": f"turn {i} " + "x" * 50} for i in range(9)]
    early, late = (slices(json.dumps({"messages": turns[:n]}).encode()) for n in (4, 9))
    assert late[:4] == early


def test_a_long_payload_has_its_own_slice_wherever_it_is():
    image = base64.b64encode(bytes(range(256)) * 24)
    body = (
        b'{"messages":[{"role":"user","content":[{"image":{"url":"'
        + image
        + b'"}},{"text":"what is this picture?"}]}]}'
    )
    assert image in slices(body)
    assert len(image) >= LONG


def test_a_long_text_is_one_slice_whatever_is_escaped_in_it_and_moves_beside_it():
    text = 'a "quoted" word, a backslash \\, both \\" and a line\n' * 40
    first, second = ([{"type": "text", "text": text} | mark] for mark in ({}, {"cache_control": {"type": "ephemeral"}}))
    one, other = (slices(json.dumps({"messages": [{"role": "user", "content": c}]}).encode()) for c in (first, second))
    assert json.dumps(text)[1:-1].encode() in one
    assert json.dumps(text)[1:-1].encode() in other


def test_what_is_not_json_is_one_slice():
    body = b"\xff\x00not json at all " * 40
    assert slices(body) == [body]
    assert slices(b"tiny") == []


def test_a_crowd_of_tiny_elements_is_not_taken_apart():
    body = b'{"messages":[' + b"1," * (CROWDED + 1) + b"1]}"
    assert slices(body) == [body]


def test_small_elements_stay_literal():
    assert slices(b'{"messages":[{"a":1},{"a":2}],"model":"mmmmmmmmmmmmmmmmmmmmmmmmmmm"}') == []
    assert len(b'{"a":1}') < SMALL
