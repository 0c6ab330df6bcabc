"""A real vLLM that is killed is left out, and is given its weights again when it is back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from reef.core.errors import EngineError
from reef.engines import Piece
from tests.engines.remote.stub import serving
from tests.engines.remote.stub_vllm import VllmStub
from tests.vllm.kit import LORAS, START, Vllm, World, apart, ask, collect, engine_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.fixture
def killed(vllm: Vllm) -> Iterator[Vllm]:
    """The server, for a test that ends its life; whatever became of it, it runs afterwards."""
    yield vllm
    if not vllm.runs:
        vllm.start()
        vllm.wait()


async def test_a_server_that_is_killed_comes_back(killed: Vllm, world: World, place: Path) -> None:
    async with engine_of(world, place, killed.url) as engine:
        await engine.load(LORAS[0])
        with pytest.raises(EngineError):  # in the middle of a stream
            async with aclosing(engine.answer(ask(LORAS[0], stream=True, max_tokens=200, min_tokens=200))) as items:
                async for item in items:
                    if isinstance(item, Piece):
                        killed.kill()
        assert not await engine.ready()
        with pytest.raises(EngineError, match=r"refused the connection"):
            await collect(engine, ask(LORAS[0]))
        killed.start()
        async with asyncio.timeout(START):
            while not await engine.ready():
                await asyncio.sleep(1.0)
        _, _, answer = await collect(engine, ask(LORAS[0]))
        assert answer.untrainable is None
        (choice,) = answer.choices or ()
        whole = [*(answer.prompt_ids or ()), *(choice.output_ids or ())]
        assert apart(choice.logprobs or (), world.truth(LORAS[0], whole, len(answer.prompt_ids or ()))) < 1e-4


async def test_requests_of_a_second_server_that_dies_go_to_the_real_one(vllm: Vllm, world: World, place: Path) -> None:
    """The second is a stub (two real ones are large); a session that it had moves, and none fails."""
    stub = VllmStub(world.model.path, name="base")
    async with serving(stub), engine_of(world, place, vllm.url, stub.url) as engine:
        homes = {}
        for number in range(6):
            before = len(stub.asked("/v1/chat/completions"))
            await collect(engine, ask(session=str(number), max_tokens=1))
            homes[number] = len(stub.asked("/v1/chat/completions")) > before
        stub.kill()
        for number in homes:
            _, _, answer = await collect(engine, ask(session=str(number), max_tokens=1))
            assert answer.untrainable is None
