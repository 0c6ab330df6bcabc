"""Samples become tensors exactly as recorded, or are refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from reef.core.errors import TrainError
from reef.core.wire import Datum
from reef.engines.local.layout import Layout, read_layout
from reef.trainers.local.rows import build

Samples = Callable[..., list[Datum]]


@pytest.fixture
def layout(tiny: Path) -> Layout:
    return read_layout(tiny)


@pytest.mark.parametrize("tokens", [1, 40, 10_000])
def test_every_recorded_token_is_there_once(layout: Layout, samples: Samples, tokens: int) -> None:
    data = samples(9)
    batch = build(data, layout, tokens=tokens)
    assert len(batch) == (9 if tokens == 1 else 1 if tokens == 10_000 else len(batch))
    found = []
    for rows in batch:
        at = 0
        for length, reward in zip(rows.lengths, rows.rewards, strict=True):
            cut = slice(at, at + length)
            ids = rows.packed.ids[rows.predicts[cut]].tolist()
            targets = rows.targets[cut].tolist()
            assert ids[1:] == targets[:-1]  # each predicting state stands one token before its target
            found.append(
                (ids[0], targets, rows.mask[cut].tolist(), [round(x, 4) for x in rows.logprobs[cut].tolist()], reward)
            )
            at += length
        assert rows.total.samples == 9
        assert rows.total.tokens == sum(sum(one.mask) for one in data)
    expected = [
        (
            one.tokens[one.prompt_length - 1],
            one.tokens[one.prompt_length :],
            [float(x) for x in one.mask],
            [round(x, 4) for x in one.logprobs],
            one.reward,
        )
        for one in data
    ]
    assert sorted(map(repr, found)) == sorted(map(repr, expected))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt_length": 0}, "prompt"),
        ({"prompt_length": 99}, "response"),
        ({"mask": [1]}, "mask"),
        ({"logprobs": []}, "log-prob"),
        ({"tokens": [1] * 200, "prompt_length": 199, "mask": [1], "logprobs": [-1.0]}, "context"),
        ({"tokens": [1, 2, 61], "prompt_length": 2, "mask": [1], "logprobs": [-1.0]}, "vocabulary"),
        ({"tokens": [1, 2, -1], "prompt_length": 2, "mask": [1], "logprobs": [-1.0]}, "vocabulary"),
        ({"tokens": [1, 2, 3], "prompt_length": 2, "mask": [2], "logprobs": [-1.0]}, "other than 0 and 1"),
        ({"tokens": [1, 2, 3], "prompt_length": 2, "mask": [1], "logprobs": [float("nan")]}, "log-prob"),
        ({"tokens": [1, 2, 3], "prompt_length": 2, "mask": [1], "logprobs": [-1e308]}, "log-prob"),
        ({"tokens": [1, 2, 3], "prompt_length": 2, "mask": [1], "logprobs": [0.5]}, "log-prob"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 1e-300}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"reward": float("inf")}, "reward"),
        ({"reward": 1e308}, "reward"),
    ],
)
def test_a_sample_that_cannot_train_is_left_out_and_named(
    layout: Layout, samples: Samples, change: dict[str, object], words: str
) -> None:
    """Each sample is judged alone: the others go on, and only they are counted. Alone it is an error."""
    data = samples(3)
    bad = data[1] = msgspec.structs.replace(data[1], **change)
    left_out: list[str] = []
    batch = build(data, layout, left_out=left_out)
    (reason,) = left_out
    assert re.search(words, reason)
    assert f"{1:032x}:0" in reason
    total = batch[0].total
    assert (total.samples, total.tokens) == (2, sum(data[0].mask) + sum(data[2].mask))
    assert sum(len(rows.lengths) for rows in batch) == 2
    with pytest.raises(TrainError, match=words):
        build([bad], layout)


def test_nothing_to_train(layout: Layout, samples: Samples) -> None:
    with pytest.raises(TrainError, match="no trainable token"):
        build([], layout)
    blank = [msgspec.structs.replace(one, mask=[0] * len(one.mask)) for one in samples(2)]
    with pytest.raises(TrainError, match="no trainable token"):
        build(blank, layout)
