from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.core.errors import InputError
from reef.core.nouns import Json
from reef.engines import Answer, Piece
from reef.engines.dialect import read, translate
from reef.engines.local.tools import CLOSE, OPEN, Call, Offer, Sieve, describe, opened, overlap, read_offer, tell
from tests.engines.dialect.script import asking
from tests.engines.kit import Releases, ask, running

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        "strict": True,
    },
}
LOOK = {"type": "function", "function": {"name": "look"}}


def offer(*tools: dict[str, Any], **fields: Any) -> Offer:
    found = read_offer({"tools": list(tools or (ADD, LOOK)), **fields})
    assert found is not None
    return found


def called(name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


# --- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tools", [None, [], [{"type": "web_search"}], [{"function": {}}], [{"function": 5}]])
def test_what_cannot_be_called_is_no_offer(tools: Any) -> None:
    assert read_offer({"tools": tools, "tool_choice": "required"}) is None
    assert read_offer({}) is None


@pytest.mark.parametrize(
    ("fields", "open_", "wanted", "single"),
    [
        ({}, True, None, False),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, True, None, False),
        ({"tool_choice": "none"}, False, None, False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, True, "", True),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, True, "look", False),
        ({"tool_choice": {"type": "allowed_tools"}}, True, None, False),
    ],
)
def test_how_tools_may_be_called(fields: dict[str, Any], open_: bool, wanted: str | None, single: bool) -> None:
    found = offer(**fields)
    assert found.names == {"add", "look"}
    assert (found.open, found.wanted, found.single) == (open_, wanted, single)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": 5}, "tools"),
        ({"tools": [5]}, "tools"),
        ({"tools": [ADD], "tool_choice": {"function": {"name": "sub"}}}, "tool_choice.function.name"),
        ({"tools": [ADD], "tool_choice": {"function": {"name": ["add"]}}}, "tool_choice.function.name"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InputError) as caught:
        read_offer(fields)
    assert caught.value.param == param


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_a_description_holds_every_signature_and_the_form_of_a_call() -> None:
    text = describe(offer())
    listed = json.loads(text.split("<tools>")[1].split("</tools>")[0])
    function = {key: value for key, value in ADD["function"].items() if key != "strict"}  # type: ignore[attr-defined]
    assert listed == [{"type": "function", "function": function}, LOOK]
    example = json.loads(text.split(OPEN)[1].split(CLOSE)[0])
    assert example.keys() == {"name", "arguments"}
    assert "must call" not in text
    assert "must call look" in describe(offer(tool_choice={"function": {"name": "look"}}))
    assert "must call one of" in describe(offer(tool_choice="required"))
    assert "no more than one call" in describe(offer(parallel_tool_calls=False))


@pytest.mark.parametrize("role", ["system", "developer"])
def test_tools_are_told_behind_what_the_system_says(role: str) -> None:
    told = tell([{"role": role, "content": "Be brief."}, {"role": "user", "content": "Hi"}], offer())
    assert told == [
        {"role": role, "content": f"Be brief.\n\n{describe(offer())}"},
        {"role": "user", "content": "Hi"},
    ]


def test_tools_are_told_where_nothing_is_said_before() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert tell(messages, offer()) == [{"role": "system", "content": describe(offer())}, *messages]
    assert messages == [{"role": "user", "content": "Hi"}]
    assert tell([{"role": "system", "content": ""}], offer()) == [{"role": "system", "content": describe(offer())}]


