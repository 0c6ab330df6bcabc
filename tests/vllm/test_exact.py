"""What a real vLLM answers with is exactly the release that was asked for: transformers says the same of its tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reef.core.nouns import Span
from reef.engines import Ask
from reef.engines.sse import Events
from tests.vllm.kit import BASE, FULLS, LORAS, Vllm, World, apart, ask, collect, engine_of

pytestmark = pytest.mark.vllm
EXACT = 1e-4  # mean distance of log-probs in float32; 6e-6 was measured


@pytest.mark.parametrize("release", [BASE, LORAS[0], FULLS[0]], ids=["base", "lora", "full"])
async def test_answers_are_exact(vllm: Vllm, world: World, place: Path, release: str) -> None:
    async with engine_of(world, place, vllm.url) as engine:
        await engine.load(release)
        for stream in (False, True):
            head, pieces, answer = await collect(engine, ask(release, stream=stream, n=2, max_tokens=24))
            assert head.status == 200
            assert answer.untrainable is None
            assert answer.model == world.model.name
            assert release not in b"".join(piece.data for piece in pieces).decode()
            assert answer.prompt_ids
            for choice in answer.choices or ():
                assert choice.output_ids
                assert choice.logprobs
                assert choice.spans == (Span(release, 0, len(choice.output_ids)),)
                whole = [*answer.prompt_ids, *choice.output_ids]
                true = world.truth(release, whole, len(answer.prompt_ids))
                assert apart(choice.logprobs, true) < EXACT
        (rated,) = await engine.rate(release, [whole], [len(answer.prompt_ids)])
        assert apart(rated, true) < EXACT
        if release != BASE:
            assert apart(world.truth(BASE, whole, len(answer.prompt_ids)), true) > 100 * EXACT


async def test_a_colder_draw_is_exact_too(vllm: Vllm, world: World, place: Path) -> None:
    async with engine_of(world, place, vllm.url) as engine:
        _, _, answer = await collect(engine, ask(LORAS[1], temperature=0.7, max_tokens=24))
    assert answer.untrainable is None
    (choice,) = answer.choices or ()
    whole = [*(answer.prompt_ids or ()), *(choice.output_ids or ())]
    true = world.truth(LORAS[1], whole, len(answer.prompt_ids or ()), temperature=0.7)
    assert apart(choice.logprobs or (), true) < EXACT


async def test_the_client_sees_only_what_it_asked_for(vllm: Vllm, world: World, place: Path) -> None:
    async with engine_of(world, place, vllm.url) as engine:
        _, (piece,), answer = await collect(engine, ask(LORAS[0]))
        _, pieces, streamed = await collect(engine, ask(LORAS[0], stream=True))
        _, (scored,), _ = await collect(engine, ask(LORAS[0], logprobs=True, top_logprobs=2))
        _, (counted,), _ = await collect(engine, Ask("0" * 32, LORAS[0], "count", ask().body, False))
    body = json.loads(piece.data)
    assert body["model"] == world.model.name
    assert not body.get("prompt_token_ids")
    assert not body["choices"][0].get("token_ids")
    assert body["choices"][0]["logprobs"] is None
    assert json.loads(counted.data) == {"input_tokens": len(answer.prompt_ids or ())}
    events = Events().feed(b"".join(each.data for each in pieces))
    assert events[-1].data == "[DONE]"
    for event in events[:-1]:
        chunk = json.loads(event.data or "")
        assert "prompt_token_ids" not in chunk
        assert all("token_ids" not in choice and choice["logprobs"] is None for choice in chunk["choices"])
    assert streamed.usage is not None
    assert len(json.loads(scored.data)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2


async def test_a_prompt_is_made_into_the_tokens_of_the_folder_here(vllm: Vllm, world: World, place: Path) -> None:
    from reef.engines.local.text import Text

    text = Text(world.model.path)
    async with engine_of(world, place, vllm.url) as engine:
        _, _, answer = await collect(engine, ask(text="naïve café — 你好"))
    rendered = text.render([{"role": "user", "content": "naïve café — 你好"}])
    assert list(answer.prompt_ids or ()) == text.encode(rendered)
