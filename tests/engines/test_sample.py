from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reef.engines.local.sample import Draw, pick, sample, truncate


def draw(seed: int = 0, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, top: int = 0) -> Draw:
    return Draw(temperature, top_p, top_k, random.Random(seed), top)


def test_greedy_takes_the_likeliest_and_tells_its_untempered_logprob() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    (found,) = sample(logits, [draw(temperature=0.0)])
    assert found.token == 1
    assert found.logprob == pytest.approx(torch.log_softmax(logits, -1)[0, 1].item())


def test_logprobs_are_those_of_the_tempered_distribution() -> None:
    logits = torch.randn(4, 50)
    heats = [0.5, 1.0, 1.7, 2.0]
    for row, found in enumerate(sample(logits, [draw(seed=3, temperature=heat) for heat in heats])):
        expected = torch.log_softmax(logits[row] / heats[row], -1)[found.token].item()
        assert found.logprob == pytest.approx(expected, abs=1e-6)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    chances = torch.softmax(logits / 0.8, -1).tolist()
    numbers, count = random.Random(1), 4000
    one = Draw(0.8, 1.0, 0, numbers)
    seen = Counter(found.token for found in sample(logits.repeat(count, 1), [one] * count))
    # Pearson's statistic with 3 degrees of freedom: above 16.3 once in a thousand, and this seed is fixed.
    assert sum((seen[i] - count * p) ** 2 / (count * p) for i, p in enumerate(chances)) < 16.3


def test_a_seed_gives_the_same_whoever_shares_the_batch() -> None:
    logits = torch.randn(6, 200)
    alone = [sample(logits[row : row + 1], [draw(seed=row)])[0] for row in range(6)]
    together = sample(logits, [draw(seed=row) for row in range(6)])
    assert alone == together


def test_top_k_and_top_p_only_draw_from_what_they_leave() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    numbers = random.Random(0)
    for cut, allowed in (({"top_k": 2}, {0, 1}), ({"top_p": 0.6}, {0, 1}), ({"top_p": 0.0}, {0})):
        one = Draw(1.0, cut.get("top_p", 1.0), int(cut.get("top_k", 0)), numbers)
        assert {sample(logits, [one])[0].token for _ in range(200)} == allowed


@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=20), st.integers(0, 20), st.floats(0, 1))
def test_truncation_keeps_a_likeliest_set(raw: list[float], top_k: int, top_p: float) -> None:
    chances = torch.tensor(raw) / sum(raw)
    left = truncate(chances, top_k, top_p)
    kept = left > 0
    assert kept.any()
    assert torch.equal(left[kept], chances[kept])
    if (~kept).any():
        assert chances[kept].min() >= chances[~kept].max()
    if top_k:
        assert kept.sum() <= top_k


def test_a_chance_of_zero_is_never_drawn() -> None:
    logits = torch.full((1, 8), -math.inf)
    logits[0, 3] = 0.0

    class Last(random.Random):
        def random(self) -> float:
            return 1 - 2**-53

    assert sample(logits, [Draw(1.0, 1.0, 0, Last())])[0].token == 3
    assert sample(logits, [draw()])[0].token == 3


def test_the_likeliest_are_listed_in_order() -> None:
    (found,) = sample(torch.tensor([[0.0, 3.0, 2.0, 1.0]]), [draw(top=3)])
    assert [token for token, _ in found.top] == [1, 2, 3]
    assert found.top == sorted(found.top, key=lambda pair: -pair[1])


@given(st.integers(1, 600), st.floats(0, 1, exclude_max=True), st.integers(0, 1000))
def test_the_picked_token_s_stretch_holds_the_point(size: int, point: float, seed: int) -> None:
    seeded = torch.Generator().manual_seed(seed)
    chances = torch.softmax(torch.randn(2, size, generator=seeded) * 4, -1)
    chances[:, :: 3 + seed % 5] = 0
    if not chances.sum(-1).all():
        return
    picked = pick(chances, torch.tensor([point, point], dtype=torch.float64))
    heights = chances.double().cumsum(-1)
    for row, token in enumerate(picked.tolist()):
        assert chances[row, token] > 0
        goal = point * heights[row, -1].item()
        assert (
            heights[row, token].item() - chances[row, token].item() - 1e-6 <= goal <= heights[row, token].item() + 1e-6
        )


def test_a_wide_set_is_cut_as_a_narrow_one() -> None:
    chances = torch.full((5000,), 1 / 5000)
    assert (truncate(chances, 0, 0.9) > 0).sum().item() == pytest.approx(4500, abs=2)
    assert (truncate(chances, 3000, 1.0) > 0).sum() == 3000
    assert (truncate(chances, 10, 0.5) > 0).sum() == 5
