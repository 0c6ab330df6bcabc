"""Templates: joined, they are the body again, whatever earlier bodies taught; and a longer transcript costs its end."""

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from reef.records import codec, template
from reef.records.template import Templates


class Blobs:
    """Numbers for slices, and how often each was asked for."""

    def __init__(self):
        self.keys, self.asked = {}, []

    def key(self, data):
        self.asked.append(data)
        return self.keys.setdefault(data, len(self.keys) + 1)

    def join(self, made):
        whole, key, slices = b"", 0, {number: data for data, number in self.keys.items()}
        for part in msgspec.msgpack.decode(codec.unpack(made)):
            key += 0 if isinstance(part, bytes) else part
            whole += part if isinstance(part, bytes) else slices[key]
        return whole


def turn(number, size=300):
    return {"role": "user", "content": f"turn {number}: " + "some words " * (size // 11)}


HEAD = b'{"model":"m","stream":true,"messages":['
elements = st.lists(
    st.one_of(
        st.integers(0, 5).map(lambda n: json.dumps(turn(n)).encode()),
        st.integers(0, 5).map(lambda n: json.dumps(turn(n, 1500)).encode()),
        st.integers(0, 5).map(lambda n: json.dumps({"content": [{"text": "x" * 1200, "n": n}]}).encode()),
        st.sampled_from(
            [b"1", b'"]}"', b'{"a":"\\\\"}', b"[" + b"2," * 40 + b"2]", b"broken", b'{"content":"' + b"y" * 900]
        ),
    ),
    max_size=7,
)
ends = st.sampled_from(
    [b"]}", b'],"tools":[' + json.dumps(turn(9)).encode() + b"]}", b"", b"}]", b'], "x": "' + b"z" * 400]
)
bodies = st.builds(
    lambda parts, comma, end: HEAD + comma.join(parts) + end, elements, st.sampled_from([b",", b" ,\n"]), ends
)


@given(st.lists(bodies, min_size=1, max_size=8), st.lists(st.sampled_from(["settle", "undo", None]), max_size=8))
def test_any_row_of_bodies_joins_again(row, after):
    blobs = Blobs()
    templates = Templates(blobs.key)
    for number, body in enumerate(row):
        assert blobs.join(templates.make(body)) == body
        if number < len(after) and after[number]:
            getattr(templates, after[number])()


def test_a_longer_transcript_asks_only_for_what_is_new():
    blobs, turns = Blobs(), [turn(number) for number in range(40)]
    templates = Templates(blobs.key)
    tools = {"tools": [{"name": "read", "description": "d" * 100}], "max_tokens": 9}
    for count in range(20, 40):
        body = json.dumps({"messages": turns[:count], **tools}).encode()
        blobs.asked.clear()
        assert blobs.join(templates.make(body)) == body
        templates.settle()
        if count > 20:
            assert blobs.asked == [json.dumps(each).encode() for each in (turns[count - 1], *tools["tools"])]


def test_a_changed_last_message_and_a_long_text_that_stays():
    blobs, templates = Blobs(), None
    templates = Templates(blobs.key)
    text, mark = "a long result " * 200, {"cache_control": {"type": "ephemeral"}}
    first = [turn(0), {"role": "user", "content": [{"type": "text", "text": text} | mark]}]
    second = [turn(0), {"role": "user", "content": [{"type": "text", "text": text}]}, turn(1)]
    for messages in (first, second):
        blobs.asked.clear()
        body = json.dumps({"messages": messages}).encode()
        assert blobs.join(templates.make(body)) == body
    assert text.encode() in blobs.asked
    assert json.dumps(turn(0)).encode() not in blobs.asked
    assert len([data for data in blobs.keys if text[:50].encode() in data]) == 1


def test_what_was_undone_is_not_taken_over():
    blobs = Blobs()
    templates = Templates(blobs.key)
    body = json.dumps({"messages": [turn(number) for number in range(9)]}).encode()
    templates.make(body)
    templates.undo()
    blobs.asked.clear()
    templates.make(body)
    assert len(blobs.asked) == 9
    templates.settle()
    templates.clear()
    blobs.asked.clear()
    templates.make(body)
    assert len(blobs.asked) == 9


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(template, "MEMORY", 50_000)
    templates = Templates(Blobs().key)
    for number in range(60):
        templates.make(json.dumps({"n": f"{number}" * 300, "messages": [turn(n) for n in range(20)]}).encode())
        templates.settle()
    held = [known.whole for alike in templates._known.values() for known in alike]
    assert 0 < sum(map(len, held)) == templates._size <= 50_000
