"""More LoRA releases than are resident, on the real model: all of them answer, each with its own weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from reef.core import wire
from reef.core.wire import Datum
from reef.engines import Answer
from reef.engines.local.client import LocalEngine
from reef.engines.local.folder import prepare
from reef.engines.local.layout import read_layout
from reef.trainers.local.llama import Llama
from reef.trainers.local.objective import Outputs
from reef.trainers.local.rows import build
from reef.trainers.local.shelf import Shelf
from tests.engines.kit import Releases, ask, lora_files, make_lora, running

pytestmark = pytest.mark.model

MANY, RESIDENT, CLIENTS, TOKENS = 32, 8, 8, 3


async def test_all_registered_releases_answer_with_their_own_weights(tmp_path: Path) -> None:
    model = prepare("smollm2-135m")
    layout = read_layout(model.path)
    places = {f"r{number}": make_lora(tmp_path / str(number), layout, seed=number, size=0.03) for number in range(MANY)}
    releases = Releases({name: lora_files(place) for name, place in places.items()})
    names = list(places)
    answers: dict[str, list[Answer]] = {name: [] for name in names}
    most = 0

    async def client(engine: LocalEngine, number: int) -> None:
        """A stretch of the releases, up to the first of the next client's: that one was asked long ago."""
        nonlocal most
        for turn in range(MANY // CLIENTS + 1):
            name = names[(number * (MANY // CLIENTS) + turn) % MANY]
            found = [part async for part in engine.answer(ask("Name it.", release=name, max_tokens=TOKENS))][-1]
            assert isinstance(found, Answer)
            answers[name].append(found)
            pong = await engine._client.call(wire.Ping())
            assert isinstance(pong, wire.Pong)
            most = max(most, len(set(pong.detail["resident"]) - {"base"}))

    async with running(model.path, releases, loras=RESIDENT, context=128) as engine:
        await asyncio.gather(*(client(engine, number) for number in range(CLIENTS)))
    assert sorted({len(each) for each in answers.values()}) == [1, 2]
    assert most <= RESIDENT
    assert len(releases.asked) > MANY  # some had left and were read again

    llama = Llama.load(model.path, torch.float32)
    shelf = Shelf(llama)
    for number, name in enumerate(names):
        lora = shelf.teacher(str(places[name]), releases, None).lora
        other = answers[names[(number + 1) % MANY]][0]
        data = [datum(each, 1.0) for each in answers[name]]
        (rows,) = build([*data, datum(other, 0.0)], layout)
        with torch.no_grad():
            found = Outputs(llama, llama.hidden(rows.packed, lora)[rows.predicts], rows).logprobs()
        off = (found - rows.logprobs).abs()
        pairs = zip(rows.rewards, rows.lengths, strict=True)
        mine = torch.cat([torch.full((length,), reward == 1.0) for reward, length in pairs])
        assert off[mine].max() < 2e-3, name
        assert off[~mine].max() > 0.02, name


def datum(answer: Answer, reward: float) -> Datum:
    choice = (answer.choices or ())[0]
    ids, prompt = choice.output_ids or (), answer.prompt_ids or ()
    return Datum(
        tokens=[*prompt, *ids],
        prompt_length=len(prompt),
        mask=[1] * len(ids),
        logprobs=list(choice.logprobs or ()),
        reward=reward,
        record_id="0" * 32,
        choice=0,
        temperature=1.0,
        lag=0,
    )