def test_past_calls_look_as_the_model_is_asked_to_write_them() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "1 + 2, 3 + 4?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [called("add", '{"a":1,"b":2}'), called("add", '{"a":3,"é":4}')],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "tool", "content": "7", "tool_call_id": "c2"},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "", "tool_calls": [called("look", "")]},
        {"role": "function", "name": "look", "content": "sea"},
    ]
    assert tell(messages, offer(tool_choice="none")) == [
        {"role": "user", "content": "1 + 2, 3 + 4?"},
        {
            "role": "assistant",
            "content": 'Let me see.\n<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>\n'
            '<tool_call>{"name": "add", "arguments": {"a": 3, "é": 4}}</tool_call>',
        },
        {
            "role": "user",
            "content": "<tool_response>\n3\n</tool_response>\n<tool_response>\n7\n</tool_response>",
        },
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": '<tool_call>{"name": "look", "arguments": {}}</tool_call>'},
        {"role": "user", "content": "<tool_response>\nsea\n</tool_response>"},
    ]


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5) | st.integers() | st.none(), max_size=3))
def test_a_call_told_and_read_again_is_the_same(arguments: dict[str, Any]) -> None:
    given_text = json.dumps(arguments, ensure_ascii=False)
    told = tell([{"role": "assistant", "content": "", "tool_calls": [called("add", given_text)]}], offer())
    assert sifted(told[1]["content"]) == [Call("add", given_text)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), (None, {}), ("{", "{"), ("5", "5"), ('{"a": "\\ud800"}', ...)],
)
def test_arguments_are_opened_for_templates(arguments: Json, expected: Json) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [called("add", arguments)]}
    (call,) = opened(message)["tool_calls"]
    assert call["function"]["arguments"] == (arguments if expected is ... else expected)
    assert message["tool_calls"][0]["function"]["arguments"] == arguments  # type: ignore[index]


def test_strange_calls_are_told_somehow() -> None:
    strange: list[Any] = [{}, {"function": 5}, {"function": {}}, {"type": "custom", "custom": {"name": "x"}}]
    for call in strange:
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        assert tell([message], offer())[1]["content"].startswith(OPEN)
        assert opened(message)["role"] == "assistant"


# --- answers ----------------------------------------------------------------------------------------------------------


def sifted(*pieces: str, tools: Offer | None = None) -> list[str | Call]:
    """What a sieve makes of pieces; neighbouring texts joined."""
    sieve = Sieve(tools or offer())
    found: list[str | Call] = []
    for item in [*(item for piece in pieces for item in sieve.push(piece)), *sieve.finish()]:
        if isinstance(item, str) and found and isinstance(found[-1], str):
            found[-1] += item
        else:
            found.append(item)
    return found


ONE = '{"name": "add", "arguments": {"a": 1}}'
CALL = Call("add", '{"a": 1}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("  plain words \n", ["  plain words \n"]),
        (f"{OPEN}{ONE}{CLOSE}", [CALL]),
        (f"{OPEN}\n{ONE}\n{CLOSE}\n", [CALL]),
        (f"Well.\n\n{OPEN}{ONE}{CLOSE}\n{OPEN}{ONE}{CLOSE}\n", ["Well.", CALL, CALL]),
        (f"Well. {OPEN}{ONE}{CLOSE} So.\n", ["Well.", CALL, "  So."]),
        (f"{OPEN}[{ONE}, {ONE}]{CLOSE}", [CALL, CALL]),
        (f"{OPEN}{ONE}", [CALL]),
        (f"{OPEN}{ONE}{CLOSE[:5]}", [CALL]),
        (f"{OPEN}{ONE[:-1]}", [f"{OPEN}{ONE[:-1]}"]),
        (f"{OPEN}{ONE[:-1]}{CLOSE} x", [f"{OPEN}{ONE[:-1]}{CLOSE} x"]),
        (f"{OPEN}{CLOSE}", [f"{OPEN}{CLOSE}"]),
        (f"{OPEN}", [OPEN]),
        (f"{OPEN} \n", [f"{OPEN} \n"]),
        (f"{OPEN}[]{CLOSE}", [f"{OPEN}[]{CLOSE}"]),
        (f"{OPEN}[{ONE}, 5]{CLOSE}", [f"{OPEN}[{ONE}, 5]{CLOSE}"]),
        (f'{OPEN}{{"name": "sub"}}{CLOSE}', [f'{OPEN}{{"name": "sub"}}{CLOSE}']),
        (f'{OPEN}{{"name": ["add"]}}{CLOSE}', [f'{OPEN}{{"name": ["add"]}}{CLOSE}']),
        (f'{OPEN}{{"name": "look"}}{CLOSE}', [Call("look", "{}")]),
        (f'{OPEN}{{"name": "look", "arguments": null}}{CLOSE}', [Call("look", "{}")]),
        (f'{OPEN}{{"name": "look", "arguments": "{{\\"x\\": 2}}"}}{CLOSE}', [Call("look", '{"x": 2}')]),
        (f'{OPEN}{{"name": "look", "arguments": [1]}}{CLOSE}', [f'{OPEN}{{"name": "look", "arguments": [1]}}{CLOSE}']),
        (f'{OPEN}{{"name": "look", "arguments": {{"x": "a\nb"}}}}{CLOSE}', [Call("look", '{"x": "a\\nb"}')]),
        (f"a <tool_call> tag: {OPEN}{ONE}{CLOSE}", ["a <tool_call> tag:", CALL]),
        (f"{OPEN}{OPEN}{ONE}{CLOSE}", [OPEN, CALL]),
        ("a < b <tool", ["a < b <tool"]),
        (f"{CLOSE}{ONE}", [f"{CLOSE}{ONE}"]),
    ],
)
def test_calls_are_taken_out_of_the_text(text: str, expected: list[str | Call]) -> None:
    assert sifted(text) == expected
    assert sifted(*text) == expected


