"""Messages requests said in chat."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.core.errors import InputError
from reef.engines.dialect import translate
from reef.engines.local.chat import parse
from tests.engines.dialect.script import RECEIPT, asking, said_in_chat

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "get_weather", "description": "Weather", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def messages(*given: dict[str, Any]) -> Any:
    return said_in_chat(messages=list(given))["messages"]


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def test_a_plain_request() -> None:
    made = translate(asking(system="Be brief.", temperature=0.5, top_p=0.9, top_k=5, stop_sequences=["END"]))
    assert json.loads(made.ask.body) == {
        "model": "m",
        "max_tokens": 64,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "stop": ["END"],
    }
    assert (made.ask.dialect, made.ask.receipt, made.ask.release_id, made.ask.query) == ("chat", RECEIPT, "base", "")
    assert made.ask.headers == {"user-agent": "test"}


def test_a_stream_asks_for_its_usage() -> None:
    body = said_in_chat(stream=True)
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})


def test_a_conversation_as_an_agent_sends_it() -> None:
    ask = asking(
        stream=True,
        model="reef-model",
        max_tokens=32000,
        system=[text("x-anthropic-billing-header: cc_version=2.1;"), text("You are an agent.", **MARK), text("Rules.")],
        messages=[
            user(text("<system-reminder>CLAUDE.md</system-reminder>"), text("Weather?", **MARK)),
            {"role": "system", "content": [text("Skills: none."), text("Today is Sunday.")]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Look it up.", "signature": ""},
                    {"type": "redacted_thinking", "data": "EmwKAhgB"},
                    text("I will look."),
                    {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Zürich"}},
                    {"type": "tool_use", "id": "toolu_2", "name": "get_weather", "input": {}},
                ],
            },
            user(
                text("By the way,"),
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("12 °C"), text("rain")], **MARK},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no city", "is_error": True},
                text("be quick."),
            ),
        ],
        tools=[TOOL, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}],
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        metadata={"user_id": "u-1"},
        output_config={"effort": "high"},
    )
    body = json.loads(translate(ask).ask.body)
    assert body == {
        "model": "reef-model",
        "max_tokens": 32000,
        "messages": [
            {"role": "system", "content": "x-anthropic-billing-header: cc_version=2.1;\n\nYou are an agent.\n\nRules."},
            {"role": "user", "content": "<system-reminder>CLAUDE.md</system-reminder>\n\nWeather?"},
            {"role": "system", "content": "Skills: none.\n\nToday is Sunday."},
            {
                "role": "assistant",
                "content": "I will look.",
                "reasoning_content": "Look it up.",
                "tool_calls": [
                    {
                        "id": "toolu_1",
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": '{"city":"Zürich"}'},
                    },
                    {"id": "toolu_2", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}},
                ],
            },
            {"role": "tool", "tool_call_id": "toolu_1", "content": "12 °C\n\nrain"},
            {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no city"},
            {"role": "user", "content": "By the way,\n\nbe quick."},
        ],
        "tools": [
            {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "description": "Weather"}}
        ],
        "reasoning_effort": "high",
        "user": "u-1",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    parse(translate(ask).ask.body)  # the embedded engine takes it


def test_an_assistant_that_only_calls_has_no_content() -> None:
    """case 11: said as null, which chat servers take."""
    called = {"type": "tool_use", "id": "t", "name": "f", "input": {"n": 2**60}}
    (message,) = messages({"role": "assistant", "content": [called]})
    assert message["content"] is None
    assert message["tool_calls"][0]["function"]["arguments"] == '{"n":1152921504606846976}'


def test_thinking_that_another_provider_signed_stays_away() -> None:
    signed = {"type": "thinking", "thinking": "secret", "signature": "EqQB"}
    assert messages({"role": "assistant", "content": [signed, text("a"), text("b")]}) == [
        {"role": "assistant", "content": "ab"}
    ]


def test_images_and_files() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": "QUJD"}, **MARK}
    link = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    pdf = {
        "type": "document",
        "title": "a.pdf",
        "source": {"type": "base64", "media_type": "application/pdf", "data": "QQ=="},
    }
    note = {
        "type": "document",
        "title": "Note",
        "source": {"type": "text", "media_type": "text/plain", "data": "words"},
    }
    held = {"type": "document", "source": {"type": "content", "content": [text("inner"), link]}}
    picture = {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,QUJD"}}
    linked = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    (message,) = messages(user(image, text("What?"), link, pdf, note, held))
    assert message["content"] == [
        picture,
        text("What?"),
        linked,
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,QQ=="}},
        text("Note"),
        text("words"),
        text("inner"),
        linked,
    ]
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("shot"), image]}
    assert messages(user(result, text("See?"))) == [
        {"role": "tool", "tool_call_id": "t", "content": "shot"},
        {"role": "user", "content": [picture, text("See?")]},
    ]


def test_unknown_blocks_give_their_text() -> None:
    found = {"type": "search_result", "title": "Page", "source": "u", "content": [text("found")]}
    assert messages(user(found, {"type": "novel", "data": 1}, text("so?"))) == [
        {"role": "user", "content": "Page\n\nfound\n\nso?"}
    ]
    ran = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}
    assert messages({"role": "assistant", "content": [ran, text("Found.")]})[0]["content"] == "Found."


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "get_weather"},
            {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        ),
    ],
)
def test_which_tool_to_call(choice: dict[str, Any], expected: dict[str, Any]) -> None:
    body = said_in_chat(tools=[TOOL | {"type": "custom", "strict": True}], tool_choice=choice)
    assert {name: body[name] for name in ("tool_choice", "parallel_tool_calls") if name in body} == expected
    assert body["tools"][0]["function"]["strict"] is True


def test_without_tools_of_its_own_a_request_has_none() -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"}]
    body = said_in_chat(tools=tools, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert body.keys() == {"model", "max_tokens", "messages"}


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, None),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 30000}}, "high"),
        ({"output_config": {"effort": "max"}}, "high"),
        ({"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}}, None),
    ],
)
def test_how_hard_to_think(fields: dict[str, Any], effort: str | None) -> None:
    assert said_in_chat(**fields).get("reasoning_effort") == effort


def test_a_form_of_the_answer() -> None:
    body = said_in_chat(output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert body["response_format"]["json_schema"]["schema"] == SCHEMA


def test_a_long_user_is_one_that_chat_takes() -> None:
    users = [said_in_chat(metadata={"user_id": json.dumps({"device_id": "d" * 80, "n": n})})["user"] for n in range(2)]
    assert [len(each) for each in users] == [64, 64]
    assert users[0] != users[1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": ...}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"messages": ...}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [user(5)]}, "messages[0].content[0]"),  # type: ignore[arg-type]
        ({"messages": [user({"type": "tool_result"})]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [user({"type": "image", "source": {"type": "file", "file_id": "f"}})]},
            "messages[0].content[0].source",
        ),
        (
            {"messages": [user({"type": "document", "source": {"type": "url", "url": "u"}})]},
            "messages[0].content[0].source",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t"}]}]},
            "messages[0].content[0].name",
        ),
        ({"system": 5}, "system"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": "auto"}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ],
)
def test_what_cannot_be_said_is_refused(fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InputError) as caught:
        translate(asking(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize("body", [b"[]", b"{", b"", b"\xff", b'{"messages": NaN}'])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(InputError):
        translate(replace(asking(), body=body))


def test_what_is_nested_too_deeply_is_refused() -> None:
    schema = '{"a":' * 1000 + "1" + "}" * 1000
    body = asking(tools=[{"name": "f", "input_schema": {"a": "DEEP"}}]).body.replace(b'"DEEP"', schema.encode())
    with pytest.raises(InputError, match="levels deep"):
        translate(replace(asking(), body=body))


WORDS = ["role", "content", "type", "text", "source", "data", "input", "id", "name", "tool_use_id", "thinking", "title"]
KINDS = ["user", "assistant", "system", "text", "image", "document", "tool_use", "tool_result", "thinking", "base64"]
strange = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(KINDS) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=5),
    max_leaves=15,
)
FIELDS = ["system", "tools", "tool_choice", "thinking", "output_config", "metadata", "stop_sequences", "output_format"]


@settings(deadline=None)
@given(
    st.lists(st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(KINDS[:3]), strange)),
    st.dictionaries(st.sampled_from(FIELDS), strange, max_size=2),
)
def test_any_json_is_said_or_refused(given_messages: Any, fields: dict[str, Any]) -> None:
    try:
        body = said_in_chat(messages=given_messages, **fields)
    except InputError:
        return
    for message in body["messages"]:
        assert message["role"] in ("system", "user", "assistant", "tool")
        assert isinstance(message["content"], str | list) or message["tool_calls"]
