"""TTT-Discover: the worked numbers of its equations, what a grid is, what spoils one, and its objective."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.tttd import entropic
from recipes.tttd.loss import Entropic, surrogate
from recipes.tttd.recipe import Cell, DiscoverRecipe
from reef.core.errors import ConfigError, TrainError
from reef.core.load import load
from reef.core.nouns import Choice, Record, Report, Sample, Span, Timing, Unit
from reef.recipe import RECIPES

REWARDS = [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("rewards", "beta", "expected"),
    [
        (REWARDS, 2.553245, [-0.797963] * 3 + [11.848729]),
        ([1, 2, 3, 4], 1.445859, [-0.969633, -0.866698, -0.338701, 8.865418]),
        ([10, 20, 30, 40], 0.144586, [-0.969633, -0.866698, -0.338701, 8.865418]),
        ([2.5, 2.6, 2.63, 0], 27.852956, [-0.944004, 0.266955, 5.516382, -1]),
        ([0, 0, 1, 1], None, [-1, -1, 2, 2]),
        ([0] * 7 + [1], 2.465388, [-0.606034] * 7 + [10.768045]),
    ],
)
def test_adaptive_beta(rewards: list[float], beta: float | None, expected: list[float]) -> None:
    found = entropic.temperature(rewards)
    assert found == (None if beta is None else pytest.approx(beta, abs=1e-6))
    if found is not None:
        assert entropic.divergence(rewards, found) == pytest.approx(math.log(2), abs=1e-9)
    assert entropic.advantages(rewards) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0, 1], [-0.864665, 6.389056]),
        ([1, 2, 3, 4], [-0.993554, -0.951708, -0.602265, 18.214797]),
    ],
)
def test_fixed_beta(rewards: list[float], expected: list[float]) -> None:
    assert entropic.advantages(rewards, beta=2.0) == pytest.approx(expected, abs=1e-6)


def test_degenerate_groups() -> None:
    assert entropic.advantages([0, 1]) == [0, 0]  # too few: the winner's worth would have no limit
    assert entropic.advantages([3.5] * 8) == [0] * 8
    assert entropic.advantages([]) == []
    assert max(entropic.advantages([1, 2, 3, 4], beta=2.0, cap=10.0)) == 10.0
    nearly = entropic.advantages([0, 0.5, 1 - 1e-13, 1])  # a tie but for rounding counts as one
    assert nearly == pytest.approx([-1, -1, 2, 2], abs=1e-3)
    with pytest.raises(ValueError, match="finite"):
        entropic.advantages([0, 1, math.nan, 2])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-50, 50), min_size=4, max_size=16), st.floats(0.01, 1e4), st.floats(-1e3, 1e3), st.data())
def test_advantages_know_neither_shift_scale_nor_order(
    rewards: list[int], scale: float, shift: float, data: st.DataObject
) -> None:
    plain = entropic.advantages(rewards, cap=20.0)
    order = data.draw(st.permutations(range(len(rewards))))
    moved = entropic.advantages([rewards[place] * scale + shift for place in order], cap=20.0)
    if len({rewards[place] * scale + shift for place in order}) == len(set(rewards)):  # no tie came by rounding
        assert moved == pytest.approx([plain[place] for place in order], abs=1e-3)
    assert all(-1 <= one <= 20 for one in plain)
    for (high, more), (low, less) in itertools.permutations(zip(rewards, plain, strict=True), 2):
        assert high <= low or more >= less  # a larger reward is never worth less


def test_shaping_sums_to_zero() -> None:
    found = entropic.shape([[-1, -2], [-0.5]], [[-1.5, -2], [-1]], 0.1)
    assert found[0] == pytest.approx([-0.016667, 0.033333], abs=1e-6)
    assert found[1] == pytest.approx([-0.016667], abs=1e-6)
    assert math.fsum(one for row in found for one in row) == pytest.approx(0, abs=1e-15)
    assert entropic.shape([], [], 0.1) == []


# --- the grid ---------------------------------------------------------------------------------------------------------


def unit(number: int, step: int = 1, group: int = 0, rollout: int = 0, *, score: float = 1.0, **more: Any) -> Unit:
    name, release = f"{number:032x}", more.get("release", "r0")
    choice = Choice(0, "5", "stop", (number,), (-0.5,), (Span(release, 0, 1),))
    record = Record(name, "demo", release, "live", "chat", "complete", b"{}", Timing(0.0), choices=(choice,))
    shape = more.get("shape", (2, 2))
    metadata = {
        "step": step, "group": group, "rollout": rollout, "groups_per_step": shape[0], "rollouts_per_group": shape[1],
    }  # fmt: skip
    metadata |= more.get("metadata", {})
    report = Report(f"rep_{name}", "demo", (name,), 0.0, score=score, metadata=metadata)
    sample = Sample((1, 2, number), 2, (1,), (-0.5,), score, name)
    return Unit(f"{name}:0", record, 0, report, score, sample, seq=number, lag=more.get("lag", 0))


def grid(step: int = 1, first: int = 0, **more: Any) -> list[Unit]:
    """2 groups of 2 rollouts, each with another score."""
    return [
        unit(first + 2 * group + rollout, step, group, rollout, score=first + 2.0 * group + rollout, **more)
        for group in range(2)
        for rollout in range(2)
    ]


def test_only_a_complete_grid_is_a_batch() -> None:
    recipe, units = DiscoverRecipe(), grid()
    assert recipe.batch(units[:3]) is None
    batch = recipe.batch(units)
    assert batch is not None
    assert [one.id for one in batch.units] == [one.id for one in units]
    assert [one.sample.group for one in batch.units if one.sample] == ["0", "0", "1", "1"]
    assert batch.metrics["constant_groups"] == 0
    assert batch.metrics["distinct_answers"] == 4


def test_cells_come_in_any_order_and_steps_do_not_mix() -> None:
    recipe = DiscoverRecipe()
    one, two = grid(1), grid(2, first=10)
    assert recipe.batch([*one[:3], *two[:3]]) is None
    batch = recipe.batch([*reversed(two), *one[:3]])
    assert batch is not None
    assert {Cell.of(each).step for each in batch.units if Cell.of(each)} == {2}  # type: ignore[union-attr]
    other = [unit(30 + place, 1, 1, 1, metadata={"search": "another"}) for place in range(1)]
    assert recipe.batch([*one[:3], *other]) is None


def test_a_repeated_cell_never_trains() -> None:
    units = [*grid()[:3], unit(9, 1, 0, 0, score=7.0), grid()[3]]
    recipe = DiscoverRecipe()
    assert [(one.id, why) for one, why in recipe.discard(units)] == [(units[3].id, "repeated")]
    batch = recipe.batch(units)
    assert batch is not None
    assert units[3].id not in {one.id for one in batch.units}


@pytest.mark.parametrize("odd", [{"release": "r1"}, {"lag": 1}])
def test_a_cell_of_another_release_spoils_the_step(odd: dict[str, Any]) -> None:
    units = [*grid()[:3], unit(3, 1, 1, 1, **odd), *grid(2, first=10)]
    recipe = DiscoverRecipe()
    assert {(one.id, why) for one, why in recipe.discard(units)} == {(one.id, "mixed releases") for one in units[:4]}
    batch = recipe.batch(units)
    assert batch is not None
    assert {one.id for one in batch.units} == {one.id for one in units[4:]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"metadata": {"group": 2}},
        {"metadata": {"rollout": -1}},
        {"metadata": {"step": True}},
        {"metadata": {"step": 1.5}},
        {"metadata": {"step": None}},
        {"metadata": {"groups_per_step": 10**9}},
        {"score": math.inf},
    ],
)
def test_what_is_no_cell_is_discarded(wrong: dict[str, Any]) -> None:
    assert [why for _, why in DiscoverRecipe().discard([unit(1, **wrong)])] == ["no cell"]


def test_a_step_has_one_size() -> None:
    units = [*grid()[:3], unit(8, 1, 1, 1, shape=(3, 2))]
    assert [why for _, why in DiscoverRecipe().discard(units)] == ["another grid"]


def test_constant_groups_leave_after_the_barrier() -> None:
    units = [*(replace(one, score=2.0) for one in grid()[:2]), *grid()[2:]]
    batch = DiscoverRecipe().batch(units)
    assert batch is not None
    assert len(batch.units) == 4  # all are settled with the step
    assert [one.sample is None for one in batch.units] == [True, True, False, False]
    assert batch.metrics["constant_groups"] == 1


def test_of_constant_groups_alone_one_is_kept() -> None:
    batch = DiscoverRecipe().batch([replace(one, score=2.0) for one in grid()])
    assert batch is not None
    assert [one.sample is None for one in batch.units] == [False, False, True, True]


def test_settings() -> None:
    recipe = DiscoverRecipe()
    assert RECIPES["tttd"].endswith(":DiscoverRecipe")
    assert recipe.part == "weights"
    assert recipe.propose(recipe.batch(grid()), ()) == ()  # type: ignore[arg-type]
    objective = recipe.objective()
    made = load(objective.path)(**objective.options)
    assert made.plan.betas == (0.9, 0.95)
    assert (made.plan.learning_rate, made.plan.rank, made.plan.clip) == (1e-3, 8, 1.0)
    for wrong in ({"gamma": 0}, {"advantage_max": -1}, {"kl": -0.1}, {"clip": 0}, {"rank": 0}, {"train": "all"}):
        with pytest.raises(ConfigError):
            DiscoverRecipe(**wrong)


def test_the_recipe_loads_no_torch() -> None:
    code = "import sys, recipes.tttd.recipe, recipes.tttd.search, recipes.tttd.study, recipes.tttd.drive; "
    code += "print({'torch', 'scipy', 'numpy', 'httpx'} & set(sys.modules))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "set()"


# --- the objective ----------------------------------------------------------------------------------------------------


class Rows:
    """What of a micro-batch the objective reads."""

    def __init__(self, logprobs: list[float], lengths: tuple[int, ...], rewards: tuple[Any, ...], **more: Any) -> None:
        self.logprobs = torch.tensor(logprobs)
        self.mask = torch.tensor(more.get("mask", [1.0] * len(logprobs)))
        self.lengths, self.rewards = lengths, rewards
        self.groups = more.get("groups", ("0",) * len(lengths))
        self.total = type("Total", (), {"samples": more.get("samples", 4), "tokens": more.get("tokens", 4)})()
        self.extra: dict[str, torch.Tensor] = {}


class Outputs:
    def __init__(self, logprobs: Any) -> None:
        self._logprobs = torch.as_tensor(logprobs)

    def logprobs(self) -> torch.Tensor:
        return self._logprobs


class Context:
    def __init__(self, base: dict[int, list[float]]) -> None:
        self._base = base

    def base(self, rows: Any) -> Outputs:
        return Outputs(self._base[id(rows)])


def objective(**changed: Any) -> Entropic:
    options: dict[str, Any] = DiscoverRecipe(**changed).objective().options  # type: ignore[assignment]
    return Entropic(**options)


def test_groups_are_compared_across_micro_batches() -> None:
    first = Rows([-1.0, -1.0, -1.0], (1, 2), (0.0, 1.0))
    second = Rows([-1.0, -1.0], (1, 1), (0.0, 0.0), mask=[1.0, 1.0])
    made = objective(kl=0)
    metrics = made.prepare(Context({}), [first, second])  # type: ignore[arg-type, list-item]
    assert first.extra["advantages"].tolist() == pytest.approx([-0.797963, 11.848729, 11.848729], abs=1e-5)
    assert second.extra["advantages"].tolist() == pytest.approx([-0.797963] * 2, abs=1e-5)
    assert metrics["beta"] == pytest.approx(2.553245, abs=1e-6)
    assert metrics["reward"] == 0.25


def test_two_groups_are_not_compared_with_each_other() -> None:
    rows = Rows([-1.0] * 8, (1,) * 8, (0.0, 0, 0, 1, 10, 20, 30, 40), groups=("a",) * 4 + ("b",) * 4)
    objective(kl=0).prepare(Context({}), [rows])  # type: ignore[arg-type, list-item]
    assert rows.extra["advantages"][3:].tolist() == pytest.approx(
        [11.848729, -0.969633, -0.866698, -0.338701, 8.865418], abs=1e-5
    )


def test_shaping_is_over_the_whole_batch() -> None:
    first = Rows([-1.0, -2.0, -0.5], (2, 1), (0.0, 0.0), tokens=5)
    second = Rows([-1.0, -1.0], (1, 1), (0.0, 1.0), tokens=5)
    context = Context({id(first): [-1.5, -2.0, -1.0], id(second): [-1.0, -1.0]})
    metrics = objective(kl=0.1).prepare(context, [first, second])  # type: ignore[arg-type, list-item]
    assert metrics["drift"] == pytest.approx(0.2)
    plain, high = -0.797963, 11.848729
    shaped = [plain + 0.1 * (0.2 - apart) for apart in (0.5, 0.0, 0.5)]
    assert first.extra["advantages"].tolist() == pytest.approx(shaped, abs=1e-5)
    assert second.extra["advantages"].tolist() == pytest.approx([plain + 0.02, high + 0.02], abs=1e-5)


def test_a_step_of_constant_groups_changes_nothing() -> None:
    rows = Rows([-1.0] * 4, (1,) * 4, (2.0,) * 4)
    objective(kl=0.1).prepare(Context({}), [rows])  # type: ignore[arg-type, list-item]
    assert rows.extra["advantages"].tolist() == [0.0] * 4


def test_the_ratio_is_not_clipped_and_tokens_are_summed() -> None:
    apart = torch.tensor([math.log(10.0), 0.0, 0.0], requires_grad=True)
    loss = surrogate(apart, torch.tensor([1.0, 2.0, -1.0]))
    assert float(loss.detach()) == pytest.approx(-11.0)
    loss.backward()
    assert apart.grad is not None
    assert apart.grad.tolist() == pytest.approx([-10.0, -2.0, 1.0])


def test_masked_tokens_count_nowhere() -> None:
    rows = Rows([-1.0, -1.0, -1.0], (3,), (1.0,), mask=[1.0, 0.0, 1.0], samples=2, tokens=2)
    rows.extra["advantages"] = torch.tensor([1.0, 0.0, 1.0])
    now = torch.tensor([-1.0, 50.0, -1.0], requires_grad=True)
    loss, metrics = objective().loss(Outputs(now), rows)  # type: ignore[arg-type]
    assert float(loss.detach()) == pytest.approx(-1.0)
    assert metrics["mismatch"] == 0
    loss.backward()
    assert now.grad is not None
    assert now.grad.tolist() == [-0.5, 0.0, -0.5]


def test_a_sample_without_a_group_is_an_error() -> None:
    rows = Rows([-1.0], (1,), (1.0,), groups=(None,))
    with pytest.raises(TrainError, match="group"):
        objective(kl=0).prepare(Context({}), [rows])  # type: ignore[arg-type, list-item]
