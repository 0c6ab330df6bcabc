from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.core.errors import ContextError, InputError
from reef.engines.local.text import LONG, PROBE, Stream, Text, degrade
from reef.engines.local.tools import Offer, describe, read_offer
from tests.engines.kit import make_tiny


@pytest.fixture(scope="session")
def text(tiny: Path) -> Text:
    return Text(tiny)


def streamed(text: Text, ids: list[int], stops: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    stream, out = Stream(text, stops), []
    for token in ids:
        out.append(stream.push(token))
        if stream.stopped:
            break
    return [*out, stream.finish()], stream.stopped


@given(st.text(max_size=40))
def test_pieces_are_whole_characters_and_join_to_the_text(text: Text, given_text: str) -> None:
    pieces, _ = streamed(text, text.encode(given_text))
    assert "".join(pieces) == given_text
    if "�" not in given_text:
        assert not any("�" in piece for piece in pieces)


@given(st.lists(st.integers(3, 258), max_size=12))
def test_any_bytes_come_out_as_the_tokenizer_decodes_them(text: Text, ids: list[int]) -> None:
    pieces, _ = streamed(text, ids)
    assert "".join(pieces) == text.decode(ids)


@given(st.text("abé", max_size=30), st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_cut_where_they_first_are(text: Text, given_text: str, stops: list[str]) -> None:
    pieces, stopped = streamed(text, text.encode(given_text), tuple(stops))
    said = "".join(pieces)
    first = min((given_text.find(stop) for stop in stops if stop in given_text), default=None)
    if first is None:
        assert said == given_text
        assert not stopped
    else:
        assert stopped
        assert given_text.startswith(said)
        assert not any(stop in said for stop in stops)
        # With stops that overlap, the one completed first decides, at most a stop's length after the earliest place.
        assert len(said) <= first + max(map(len, stops))


def test_a_stop_string_across_tokens(text: Text) -> None:
    ids = text.encode("the plan END of it")
    assert len(ids) > 10
    pieces, stopped = streamed(text, ids, ("END",))
    assert "".join(pieces) == "the plan "
    assert stopped


def test_half_a_character_waits(text: Text) -> None:
    first, second = text.encode("ü")
    stream = Stream(text)
    assert stream.push(first) == ""
    assert stream.push(second) == "ü"


def test_developer_and_tool_messages_degrade(text: Text) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "c"},
    ]
    rendered = text.render(messages)
    assert rendered == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        '<|im_start|>assistant\n[{"name": "add", "arguments": "{}"}]<|im_end|>\n'
        "<|im_start|>user\nTool result:\n7<|im_end|>\n<|im_start|>assistant\n"
    )
    assert degrade({"role": "user", "content": "x"}) == {"role": "user", "content": "x"}


