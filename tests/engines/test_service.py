"""Long prompts: how many are made into tokens at once, and what becomes of those nobody waits for."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from reef.core import wire
from reef.core.errors import BusyError, ContextError, InputError
from reef.engines.local.layout import read_layout
from reef.engines.local.server import Options
from reef.engines.local.service import ENCODERS, Service
from tests.engines.kit import Releases, ask, lora_files, make_lora, make_tiny, running
from tests.engines.test_client import collect


async def test_a_client_that_left_has_its_prompt_not_begun(tiny: Path) -> None:
    service = Service(tiny, Releases(), Options(dtype="float32", threads=1))
    begun, go = [], threading.Event()

    def held(text: str, context: int) -> list[int]:
        begun.append(len(text))
        go.wait(10)
        return [1]

    service._text.fit = held  # type: ignore[method-assign]
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 20_000}]}).encode()

    async def one() -> None:
        answer = service.handle(wire.Generate(release_id="base", body=body, priority=0))
        assert isinstance(answer, AsyncIterator)
        await anext(answer)

    tasks = [asyncio.create_task(one()) for _ in range(ENCODERS + 3)]
    while len(begun) < ENCODERS:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    assert len(begun) == ENCODERS
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    go.set()
    await asyncio.to_thread(service._encoders.shutdown, wait=True)
    assert len(begun) == ENCODERS


async def test_prompts_of_megabytes_are_refused_while_others_are_answered(tiny: Path) -> None:
    async with running(tiny, Releases()) as engine:
        many = [collect(engine, ask("hello " * 1_700_000)) for _ in range(3)]
        crowd = collect(engine, ask([{"role": "user", "content": ""}] * 600))
        small = collect(engine, ask("Hello", max_tokens=2))
        *refused, answered = await asyncio.gather(*many, crowd, small, return_exceptions=True)
    assert [type(each) for each in refused] == [ContextError] * 4
    assert not isinstance(answered, BaseException)


async def test_what_a_client_may_get_wrong_is_not_the_engines_failure(tiny: Path) -> None:
    async with running(tiny, Releases()) as engine:
        with pytest.raises(InputError) as caught:
            await collect(engine, ask([{"role": "assistant", "content": None, "tool_calls": 5}]))
        assert caught.value.param == "messages[0].tool_calls"
        for cold in (1e-300, 1e-45, 1e-5, 1e-4):
            _, _, answer = await collect(engine, ask("Hello", temperature=cold, max_tokens=3))
            _, _, greedy = await collect(engine, ask("Hello", temperature=0, max_tokens=3))
            assert (answer.choices or ())[0].output_ids == (greedy.choices or ())[0].output_ids


async def test_a_message_with_a_token_that_the_weights_lack_is_refused_alone(tmp_path: Path) -> None:
    """As in folders whose tokenizer has one mark more than the model, such as a <pad> that was added later."""
    folder = make_tiny(tmp_path / "m")
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    place = folder / "tokenizer.json"
    given = json.loads(place.read_text())
    mark = {"id": vocabulary, "content": "<more>", "special": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    given["added_tokens"].append(mark | plain)
    place.write_text(json.dumps(given))
    async with running(folder, Releases()) as engine:
        long = asyncio.create_task(collect(engine, ask("Hello", max_tokens=60)))
        await asyncio.sleep(0.02)
        with pytest.raises(InputError, match=f"token {vocabulary}") as caught:
            await collect(engine, ask("Hello <more> there"))
        assert caught.value.param == "messages"
        await long


async def test_a_prompt_of_no_tokens_is_refused(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    async with running(folder, Releases()) as engine:
        with pytest.raises(InputError, match="no tokens"):
            await asyncio.wait_for(collect(engine, ask("")), 20)
        await collect(engine, ask("Hello", max_tokens=2))


async def test_a_load_goes_before_answers_that_wait(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases = Releases({"l0": lora_files(make_lora(tmp_path / "l0", read_layout(tiny), seed=0))})
    ended: list[int] = []

    async def answer(number: int, tokens: int) -> None:
        await collect(engine, ask("Hello", max_tokens=tokens, seed=number))
        ended.append(number)

    async with running(tiny, releases, slots=1) as engine:
        asked = [asyncio.create_task(answer(number, 40)) for number in range(5)]
        await asyncio.sleep(0.05)
        await engine.load("l0")
        assert len(ended) <= 2
        await asyncio.gather(*asked)
        monkeypatch.setattr("reef.engines.local.service.PROBE", 0.05)
        long = asyncio.create_task(answer(9, 400))
        await asyncio.sleep(0.05)
        with pytest.raises(BusyError, match="all slots are taken"):
            await engine.load("l0")
        await long
