"""SAO: the worked numbers of its equations, what a batch is, and which settings are refused."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.sao.recipe import SAORecipe
from reef.core.errors import ConfigError
from reef.core.load import load
from reef.core.nouns import Record, Report, Sample, Timing, Unit
from reef.trainers.local.losses import adaptive_lambda, dis, explained_variance, gae

NEW = torch.tensor([0.5, 0.2, 0.9, 0.05])
OLD = torch.tensor([0.4, 0.4, 0.1, 0.05])
ADVANTAGES = torch.tensor([1.0, 1.0, 1.0, -2.0])


def unit(number: int, *, score: float | None = 1.0, trainable: bool = True, mask: tuple[int, ...] = (1,)) -> Unit:
    name = f"{number:032x}"
    record = Record(name, "demo", "r0", "live", "chat", "complete", b"{}", Timing(0.0))
    report = Report(f"rep_{name}", "demo", (name,), 0.0, score=score)
    sample = Sample((1, 2, 3), 2, mask, (-0.5,), score, name) if trainable else None
    return Unit(f"{name}:0", record, 0, report, score, sample, seq=number)


@pytest.mark.parametrize(
    ("low", "high", "weights", "losses", "mean", "masked"),
    [
        (0.3, 5.0, [1.25, 0, 0, 1], [0.866434, 0, 0, -5.991465], -1.281258, 0.5),
        (0.8, 3.0, [1.25, 0.5, 0, 1], [0.866434, 0.804719, 0, -5.991465], -1.080078, 0.25),
    ],
)
def test_direct_importance_sampling(
    low: float, high: float, weights: list[float], losses: list[float], mean: float, masked: float
) -> None:
    logprobs = NEW.log().requires_grad_()
    weight = dis((logprobs.detach() - OLD.log()).exp(), low, high)
    assert weight.tolist() == pytest.approx(weights, abs=1e-6)
    loss = -weight * ADVANTAGES * logprobs
    assert loss.tolist() == pytest.approx(losses, abs=1e-5)
    assert float(loss.detach().mean()) == pytest.approx(mean, abs=1e-6)
    assert float((weight == 0).float().mean()) == masked
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-w * float(a) for w, a in zip(weights, ADVANTAGES, strict=True)])


def test_the_bounds_are_strict() -> None:
    ratio = torch.tensor([0.75, 0.7500001, 2.0, 1.9999999], dtype=torch.float64)
    assert (dis(ratio, 0.25, 1.0) > 0).tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    ("lam", "expected"),
    [
        (1.0, [0.8, 0.6, 0, 0, 0.5, 0.4]),
        (0.95, [0.7282, 0.556, 0, 0, 0.48, 0.4]),
        (8 / 9, [0.648834, 0.504938, 0, 0, 0.455556, 0.4]),
        (0.0, [0.2, 0.1, 0, 0, 0.1, 0.4]),
    ],
)
def test_advantages_skip_observations(lam: float, expected: list[float]) -> None:
    values, mask = [0.2, 0.4, 9.0, 9.0, 0.5, 0.6], [1, 1, 0, 0, 1, 1]
    found = gae(values, mask, 1.0, lam)
    assert found == pytest.approx(expected, abs=1e-6)
    if lam == 1.0:
        assert [a + v for a, v, m in zip(found, values, mask, strict=True) if m] == pytest.approx([1.0] * 4)


def test_a_reward_lands_on_the_last_action_even_before_observations() -> None:
    assert gae([0.0, 0.0, 0.0], [1, 1, 0], 2.0, 1.0) == [2.0, 2.0, 0.0]


@settings(deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=12), st.floats(-2, 2), st.data())
def test_observations_never_leak(values: list[float], reward: float, data: st.DataObject) -> None:
    mask = data.draw(st.lists(st.integers(0, 1), min_size=len(values), max_size=len(values)))
    found = gae(values, mask, reward, 0.9)
    other = gae([v if m else 77.0 for v, m in zip(values, mask, strict=True)], mask, reward, 0.9)
    assert found == other
    assert all(a == 0 for a, m in zip(found, mask, strict=True) if not m)


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 0.333333), (2, 0.666667), (4, 0.833333), (6, 0.888889), (100, 0.993333)]
)
def test_lambda_adapts_to_the_length(length: int, expected: float) -> None:
    assert adaptive_lambda(length, 1.5) == pytest.approx(expected, abs=1e-6)


def test_lambda_stays_between_0_and_1() -> None:
    assert adaptive_lambda(1, 0.5) == 0.0
    assert adaptive_lambda(10**9, 1.5) <= 1.0


def test_explained_variance() -> None:
    assert explained_variance([1, 0, 1, 0], [0.8, 0.2, 0.6, 0.4]) == pytest.approx(0.6)
    assert explained_variance([1, 0, 1, 0], [0.5] * 4) == pytest.approx(0)
    assert explained_variance([1, 1, 1], [0.2, 0.9, 0.4]) is None  # nothing to explain is missing, not -infinity
    assert explained_variance([1], [0.2]) is None
    assert explained_variance([], []) is None


def test_explained_variance_of_absurd_numbers_does_not_overflow() -> None:
    huge = [1e308, -1e308, math.inf, 1.0]
    for returns, values in ((huge, [0.0] * 4), ([0.0, 1.0, 2.0, 3.0], huge), ([math.nan] * 4, huge)):
        found = explained_variance(returns, values)
        assert found is None or math.isfinite(found)


def test_a_batch_is_the_first_units_that_can_train() -> None:
    """case 46: what cannot train is in no batch, so it moves no baseline either."""
    recipe = SAORecipe(batch_size=3)
    units = [unit(5), unit(1), unit(2, score=None), unit(3, trainable=False), unit(4), unit(6, mask=(0,)), unit(7)]
    batch = recipe.batch(units)
    assert batch is not None
    assert batch.part == "weights"
    assert [one.seq for one in batch.units] == [5, 1, 4]
    assert recipe.batch(units[:4]) is None
    assert recipe.batch([]) is None


def test_a_batch_has_the_same_id_for_the_same_units_only() -> None:
    recipe = SAORecipe(batch_size=2)
    one, again, other = (recipe.batch(units) for units in ([unit(1), unit(2)], [unit(2), unit(1)], [unit(1), unit(3)]))
    assert one
    assert again
    assert other
    assert one.id == again.id != other.id


def test_zero_and_negative_scores_are_feedback() -> None:
    batch = SAORecipe(batch_size=2).batch([unit(1, score=0.0), unit(2, score=-1.0)])
    assert batch is not None
    assert batch.metrics["score"] == -0.5


def test_each_turn_is_judged_alone_unless_asked_otherwise() -> None:
    assert SAORecipe().merge is False
    assert "merge" not in SAORecipe(merge=True).objective().options  # it concerns the units, not the loss


def test_nothing_that_is_not_finite_trains() -> None:
    assert SAORecipe(batch_size=1).batch([replace(unit(1), score=math.nan)]) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("batch_size", True),
        ("batch_size", 1.5),
        ("max_staleness", -1),
        ("max_staleness", "18"),
        ("learning_rate", 0),
        ("learning_rate", math.nan),
        ("learning_rate", "fast"),
        ("critic_learning_rate", 2),
        ("critic", "quadratic"),
        ("epsilon_low", 0),
        ("epsilon_low", 1.5),
        ("epsilon_high", 0),
        ("critic_steps", -1),
        ("critic_warmup", -1),
        ("length_alpha", 0),
        ("kl", -0.1),
        ("rank", 0),
        ("train", "all"),
        ("train", ["full"]),
        ("rank", 10_000),
        ("alpha", 0),
        ("alpha", math.inf),
        ("seed", -1),
        ("merge", "yes"),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        SAORecipe(**{name: value})
    assert caught.value.param == name


def test_the_objective_takes_the_recipes_options() -> None:
    recipe = SAORecipe(batch_size=1, max_staleness=18, learning_rate=1e-4)
    objective = recipe.objective()
    made = load(objective.path)(**objective.options)
    assert made.plan.learning_rate == 1e-4
    assert made.plan.rank == recipe.rank


def test_full_weights_have_a_rate_of_their_own() -> None:
    plans = [
        load(made.path)(**made.options).plan
        for made in map(
            SAORecipe.objective,
            (SAORecipe(), SAORecipe(train="full"), SAORecipe(train="full", learning_rate=1e-6, rank=4)),
        )
    ]
    assert [(plan.rank, plan.learning_rate) for plan in plans] == [(8, 5e-4), (0, 1e-5), (0, 1e-6)]


def test_the_recipe_loads_without_torch() -> None:
    code = "import sys, recipes.sao.recipe, reef.trainers.fake, reef.trainers.client, reef.trainers.server;"
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True)


def test_the_examples_are_valid() -> None:
    import yaml

    files = sorted(Path("recipes/sao/examples/sao").glob("*.yaml"))
    found = {file.stem: yaml.safe_load(file.read_text())["reef"] for file in files}
    assert found["serve"] == {"recipe": "recipes.sao.recipe:SAORecipe", "batch_size": 1, "max_staleness": 18}
    for keys in found.values():
        assert keys.pop("recipe") == "recipes.sao.recipe:SAORecipe"
        SAORecipe(**keys)


def test_the_readme_lists_every_key() -> None:
    text = Path("recipes/sao/README.md").read_text()
    assert [one.name for one in fields(SAORecipe) if f"`{one.name}`" not in text] == []
