from __future__ import annotations

import json
from typing import Any

import pytest

from reef.core.errors import InputError
from reef.core.nouns import Sampling
from reef.engines.local.chat import parse


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def test_defaults() -> None:
    chat = parse(body())
    assert chat.sampling == Sampling()
    assert (chat.choices, chat.logprobs, chat.top_logprobs) == (1, False, 0)


def test_fields_are_read() -> None:
    chat = parse(body(temperature=0, top_p=0.5, top_k=3, max_tokens=7, seed=-1, stop="x", n=2, logprobs=True))
    assert chat.sampling == Sampling(0.0, 0.5, 3, 7, -1, ("x",))
    assert chat.choices == 2
    assert chat.logprobs


def test_the_newer_limit_wins() -> None:
    assert parse(body(max_tokens=5, max_completion_tokens=9)).sampling.max_tokens == 9
    assert parse(body(max_tokens=5, max_completion_tokens=None)).sampling.max_tokens == 5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": "9"}, "max_completion_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": 0.5}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"seed": "a"}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": 5}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [5]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": ""}] * 70_000}, "messages"),
        ({"tools": 5}, "tools"),
        ({"tools": [5]}, "tools"),
        (
            {"tools": [{"function": {"name": "a"}}], "tool_choice": {"function": {"name": "b"}}},
            "tool_choice.function.name",
        ),
        ({"stream_options": 5}, "stream_options"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(body(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize("given", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"messages": NaN}'])
def test_what_is_no_request(given: bytes) -> None:
    with pytest.raises(InputError):
        parse(given)


def test_content_of_all_shapes() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = parse(
        body(messages=[{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": []}])
    )
    assert [message["content"] for message in chat.messages] == ["ab", ""]


@pytest.mark.parametrize("given", [0, -0.0, 1e-300, 1e-45, 9e-5])
def test_a_temperature_too_low_to_divide_by_is_greedy(given: float) -> None:
    assert parse(body(temperature=given)).sampling.temperature == 0.0
    assert parse(body(temperature=1e-4)).sampling.temperature == 1e-4


def test_tools_are_an_offer() -> None:
    tool = {"type": "function", "function": {"name": "add", "description": "Adds."}}
    found = parse(body(tools=[tool, {"type": "web_search"}], tool_choice="required", parallel_tool_calls=False)).tools
    assert found is not None
    assert (set(found.names), found.open, found.wanted, found.single) == ({"add"}, True, "", True)
    assert parse(body(tools=[])).tools is parse(body(tool_choice="none")).tools is None
