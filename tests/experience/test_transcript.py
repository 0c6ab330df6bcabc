"""Transcripts in one normal form: what clients change when they send a message again changes nothing."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.core.nouns import Choice, Record, Timing
from reef.experience import reader as reading
from reef.experience.reader import Reader
from reef.experience.transcript import answer, trailing
from tests.experience.talk import TOOLS, answered, calling, chat, result


def record(body, dialect="chat"):
    request = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Record("0" * 32, "default", "r", "live", dialect, "complete", request, Timing(0.0))


def read(body, dialect="chat"):
    return Reader().read(record(body, dialect))


def same(one, other, dialect="chat"):
    return read(one, dialect).whole == read(other, dialect).whole


def test_a_string_is_one_text_block():
    blocks = chat({"role": "user", "content": [{"type": "text", "text": "hi"}]})
    assert same(chat("hi"), blocks)
    assert not same(chat("hi"), chat("hi "))
    two = {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}
    assert not same(chat("hi"), chat(two))


def test_marks_that_steer_a_cache_play_no_part():
    marked = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    one = {"system": [{**marked, "text": "be brief"}], "messages": [{"role": "user", "content": [marked]}]}
    other = {"system": "be brief", "messages": [{"role": "user", "content": "hi"}]}
    assert same(one, other, "messages")
    image = {"type": "image", "source": {"type": "base64", "data": "aa"}}
    one, other = (
        {"messages": [{"role": "user", "content": [each]}]}
        for each in (image, {**image, "cache_control": {"type": "ephemeral"}})
    )
    assert same(one, other, "messages")


def test_arguments_are_compared_as_json():
    def of(arguments):
        return chat("go", calling(("c1", "write", arguments)), result("c1", "ok"))

    assert same(of('{"path": "a", "n": 1}'), of('{"n":1.0,"path":"a"}'))
    assert same(of(""), of("{}"))
    assert not same(of('{"path": "a"}'), of('{"path": "b"}'))
    assert not same(of("{half"), of("{other"))


def test_results_are_found_by_their_call_whatever_their_order_and_ids():
    def of(first, second, *results):
        return chat("go", calling((first, "a", {}), (second, "b", {})), *results)

    plain = of("c1", "c2", result("c1", "one"), result("c2", "two"))
    assert same(plain, of("c1", "c2", result("c2", "two"), result("c1", "one")))
    assert same(plain, of("x", "y", result("x", "one"), result("y", "two")))
    assert not same(plain, of("c1", "c2", result("c1", "two"), result("c2", "one")))


def test_an_answer_is_the_step_that_comes_back():
    calls = calling(("c1", "bash", '{"cmd":"ls","n":2}'), text="Let me look.")
    for said, back in [
        ("It is 4.", {"role": "assistant", "content": [{"type": "text", "text": "It is 4. "}]}),
        ("<think>2 and 2</think>\nIt is 4.", {"role": "assistant", "content": "It is 4."}),
        ("two and two</think>It is 4.", {"role": "assistant", "content": "It is 4."}),
        (calls, calling(("c1", "bash", '{"n": 2, "cmd": "ls"}'), text="Let me look.")),
        ({**calls, "content": None, "reasoning_content": "hm"}, {**calls, "content": ""}),
        ({"role": "assistant", "content": None, "refusal": "No."}, {"role": "assistant", "content": "No."}),
        ({"role": "assistant", "content": "caf\u0065\u0301"}, {"role": "assistant", "content": "café"}),
    ]:
        (choice,) = answered(said)
        assert answer(choice)[0] == read(chat("q", back, "more")).steps[1].digest, said
    assert answer(Choice(0, "It is 5.", "stop"))[0] != answer(Choice(0, "It is 4.", "stop"))[0]


def test_an_answer_of_messages_comes_back_as_blocks():
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "Looking."},
        {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
    ]
    message = {"type": "message", "role": "assistant", "content": blocks, "stop_reason": "tool_use"}
    (choice,) = answered(message, "messages")
    marked = [*blocks[1:2], {**blocks[2], "cache_control": {"type": "ephemeral"}}]
    back = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": marked}]}
    said = read(back, "messages")
    assert [step.role for step in said.steps] == ["user", "assistant"]
    assert answer(choice) == (said.steps[1].digest, said.steps[1].calls)


def test_an_answer_of_responses_comes_back_as_items():
    output = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Looking.", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "exec", "arguments": '{"cmd": "ls"}'},
        {"type": "custom_tool_call", "id": "ct_1", "call_id": "call_2", "name": "patch", "input": "*** Begin"},
    ]
    (choice,) = answered({"object": "response", "id": "resp_1", "status": "completed", "output": output}, "responses")
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
        *output,
        {"type": "function_call_output", "call_id": "call_1", "output": "a.txt"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "done"},
    ]
    said = read({"input": items}, "responses")
    assert [step.role for step in said.steps] == ["user", "assistant", "tool"]
    assert answer(choice) == (said.steps[1].digest, said.steps[1].calls)
    plain = {"instructions": "be brief", "input": "q"}
    assert [step.role for step in read(plain, "responses").steps] == ["user"]
    assert read({**plain, "previous_response_id": "resp_9"}, "responses").earlier == "resp_9"


def test_tools_are_told_apart_by_their_names():
    assert read(chat("hi")).tools is None
    assert read(chat("hi", tools=[])).tools is None
    worded = [{"type": "function", "function": {"name": "bash", "description": "runs"}}]
    assert read(chat("hi", tools=TOOLS)).tools == read(chat("hi", tools=worded)).tools is not None
    assert read({"input": "hi", "tools": [{"type": "web_search"}]}, "responses").tools is not None


@pytest.mark.parametrize(
    ("body", "dialect"),
    [
        (b"no json", "chat"),
        (b"[1]", "chat"),
        (b"{}", "chat"),
        (b'{"messages": "hi"', "chat"),
        (b'{"messages": 7}', "messages"),
        (b'{"input": null}', "responses"),
        (b'{"input": "x"}', "embeddings"),
        (b'{"messages": ' + b"[" * 3000 + b"]" * 3000 + b"}", "chat"),
    ],
)
def test_what_cannot_be_read_is_none_and_never_an_error(body, dialect):
    assert Reader().read(record(body, dialect)) is None
    assert trailing(record(body, dialect)) in ([], trailing(record(body, dialect)))


def test_strange_messages_are_read_as_far_as_they_go():
    body = b'{"messages": [1, null, {"role": "user", "content": "a\\ud800b"}, {"content": NaN}, {"role": "tool"}]}'
    assert [step.role for step in read(body).steps] == ["user", "None", "tool"]


def test_what_follows_an_answer():
    def of(*messages, dialect="chat"):
        return [(said.role, said.text) for said in trailing(record(chat(*messages), dialect))]

    assert of("u1") == [("user", "u1")]
    assert of("u1", "a1", "u2") == [("user", "u2")]
    calls = calling(("c1", "a", {}), ("c2", "b", {}))
    assert of("u1", calls, result("c1", "x"), result("c2", "y")) == [("tool", "x"), ("tool", "y")]
    assert of("u1", "a1", "u2", "a half begun answ") == [("user", "u2")]


# --- the reader's memory ----------------------------------------------------------------------------------------------

texts = st.sampled_from(["hi", "go on", "x" * 50, "é", 'a "quoted" one, {"messages": [1]}'])
spoken = st.one_of(
    st.builds(lambda text: [{"role": "user", "content": text}], texts),
    st.builds(lambda text: [{"role": "user", "content": [{"type": "text", "text": text}]}], texts),
    st.builds(lambda text: [{"role": "system", "content": text}], texts),
    st.builds(lambda text: [{"role": "assistant", "content": text}], texts),
    st.builds(
        lambda text: [calling(("c1", "a", {"t": text}), ("c2", "b", {})), result("c2", text), result("c1", "r")], texts
    ),
    st.builds(lambda text: [result("c1", text)], texts),
)
items = st.one_of(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant"]), texts),
    st.builds(lambda text: {"type": "function_call", "call_id": "c1", "name": text, "arguments": "{}"}, texts),
    st.builds(lambda text: {"type": "function_call_output", "call_id": "c1", "output": text}, texts),
    st.just({"type": "reasoning", "summary": []}),
)
forms = st.sampled_from(
    [
        lambda array, name: {"model": "m", name: array, "tools": TOOLS},
        lambda array, name: {"model": "m", "tools": TOOLS, "system": "s", name: array, "n": 1},
        lambda array, name: {"copy": array, name: array},
        lambda array, name: {name: array},
    ]
)


@st.composite
def bodies(draw):
    """Requests of one client: each goes on from some earlier one, from its beginning or from a part of it."""
    dialect = draw(st.sampled_from(["chat", "responses"]))
    form, compact = draw(forms), draw(st.booleans())
    name = "input" if dialect == "responses" else "messages"
    made, arrays = [], [[]]
    for _ in range(draw(st.integers(1, 8))):
        before = draw(st.sampled_from(arrays))
        cut = draw(st.integers(0, len(before)))
        kept = before if draw(st.booleans()) else before[:cut]
        more = draw(st.lists(items, max_size=5))
        if dialect == "chat":
            more = [message for group in draw(st.lists(spoken, max_size=4)) for message in group]
        arrays.append([*kept, *more])
        body = form(arrays[-1], name)
        made.append(json.dumps(body, separators=(",", ":") if compact else None, indent=None if compact else 1))
    return dialect, [text.encode() for text in made]


@settings(max_examples=300, deadline=None)
@given(bodies())
def test_what_is_remembered_changes_nothing(drawn):
    dialect, requests = drawn
    kept = Reader()
    for body in requests:
        made, fresh = kept.read(record(body, dialect)), Reader(0).read(record(body, dialect))
        assert made == fresh, body
        plain = Reader(0)._resume(record(body, dialect))
        assert plain is None


def test_a_field_that_is_there_twice_is_read_as_json_reads_it():
    kept = Reader()
    first = chat("u1", "a1", "u2", "a2", "u3")
    text = json.dumps(first)
    again = text[:-1] + ', "messages": [{"role": "user", "content": "other"}]}'
    assert len(kept.read(record(text.encode())).steps) == 5
    assert [len(kept.read(record(body.encode())).steps) for body in (text, again, text)] == [5, 1, 5]


def test_only_what_is_new_is_read(monkeypatch):
    kept, seen = Reader(), []
    real = reading.OF["chat"]
    monkeypatch.setitem(reading.OF, "chat", lambda message: seen.append(message) or real(message))
    said = [f"message {n}" for n in range(401)]
    for last in range(1, 402, 2):
        seen.clear()
        assert len(kept.read(record(chat(*said[:last]))).steps) == last
        assert len(seen) <= (4 if last > 11 else last), last  # a short body has nothing to be found by


def test_memory_is_bounded():
    kept = Reader(50_000)
    for number in range(200):
        kept.read(record(chat(f"{number} " + "x" * 300, "a", "u", "a", "u")))
    assert 0 < kept._known.size <= 50_000
    assert kept._known.size == sum(len(known.body) for known, _ in kept._known.kept.values())
    assert {each for alike in kept._known.marked.values() for each in alike} == set(kept._known.kept)
