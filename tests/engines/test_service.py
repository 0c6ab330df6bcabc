"""Long prompts: how many are made into tokens at once, and what becomes of those nobody waits for."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from reef.core import wire
from reef.core.errors import ContextError, InputError
from reef.engines.local.server import Options
from reef.engines.local.service import ENCODERS, Service
from tests.engines.kit import Releases, ask, running
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
