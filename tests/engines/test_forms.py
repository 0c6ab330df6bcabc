"""Answers in a form on the real model: all of them fit it, and the trainer finds the log-probs that were recorded."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
import torch

from reef.core.wire import Datum
from reef.engines import Answer
from reef.engines.local.folder import ModelFolder, prepare
from reef.trainers.local.llama import Llama
from reef.trainers.local.objective import Outputs
from reef.trainers.local.rows import build
from reef.trainers.local.shelf import Shelf
from tests.engines.kit import Releases, ask, running

pytestmark = pytest.mark.model

SUM = 'start: sum ";"\nsum: NUM | sum ("+" | "-") NUM\nNUM: /[0-9]{1,3}/'
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"regex": "(The|A) [a-z]{3,9} (is|was) [a-z ]{2,20}\\."}, "(The|A) [a-z]{3,9} (is|was) [a-z ]{2,20}\\."),
    "grammar": ({"grammar": SUM}, r"[0-9]{1,3}([+-][0-9]{1,3})*;"),
    "choice": ({"choice": ["Paris", "Rome", "New York", "Rome, Italy"]}, "Paris|Rome(, Italy)?|New York"),
}


@pytest.fixture(scope="module")
def model() -> ModelFolder:
    return prepare("smollm2-135m")


async def test_the_trainer_finds_the_recorded_logprobs(model: ModelFolder) -> None:
    data: list[Datum] = []
    async with running(model.path, Releases(), context=256) as engine:
        for form, pattern in FORMS.values():
            for temperature in (1.0, 0.7):
                question = ask(
                    "Name a city.", structured_outputs=form, temperature=temperature, n=2, seed=7, max_tokens=40
                )
                answer = [part async for part in engine.answer(question)][-1]
                assert isinstance(answer, Answer)
                assert answer.untrainable is None
                for choice in answer.choices or ():
                    if choice.finish_reason == "stop":
                        assert re.fullmatch(pattern, choice.text), choice.text
                    data.append(_datum(answer, choice, temperature))
    llama = Llama.load(model.path, torch.float32)
    differ = 0.0
    for datum in data:
        (rows,) = build([datum], Shelf(llama).known())
        (free,) = build([msgspec.structs.replace(datum, legal=None)], llama.layout)
        with torch.no_grad():
            hidden = llama.hidden(rows.packed)[rows.predicts]
            found = Outputs(llama, hidden, rows).logprobs()
            differ += (Outputs(llama, hidden, free).logprobs() - rows.logprobs).abs().max().item()
        torch.testing.assert_close(found, rows.logprobs, atol=2e-4, rtol=1e-4)
    assert len(data) == 12
    assert differ / len(data) > 0.5  # over all tokens they are others by far


def _datum(answer: Answer, choice: Any, temperature: float) -> Datum:
    assert answer.sampling is not None
    assert json.loads(answer.sampling.legal or "")
    prompt = answer.prompt_ids or ()
    return Datum(
        tokens=[*prompt, *choice.output_ids],
        prompt_length=len(prompt),
        mask=[1] * len(choice.output_ids),
        logprobs=list(choice.logprobs),
        reward=1.0,
        record_id="0" * 32,
        choice=choice.index,
        temperature=temperature,
        lag=0,
        legal=answer.sampling.legal,
    )