def test_a_closing_tag_inside_a_string_closes_nothing() -> None:
    said = f'"quoted" \\ {OPEN} and {CLOSE}, twice: {CLOSE}'
    text = OPEN + json.dumps({"name": "look", "arguments": {"text": said}}) + CLOSE
    (found,) = sifted(*text)
    assert isinstance(found, Call)
    assert json.loads(found.arguments) == {"text": said}
    # A quote that never ends hides the tag only until the answer is over.
    broken = f'{OPEN}{{"name": "look{CLOSE} then {OPEN}{ONE}{CLOSE}'
    assert sifted(broken) == sifted(*broken) == [f'{OPEN}{{"name": "look{CLOSE} then', CALL]


@pytest.mark.parametrize("value", ["NaN", "1e999", "-Infinity", '"\\ud800"', "9" * 5000, "[" * 100_000])
def test_numbers_and_text_that_json_cannot_carry_are_no_call(value: str) -> None:
    text = f'{OPEN}{{"name": "look", "arguments": {{"x": {value}}}}}{CLOSE}'
    assert sifted(text) == [text]


def test_whole_characters_stay_readable() -> None:
    text = f'{OPEN}{{"name": "look", "arguments": {{"x": "\\ud83d\\ude00 é", "n": {10**30}}}}}{CLOSE}'
    assert sifted(text) == [Call("look", f'{{"x": "😀 é", "n": {10**30}}}')]


def test_without_an_open_offer_text_is_text() -> None:
    text = f" {OPEN}{ONE}{CLOSE} "
    for tools in (None, offer(tool_choice="none")):
        sieve = Sieve(tools)
        assert sieve.push(text) == [text]
        assert sieve.push("") == sieve.finish() == []


def test_one_call_at_most_when_asked_for() -> None:
    single = offer(parallel_tool_calls=False)
    assert sifted(f"a {OPEN}[{ONE}, {ONE}]{CLOSE} {OPEN}{ONE}{CLOSE} b", tools=single) == ["a", CALL, "   b"]


def test_text_is_not_held_back_without_need() -> None:
    sieve = Sieve(offer())
    assert sieve.push("Well <b> ") == ["Well <b>"]
    assert sieve.push("so") == [" so"]
    assert sieve.push("<tool_ca") == []
    assert sieve.push("st>") == ["<tool_cast>"]
    assert sieve.push(OPEN) == []
    assert sieve.push(" words") == [OPEN, " words"]
    assert sieve.push(f"{OPEN}{ONE}") == []
    assert sieve.push(CLOSE) == [CALL]