def test_a_template_may_refuse(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InputError, match="roles must alternate") as caught:
        Text(folder).render([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_a_template_runs_in_a_sandbox(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InputError):
        Text(folder).render([{"role": "user", "content": "x"}])


def test_a_folder_without_template_says_what_to_do(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    with pytest.raises(InputError, match=r"chat_template\.jinja"):
        Text(folder)


class Spy:
    """The tokenizer, and the lengths of all that it was given."""

    def __init__(self, text: Text) -> None:
        self.real, self.given = text.tokenizer, list[int]()

    def encode(self, text: str, **options: Any) -> Any:
        self.given.append(len(text))
        return self.real.encode(text, **options)

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        self.given += map(len, texts)
        return self.real.encode_batch(texts, **options)


def test_what_cannot_fit_is_refused_before_it_is_made_into_tokens(tiny: Path) -> None:
    text = Text(tiny)
    spy = text.tokenizer = Spy(text)
    with pytest.raises(ContextError, match="10000000 characters") as caught:
        text.fit("hello " * 1_666_666 + "you!", 512)
    assert caught.value.param == "messages"
    assert spy.given == []
    text.longest = 10_000
    with pytest.raises(ContextError):
        text.fit("hello " * 100_000, 512)
    assert spy.given == [512 * PROBE]


def test_what_fits_or_nearly_comes_back_whole(text: Text) -> None:
    for words in (1, 90, 200, 2 * LONG):
        said = "the one " * words
        context = len(text.encode(said))
        assert text.fit(said, context) == text.encode(said)
        assert len(text.fit(said, context - 1)) == context
        assert text.tokenizer.encode(said, add_special_tokens=False).ids == text.encode(said)


def test_a_long_text_lets_other_threads_work(text: Text) -> None:
    ticks, done = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.is_set():
            time.sleep(0.001)
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    text.tokenizer.encode_batch(["hello world " * 30_000], add_special_tokens=False)
    before = ticks
    encoding = text.encode("hello world " * 30_000)
    after = ticks
    done.set()
    thread.join()
    assert len(encoding) > 300_000
    assert after - before >= 20  # some hundreds; two or three when the interpreter is held


@pytest.mark.parametrize("calls", [5, [5], [{"function": 5}]])
def test_whatever_a_template_raises_is_a_refusal(tmp_path: Path, calls: object) -> None:
    folder = make_tiny(tmp_path / "m")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ 1 // (m.tool_calls and 0) }}{% endfor %}")
    with pytest.raises(InputError):
        Text(folder).render([{"role": "assistant", "content": "", "tool_calls": calls}])


KNOWING = (
    "{% if tools %}{{ 'tools ' + (tools | tojson) + '\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or () %} {{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}"
    "{{ '\n' }}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}, "extra": 1}
TALK: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": "1 + 2?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": '{"a":1}'}}],
    },
    {"role": "tool", "content": "3", "tool_call_id": "c"},
]


def offer(**fields: Any) -> Offer:
    found = read_offer({"tools": [TOOL], **fields})
    assert found is not None
    return found


def templated(folder: Path, source: str) -> Text:
    made = make_tiny(folder)
    (made / "chat_template.jinja").write_text(source)
    return Text(made)


def test_a_template_without_tools_is_told_them_in_words(text: Text) -> None:
    assert text.render(TALK, offer()) == (
        f"<|im_start|>system\nBe kind.\n\n{describe(offer())}<|im_end|>\n"
        "<|im_start|>user\n1 + 2?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    closed = text.render(TALK, offer(tool_choice="none"))
    assert closed == text.render(TALK, offer()).replace(f"\n\n{describe(offer())}", "")


def test_a_template_that_names_tools_gets_them(tmp_path: Path) -> None:
    text = templated(tmp_path / "m", KNOWING)
    said = 'system: Be kind.\nuser: 1 + 2?\nassistant:  add {"a": 1}\ntool: 3\n'
    assert text.render(TALK, offer()) == f"tools {json.dumps([TOOL])}\n{said}"
    assert text.render(TALK, offer(tool_choice="none")) == said


def test_a_template_may_write_arguments_as_the_text_they_are(tmp_path: Path) -> None:
    text = templated(
        tmp_path / "m", KNOWING.replace("call.function.arguments | tojson", "'=' + call.function.arguments")
    )
    assert 'assistant:  add ={"a":1}\n' in text.render(TALK, offer())


def test_a_template_for_tools_of_its_own_is_for_them_alone(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    given_templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": KNOWING}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": given_templates}))
    text = Text(folder)
    assert text.render(TALK) == "plain"
    assert text.render(TALK, offer()).startswith("tools [")


def test_prompts_without_tools_are_the_templates_own(text: Text, tmp_path: Path) -> None:
    plain = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi <tool_call>"}]
    assert text.render(plain) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi <tool_call><|im_end|>\n<|im_start|>assistant\n"
    )
    assert text.render(TALK) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n1 + 2?<|im_end|>\n"
        '<|im_start|>assistant\n[{"name": "add", "arguments": "{\\"a\\":1}"}]<|im_end|>\n'
        "<|im_start|>user\nTool result:\n3<|im_end|>\n<|im_start|>assistant\n"
    )
    knowing = templated(tmp_path / "m", KNOWING)
    assert knowing.render(TALK) == 'system: Be kind.\nuser: 1 + 2?\nassistant:  add "{\\"a\\":1}"\ntool: 3\n'
