"""Responses requests said in chat."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings

from reef.core.errors import InputError
from reef.engines import Ask
from reef.engines.dialect import translate
from tests.engines.dialect.responding import (
    AGENTS,
    FUNCTION,
    JSON,
    MESSAGE,
    PATCH,
    RECEIPT,
    chat,
    made_call,
    messages,
    user,
)


def test_text_and_fields() -> None:
    assert chat(
        instructions="Be brief.",
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=20,
        seed=7,
        stop=["x"],
        user="u",
        metadata={"a": "b"},
        reasoning={"effort": "low", "summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        client_metadata={},
        truncation="auto",
        background=False,
        previous_response_id="resp_0",
        parallel_tool_calls=True,
        tool_choice="auto",
        text={"format": {"type": "text"}, "verbosity": "low"},
        unheard_of=1,
    ) == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "temperature": 0.5,
        "top_p": 0.9,
        "max_completion_tokens": 20,
        "seed": 7,
        "stop": ["x"],
        "user": "u",
        "metadata": {"a": "b"},
        "reasoning_effort": "low",
        "verbosity": "low",
        "unheard_of": 1,
    }


def test_a_stream_always_asks_for_usage() -> None:
    body = chat(stream=True, stream_options={"include_obfuscation": False})
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
    assert "stream_options" not in chat()


def test_a_schema_and_logprobs() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    assert chat(text={"format": schema})["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
    }
    assert chat(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    body = chat(include=["message.output_text.logprobs"], top_logprobs=3)
    assert (body["logprobs"], body["top_logprobs"]) == (True, 3)


def test_parts_of_a_message() -> None:
    content = [
        {"type": "input_text", "text": "See"},
        {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low"},
        {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,AA"},
    ]
    assert messages({"role": "user", "content": content}) == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "See"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}},
                {"type": "file", "file": {"file_data": "data:application/pdf;base64,AA", "filename": "a.pdf"}},
            ],
        }
    ]


def test_a_turn_of_an_agent() -> None:
    """case 11: an assistant that only called tools has no content."""
    assert messages(
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
        user("Go"),
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "a", "arguments": '{"x":1}'},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "function_call", "call_id": "c2", "name": "b", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_image", "image_url": "http://i"}],
        },
        {"type": "function_call", "call_id": "c3", "name": "a", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c3", "output": [{"type": "input_text", "text": "three"}]},
        {"type": "local_shell_call", "call_id": "l", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "heard_of_tomorrow", "data": {}},
        instructions="Base.",
    ) == [
        {"role": "system", "content": "Base.\n\nRules."},
        {"role": "user", "content": "Go"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [made_call("a", "c1", '{"x":1}'), made_call("b", "c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "(shown in the next message)"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://i"}}]},
        {"role": "assistant", "content": None, "tool_calls": [made_call("a", "c3")]},
        {"role": "tool", "tool_call_id": "c3", "content": "three"},
    ]


def test_text_between_calls_stays_with_them() -> None:
    said = messages(
        user("Go"),
        {"type": "message", "role": "assistant", "content": "First "},
        {"type": "function_call", "call_id": "c1", "name": "a", "arguments": "{}"},
        {"type": "message", "role": "assistant", "content": "and"},
        {"type": "function_call", "call_id": "c2", "name": "b", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": "2"},
    )
    assert [message["role"] for message in said] == ["user", "assistant", "tool", "tool"]
    assert said[1] == {
        "role": "assistant",
        "content": "First and",
        "tool_calls": [made_call("a", "c1"), made_call("b", "c2")],
    }


def test_earlier_items_come_first_and_can_be_referred_to() -> None:
    earlier = [user("One"), {**MESSAGE, "id": "msg_9"}]
    said = messages({"type": "item_reference", "id": "msg_9"}, user("Two"), earlier=earlier, instructions="New.")
    assert [message["content"] for message in said] == ["New.", "One", "Looking 北京🌍.", "Two"]


def test_tools() -> None:
    body = chat(tools=[AGENTS, FUNCTION, PATCH, {"type": "web_search"}], tool_choice="required")
    functions = {tool["function"]["name"]: tool["function"] for tool in body["tools"]}
    assert list(functions) == ["f", "apply_patch", "multi_agent_v1__spawn_agent", "multi_agent_v1__exec"]
    assert functions["f"] == {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert functions["apply_patch"]["parameters"]["required"] == ["input"]
    assert functions["apply_patch"]["description"].endswith("lark grammar:\nstart: x")
    assert body["tool_choice"] == "required"


@pytest.mark.parametrize("kind", ["additional_tools", "tool_search_output"])
def test_tools_that_came_in_the_conversation(kind: str) -> None:
    body = chat(input=[user("Go"), {"type": kind, "role": "developer", "tools": [FUNCTION]}])
    assert [tool["function"]["name"] for tool in body["tools"]] == ["f"]
    assert [message["role"] for message in body["messages"]] == ["user"]


def test_no_tool_choice_without_tools() -> None:
    body = chat(tools=[{"type": "web_search"}], tool_choice="auto", parallel_tool_calls=False)
    assert not {"tools", "tool_choice", "parallel_tool_calls"} & set(body)


@pytest.mark.parametrize(
    ("choice", "said", "names"),
    [
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}, 4),
        ({"type": "custom", "name": "apply_patch"}, {"type": "function", "function": {"name": "apply_patch"}}, 4),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}, "auto", 1),
    ],
)
def test_tool_choice(choice: Any, said: Any, names: int) -> None:
    body = chat(tools=[FUNCTION, PATCH, AGENTS], tool_choice=choice)
    assert (body["tool_choice"], len(body["tools"])) == (said, names)


def test_names_that_chat_does_not_allow() -> None:
    space = {"type": "namespace", "name": "mcp__a.b__", "tools": [{"type": "function", "name": "x" * 80}]}
    twin = {"type": "function", "name": "multi_agent_v1__spawn_agent"}
    names = [tool["function"]["name"] for tool in chat(tools=[space, AGENTS, twin])["tools"]]
    assert len(set(names)) == 4
    assert all(len(name) <= 64 and "." not in name for name in names)
    assert names[0] == "multi_agent_v1__spawn_agent"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": True}, "background"),
        ({"n": 2}, "n"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "input[0]"),
        ({"input": [{"id": "msg_x"}]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "u"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "file_search"}}, "tool_choice"),
    ],
)
def test_what_chat_cannot_say_is_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InputError) as caught:
        chat(**body)
    assert caught.value.param == param


@pytest.mark.parametrize("body", [b"", b"[]", b"{"])
def test_a_body_that_is_no_object(body: bytes) -> None:
    with pytest.raises(InputError):
        translate(Ask(RECEIPT, "r0", "responses", body, False))


@settings(deadline=None, max_examples=100)
@given(JSON, JSON, JSON)
def test_strange_requests_are_refused_or_said(items: Any, tools: Any, choice: Any) -> None:
    body = json.dumps({"input": [items], "tools": [tools], "tool_choice": choice, "text": items, "reasoning": choice})
    try:
        made = translate(Ask(RECEIPT, "r0", "responses", body.encode(), True))
    except InputError:
        return
    assert json.loads(made.ask.body)["messages"]