TAGS = [OPEN, CLOSE, f"{OPEN}{ONE}{CLOSE}", "<", "<tool_", "</tool"]
BODIES = [ONE, f"[{ONE}]", '{"name": "sub"}', '{"name": "look", "arguments": {"x": "', '"}}', '"', "\\", "{", "["]
fragments = st.sampled_from([*TAGS, *BODIES, " ", "\n", "words", "é"])


@given(st.lists(fragments, max_size=10).map("".join), st.data())
def test_how_the_text_was_cut_changes_nothing(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    whole = sifted(text)
    assert sifted(*pieces) == sifted(*text) == whole
    calls = [item for item in whole if isinstance(item, Call)]
    if calls:
        assert all(call.name in ("add", "look") and isinstance(json.loads(call.arguments), dict) for call in calls)
        assert text.count("name") >= len(calls)
    else:
        assert "".join(map(str, whole)) == text


@given(st.text("ab<", max_size=8), st.text("ab<", min_size=1, max_size=5))
def test_overlaps(text: str, mark: str) -> None:
    size = overlap(text, mark)
    assert size < len(mark)
    assert text.endswith(mark[:size])
    assert not any(text.endswith(mark[:more]) for more in range(size + 1, len(mark)))


# --- the real model ---------------------------------------------------------------------------------------------------


def crowd(size: int) -> list[dict[str, Any]]:
    """As many tools as a coding agent has, each described in about 600 characters."""
    text = "Reads the file at the given path, from a line on, and returns its text with line numbers. " * 3
    properties = {name: {"type": "string", "description": f"What {name} is."} for name in ("path", "offset", "limit")}
    schema = {"type": "object", "properties": properties, "required": ["path"], "additionalProperties": False}
    return [
        {"type": "function", "function": {"name": f"tool_{i}", "description": text, "parameters": schema}}
        for i in range(size)
    ]


@pytest.mark.model
async def test_the_real_model_answers_with_tools_in_every_dialect() -> None:
    from reef.engines.local.folder import prepare
    from reef.engines.local.text import Text

    model: Path = prepare("smollm2-135m").path
    text, question = Text(model), [{"role": "user", "content": "What is 1 + 2?"}]
    many = text.encode(text.render(question, offer(*crowd(12))))
    assert 1500 < len(many) < 3000  # far from the 8,192 tokens of its context

    flat = {"name": "add", "description": "Add two numbers."}
    schema: dict[str, Any] = ADD["function"]["parameters"]  # type: ignore[index]
    asked = {
        "chat": {"messages": question, "max_tokens": 12, "tools": [ADD]},
        "messages": {"messages": question, "max_tokens": 12, "tools": [{**flat, "input_schema": schema}]},
        "responses": {
            "messages": ...,
            "max_tokens": ...,
            "input": "What is 1 + 2?",
            "max_output_tokens": 12,
            "tools": [{"type": "function", **flat, "parameters": schema}],
        },
    }
    async with running(model, Releases(), context=1024) as engine:
        for dialect, body in asked.items():
            said = []
            for stream in (False, True):
                if dialect == "chat":
                    items = engine.answer(ask(stream=stream, temperature=0, content=question, **_rest(body)))
                else:
                    made = translate(asking(stream, dialect, temperature=0, **body))
                    items = made.answer(engine.answer(made.ask))
                _, *pieces, answer = [item async for item in items]
                assert isinstance(answer, Answer)
                data = b"".join(piece.data for piece in pieces if isinstance(piece, Piece))
                found = read(dialect, data, stream=stream)
                assert found.finished
                (choice,) = answer.choices or ()
                assert [each.text for each in found.choices()] == [choice.text]
                prompt = text.decode(answer.prompt_ids or ())
                assert "<tools>[" in prompt
                assert '"name": "add"' in prompt
                assert choice.output_ids
                said.append((choice.text, choice.output_ids, answer.prompt_ids))
            assert said[0] == said[1]


def _rest(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "messages"}
