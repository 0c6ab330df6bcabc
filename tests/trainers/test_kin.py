"""Answers to one prompt share its computation: they have micro-batches of their own where that saves enough."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from reef.core.wire import Datum
from reef.trainers.local.llama import Llama
from reef.trainers.local.rows import SHARED, build


@pytest.fixture
def model(tiny: Path) -> Llama:
    return Llama.load(tiny, torch.float32)


def datum(number: int, prompt: Sequence[int], response: Sequence[int]) -> Datum:
    return Datum(
        tokens=[*prompt, *response], prompt_length=len(prompt), mask=[1] * len(response),
        logprobs=[-1.0] * len(response), reward=float(number), record_id=f"{number:032x}", choice=0, temperature=1.0,
        lag=0,
    )  # fmt: skip


def batch(model: Llama, prompts: int, answers: int, length: int) -> list[Datum]:
    numbers = random.Random(0)

    def ids(count: int) -> list[int]:
        return [numbers.randrange(model.layout.vocab) for _ in range(count)]

    asked = [ids(length) for _ in range(prompts)]
    return [datum(number, asked[number % prompts], ids(1 + number % 3)) for number in range(prompts * answers)]


def test_answers_to_one_prompt_are_packed_together(model: Llama) -> None:
    data = batch(model, 3, 8, 24)
    assert SHARED <= 24 * 7
    rows = build(data, model.layout)
    assert [len(one.lengths) for one in rows] == [8, 8, 8]
    assert all(one.packed.prefix == 23 for one in rows)
    assert sorted(reward or 0.0 for one in rows for reward in one.rewards) == [float(number) for number in range(24)]
    assert {one.total.samples for one in rows} == {24}
    few = build(batch(model, 8, 2, 24), model.layout)
    assert [len(one.lengths) for one in few] == [16]  # too little to gain


def test_they_still_obey_the_limits(model: Llama) -> None:
    rows = build(batch(model, 1, 32, 24), model.layout, tokens=100)
    assert all(len(one.lengths) <= 4 for one in rows)
    assert sum(len(one.lengths) for one in rows) == 32


def test_log_probs_do_not_depend_on_it(model: Llama) -> None:
    data = batch(model, 2, 8, 24)

    def found(micro: Sequence[Datum]) -> dict[float, list[float]]:
        made: dict[float, list[float]] = {}
        for rows in build(micro, model.layout):
            with torch.no_grad():
                hidden = model.hidden(rows.packed)[rows.predicts]
                values = model.logprobs(hidden, rows.targets, rows.temperatures).split(list(rows.lengths))
            made |= {reward or 0.0: one.tolist() for reward, one in zip(rows.rewards, values, strict=True)}
        return made

    together = found(data)
    for one in data:
        alone = found([one])
        for reward, values in alone.items():
            assert together[reward] == pytest.approx(values, abs=1e-4)
