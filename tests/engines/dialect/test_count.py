"""count_tokens: read, asked of engines that can count, and estimated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.core.errors import InputError
from reef.core.nouns import Usage
from reef.engines import Answer
from reef.engines.dialect import read, translate
from reef.engines.dialect.count import estimate
from reef.engines.fake import FakeEngine, Fault
from reef.engines.local import service
from tests.engines.dialect.script import RECEIPT, answered, asking
from tests.engines.kit import Releases, ask, running

LONG = [{"role": "user", "content": "the an é " * 400}]  # more than the tiny model's context


def test_a_count_is_read() -> None:
    said = read("count_tokens", b'{"input_tokens": 2095}', stream=False)
    assert (said.finished, said.usage, said.choices(), said.reply) == (True, Usage(2095, 0), (), None)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"input_tokens": true}', b'{"input_tokens": "5"}'])
def test_what_is_no_count_is_not_finished(data: bytes) -> None:
    assert not read("count_tokens", data, stream=False).finished


def test_an_error_is_read() -> None:
    data = b'{"type":"error","error":{"type":"not_found_error","message":"no such model"}}'
    assert read("count_tokens", data, stream=False).error == "no such model"


def test_the_engine_is_asked_for_the_count_of_a_chat_body() -> None:
    made = translate(asking(dialect="count_tokens", max_tokens=..., system="S", stream=True))
    assert (made.ask.dialect, made.ask.stream, made.ask.query) == ("count", False, "")
    assert json.loads(made.ask.body) == {
        "model": "m",
        "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}],
    }
    with pytest.raises(InputError):
        translate(asking(dialect="count_tokens", messages=[]))


async def test_the_fake_engine_counts_its_words() -> None:
    messages = [{"role": "user", "content": "one two three"}]
    head, (piece,), answer = await answered(
        FakeEngine(), asking(dialect="count_tokens", messages=messages, max_tokens=...)
    )
    assert (head.status, piece.terminal, json.loads(piece.data)) == (200, True, {"input_tokens": 3})
    assert answer is not None
    assert answer.usage == Usage(3, 0)
    _, _, said = await answered(FakeEngine(), asking(messages=messages))
    assert said is not None
    assert len(said.prompt_ids or ()) == 3


async def test_a_refusal_is_in_anthropics_form() -> None:
    engine = FakeEngine()
    engine.faults.append(Fault("status", status=429))
    head, (piece,), _ = await answered(engine, asking(dialect="count_tokens"))
    assert head.status == 429
    assert json.loads(piece.data)["error"]["type"] == "rate_limit_error"
    assert json.loads(piece.data)["request_id"] == RECEIPT


async def counted(engine: Any, messages: list[dict[str, Any]]) -> int:
    _, (piece,), answer = await answered(engine, asking(dialect="count_tokens", messages=messages, max_tokens=...))
    assert answer is not None
    found: int = json.loads(piece.data)["input_tokens"]
    assert answer.usage == Usage(found, 0)
    assert read("count_tokens", piece.data, stream=False).finished
    return found


async def test_a_count_is_what_an_answer_reads(tiny: Path) -> None:
    messages = [{"role": "user", "content": "Hello the 北京"}, {"role": "assistant", "content": "An answer."}]
    async with running(tiny, Releases()) as engine:
        for given_messages in (messages[:1], messages):
            *_, answer = [item async for item in engine.answer(ask(given_messages, max_tokens=1))]
            assert isinstance(answer, Answer)
            assert await counted(engine, given_messages) == len(answer.prompt_ids or ())


async def test_what_is_longer_than_the_context_is_counted_too(tiny: Path) -> None:
    async with running(tiny, Releases()) as engine:
        short = await counted(engine, [{"role": "user", "content": "the an é "}])
        frame = await counted(engine, [{"role": "user", "content": ""}])
        assert await counted(engine, LONG) == (short - frame) * 400 + frame > 512
        crowd = [{"role": "user", "content": ""}] * 600
        assert await counted(engine, crowd) > 600
        with pytest.raises(InputError):
            await counted(
                engine, [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "u"}}]}]
            )


async def test_a_huge_prompt_is_measured_by_its_beginning(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tiny, Releases()) as engine:
        exact = await counted(engine, LONG)
        monkeypatch.setattr(service, "COUNTED", 1000)
        assert abs(await counted(engine, LONG) - exact) < exact * 0.05


@pytest.mark.model
async def test_the_real_model_counts_what_it_reads() -> None:
    from reef.engines.local.folder import prepare

    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital of Italy?"},
    ]
    async with running(prepare("smollm2-135m").path, Releases(), context=256) as engine:
        *_, answer = [item async for item in engine.answer(ask(messages, max_tokens=1))]
        assert isinstance(answer, Answer)
        assert await counted(engine, messages) == len(answer.prompt_ids or ())


def estimated(**body: Any) -> int:
    found: int = json.loads(estimate(body))["input_tokens"]
    return found


def test_an_estimate_is_about_a_token_for_four_bytes_of_text() -> None:
    words = "word " * 1000
    assert 1250 <= estimated(messages=[{"role": "user", "content": words}]) <= 1260
    assert 2500 <= estimated(system=words, messages=[{"role": "user", "content": words}]) <= 2510
    tool = {"name": "f", "description": words, "input_schema": {"type": "object"}}
    assert 1250 <= estimated(messages=[], tools=[tool]) <= 1270
    image = {"type": "image", "source": {"type": "base64", "data": "A" * 100_000}}
    assert 1600 <= estimated(messages=[{"role": "user", "content": [image]}]) <= 1620
    assert estimated() == 1


strange = st.recursive(
    st.none() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "a"]), inner),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["system", "messages", "tools"]), strange))
def test_any_json_has_an_estimate(body: dict[str, Any]) -> None:
    assert estimated(**body) >= 1
