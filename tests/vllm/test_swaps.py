"""Weights of a real vLLM change while it is asked: no request fails, and every answer is of the release asked for."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from reef.core.errors import EngineError
from reef.core.nouns import Span
from reef.engines import Answer, Piece
from reef.engines.remote.vllm import VllmEngine
from tests.vllm.kit import BASE, FULLS, LORAS, Vllm, World, apart, ask, collect, engine_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
SWAPS = int(os.environ.get("SWAPS", "100"))
FULL_SWAPS = 20
EXACT = 1e-4


async def load_of(engine: VllmEngine, release: Callable[[], str], until: asyncio.Event) -> list[Answer]:
    """Answers, one after the other, of whatever release is served then."""
    answers = []
    for number in itertools.count():
        if until.is_set():
            return answers
        wanted = release()
        _, _, answer = await collect(
            engine, ask(wanted, f"Say a word, {number}.", stream=number % 2 == 0, max_tokens=4)
        )
        (choice,) = answer.choices or ()
        assert answer.untrainable is None
        assert choice.spans == (Span(wanted, 0, len(choice.output_ids or ())),)
        answers.append(answer)
    raise AssertionError


async def test_a_hundred_adapters_are_served_one_after_the_other(
    vllm: Vllm, world: World, place: Path, tmp_path: Path
) -> None:
    """Each is a release of its own, loaded while requests run on the one before."""
    served = LORAS[0]
    until = asyncio.Event()
    async with engine_of(world, place, vllm.url, loras=8) as engine:
        await engine.load(served)
        asking = [asyncio.create_task(load_of(engine, lambda: served, until)) for _ in range(3)]
        try:
            for number in range(SWAPS):
                release = f"{number + 4096:040x}"
                world.known[release] = world.known[LORAS[number % len(LORAS)]]
                await engine.load(release)
                served = release
        finally:
            until.set()
        answers = [answer for found in await asyncio.gather(*asking) for answer in found]
        listed = vllm.get("/v1/models")["data"]
    assert len(answers) >= 4
    assert len(listed) <= 2 * 8 + 2
    for answer in answers[:: max(1, len(answers) // 3)]:
        (choice,) = answer.choices or ()
        whole = [*(answer.prompt_ids or ()), *(choice.output_ids or ())]
        true = world.truth(choice.spans[0].release_id, whole, len(answer.prompt_ids or ()))
        assert apart(choice.logprobs or (), true) < EXACT


async def test_twenty_sets_of_full_weights_take_turns(vllm: Vllm, world: World, place: Path) -> None:
    """Two engines, as two processes have them, that want different ones all the time."""
    async with (
        engine_of(world, place, vllm.url, turn=0.2, wait=300.0) as one,
        engine_of(world, place, vllm.url, turn=0.2, wait=300.0) as other,
    ):

        async def some(engine: VllmEngine, releases: tuple[str, ...]) -> list[Answer]:
            found = []
            for release in releases:
                _, _, answer = await collect(engine, ask(release, max_tokens=3, stream=True))
                assert answer.untrainable is None
                found.append(answer)
            return found

        half = FULL_SWAPS // 4
        given = await asyncio.gather(some(one, (FULLS[0], BASE) * half), some(other, (FULLS[1], FULLS[0]) * half))
    for answers in given:
        for answer in answers[-3:]:
            (choice,) = answer.choices or ()
            whole = [*(answer.prompt_ids or ()), *(choice.output_ids or ())]
            true = world.truth(choice.spans[0].release_id, whole, len(answer.prompt_ids or ()))
            assert apart(choice.logprobs or (), true) < EXACT


async def test_a_stream_ends_with_the_weights_that_it_began_with(vllm: Vllm, world: World, place: Path) -> None:
    async with engine_of(world, place, vllm.url, turn=0.0, wait=300.0) as engine:
        await engine.load(FULLS[0])
        request = ask(FULLS[0], stream=True, max_tokens=40, min_tokens=40)
        async with aclosing(engine.answer(request)) as items:
            loading: asyncio.Task[None] | None = None
            pieces = 0
            async for item in items:
                if isinstance(item, Piece):
                    pieces += 1
                    if loading is None:
                        loading = asyncio.create_task(engine.load(FULLS[1]))
                    assert not loading.done() or item.terminal
                elif isinstance(item, Answer):
                    answer = item
        assert pieces > 20
        assert loading is not None
        await loading
        (choice,) = answer.choices or ()
        whole = [*(answer.prompt_ids or ()), *(choice.output_ids or ())]
        assert len(choice.output_ids or ()) == 40
        # The last token is the only one whose end was free: min_tokens forbade the others to be one.
        true = world.truth(FULLS[0], whole, len(answer.prompt_ids or ()))
        assert apart(choice.logprobs or (), true) < 0.05
        _, _, after = await collect(engine, ask(FULLS[1]))
        (choice,) = after.choices or ()
        whole = [*(after.prompt_ids or ()), *(choice.output_ids or ())]
        assert apart(choice.logprobs or (), world.truth(FULLS[1], whole, len(after.prompt_ids or ()))) < EXACT
        await engine.load(BASE)


async def test_a_release_with_a_damaged_file_is_refused_and_the_others_stay(
    vllm: Vllm, world: World, place: Path, tmp_path: Path
) -> None:
    release = f"{99:040x}"
    found = world.known[LORAS[0]]
    cut = tmp_path / "adapter_model.safetensors"
    shutil.copyfile(found.files["adapter_model.safetensors"], cut)
    with cut.open("r+b") as file:
        file.truncate(cut.stat().st_size // 2)
    world.known[release] = replace(found, files={**found.files, "adapter_model.safetensors": cut})
    async with engine_of(world, place, vllm.url) as engine:
        await collect(engine, ask(LORAS[0], max_tokens=2))
        with pytest.raises(EngineError, match="load_lora_adapter"):
            await engine.load(release)
        _, _, answer = await collect(engine, ask(LORAS[0], max_tokens=2))
        assert answer.untrainable is None
