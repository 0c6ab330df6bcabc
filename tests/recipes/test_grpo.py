"""GRPO and its kin: the worked numbers, what a group and a batch are, and which settings are refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.grpo import recipe as room
from recipes.grpo.loss import GRPO, advantages, grouped
from recipes.grpo.recipe import PRESETS, GRPORecipe, group_of, overlong
from reef.core.errors import ConfigError, TrainError
from reef.core.load import load
from reef.core.nouns import Choice, Record, Report, Sample, Span, Timing, Unit
from reef.trainers.local import losses
from reef.trainers.local.objective import Rows, Total


def unit(
    number: int,
    *,
    prompt: str = "What is 2+3?",
    score: float | None = 1.0,
    release: str = "r0",
    group: object = None,
    choice: int = 0,
    receipt: int | None = None,
    tokens: int = 1,
    trainable: bool = True,
    request: bytes | None = None,
) -> Unit:
    name = f"{number if receipt is None else receipt:032x}"
    body = json.dumps({"messages": [{"role": "user", "content": prompt}]}).encode() if request is None else request
    record = Record(name, "demo", release, "live", "chat", "complete", body, Timing(0.0))
    metadata = None if group is None else {"group": group}
    report = Report(f"rep_{number:032x}", "demo", (name,), 0.0, score=score, metadata=metadata)
    ids = tuple(range(2 + tokens))
    sample = Sample(ids, 2, (1,) * tokens, (-0.5,) * tokens, score, name, choice) if trainable else None
    return Unit(f"{name}:{choice}", record, choice, report, score, sample, seq=number)


# --- the worked numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("grpo", [0.866024, -0.866024, -0.866024, 0.866024]),
        ("dr_grpo", [0.5, -0.5, -0.5, 0.5]),
        ("rloo", [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
    ],
)
def test_advantages_of_a_group(kind: str, expected: list[float]) -> None:
    assert advantages([1, 0, 0, 1], kind) == pytest.approx(expected, abs=1e-6)


def test_the_population_deviation_is_there_too() -> None:
    assert losses.group_advantages([1, 0, 0, 1], ddof=0) == pytest.approx([0.999998, -0.999998, -0.999998, 0.999998])


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("rewards", [[1.0], [0.0], [1.0] * 4, [0.1 + 0.2, 0.3], [-7.5] * 3, [1e300] * 2])
def test_equal_rewards_and_a_group_of_one_are_no_signal(kind: str, rewards: list[float]) -> None:
    assert advantages(rewards, kind) == [0.0] * len(rewards)


@settings(deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=1, max_size=9), st.sampled_from(["grpo", "dr_grpo", "rloo"]))
def test_advantages_are_finite_and_add_up_to_nothing(rewards: list[float], kind: str) -> None:
    found = advantages(rewards, kind)
    assert all(map(math.isfinite, found))
    assert math.fsum(found) == pytest.approx(0, abs=1e-6)


def test_groups_are_told_apart_wherever_their_samples_are() -> None:
    names = ["a", "b", "a", None, "b", None]
    assert grouped(names, [1, 5, 0, 9, 5, 7], "dr_grpo") == [0.5, 0, -0.5, 0, 0, 0]


def test_a_sequence_ratio_is_clipped_as_a_whole() -> None:
    mask = torch.ones(3)
    ratio = losses.gspo_ratio(torch.tensor([0.1, -0.05, 0.2]), mask, (3,))
    assert ratio.tolist() == pytest.approx([1.086904] * 3, abs=1e-6)
    assert math.exp(0.1 - 0.05 + 0.2) == pytest.approx(1.284025, abs=1e-6)  # what it is not: the product
    assert losses.ppo_clip(ratio, torch.ones(3), 3e-4, 4e-4).tolist() == pytest.approx([-1.0004] * 3)


def test_the_three_reductions_of_two_answers() -> None:
    each, mask, lengths, total = torch.tensor([1.0, 2, 3, 3, 3, 3]), torch.ones(6), (2, 4), Total(2, 6)
    assert float(losses.seq_mean(each, mask, lengths, total)) == pytest.approx(2.25)
    assert float(losses.token_mean(each, mask, total)) == pytest.approx(2.5)
    assert float(losses.constant_mean(each, mask, total, 4)) == pytest.approx(1.875)


def made(recipe: GRPORecipe) -> GRPO:
    objective = recipe.objective()
    found: GRPO = load(objective.path)(**objective.options)
    return found


class Given:
    """What a forward found, for losses that need no model."""

    def __init__(self, logprobs: torch.Tensor) -> None:
        self.found = logprobs

    def logprobs(self) -> torch.Tensor:
        return self.found


def rows(
    logprobs: list[float], lengths: tuple[int, ...], rewards: tuple[float | None, ...], groups: tuple[str | None, ...]
) -> Rows:
    count = len(logprobs)
    blank = torch.zeros(count, dtype=torch.long)
    return Rows(
        packed=None,  # type: ignore[arg-type]
        predicts=blank,
        targets=blank,
        mask=torch.ones(count),
        logprobs=torch.tensor(logprobs),
        temperatures=torch.ones(count),
        lengths=lengths,
        rewards=rewards,
        lags=(0,) * len(lengths),
        total=Total(len(lengths), count),
        groups=groups,
    )


def run(recipe: GRPORecipe, new: list[float], old: list[float], lengths: tuple[int, ...] = (1, 1)) -> Any:
    """(loss, its gradient by log-prob, metrics) of one group whose first answer is right."""
    objective = made(recipe)
    batch = rows(old, lengths, (1.0, *(0.0,) * (len(lengths) - 1)), ("g",) * len(lengths))
    metrics = objective.prepare(None, [batch])  # type: ignore[arg-type]
    logprobs = torch.tensor(new, requires_grad=True)
    loss, more = objective.loss(Given(logprobs), batch)  # type: ignore[arg-type]
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return float(loss.detach()), logprobs.grad.tolist(), metrics | more


DOUBLE, HALF = math.log(2), math.log(0.5)


@pytest.mark.parametrize(
    ("settings", "right", "wrong"),
    [
        # A is +-1/2 in a group of two; the ratios of the two answers are 2 and 1/2. Gradients by log-prob, over two.
        ({"loss": "ppo"}, 0.0, 0.0),  # both are beyond their bound
        ({"loss": "ppo", "epsilon_low": 0.6, "epsilon_high": 1.5}, -0.5 * 2, 0.5 * 0.5),
        ({"loss": "cispo", "epsilon_high": 0.28}, -0.5 * 1.28, 0.5 * 0.5),
        ({"loss": "dis", "epsilon_low": 0.3, "epsilon_high": 5.0}, -0.5 * 2, 0.0),
        ({"loss": "gspo", "epsilon_low": 0.6, "epsilon_high": 1.5}, -0.5 * 2, 0.5 * 0.5),
        ({"loss": "gspo"}, 0.0, 0.0),
        ({"loss": "ppo", "tis_cap": 1.25}, -0.5 * 1.25, 0.5 * 0.5),  # nothing is clipped: pi_old is where we are
    ],
)
def test_each_loss_pushes_as_its_equation_says(settings: dict[str, Any], right: float, wrong: float) -> None:
    recipe = GRPORecipe(advantage="dr_grpo", kl=0.0, **settings)
    _, gradient, metrics = run(recipe, [-1 + DOUBLE, -1 + HALF], [-1.0, -1.0])
    assert gradient == pytest.approx([right / 2, wrong / 2], abs=1e-6)
    assert metrics["reward"] == 0.5
    assert metrics["mismatch"] == pytest.approx(math.log(2))


def test_dual_clip_bounds_what_an_unlikely_wrong_answer_can_push() -> None:
    recipe = GRPORecipe(advantage="dr_grpo", kl=0.0)
    far = math.log(3)
    assert run(recipe, [-1.0, -2 + far], [-1.0, -2.0])[1][1] == pytest.approx(0.5 * 3 / 2)
    loss, gradient, metrics = run(replace(recipe, dual_clip=2.0), [-1.0, -2 + far], [-1.0, -2.0])
    assert gradient[1] == 0
    assert loss == pytest.approx((-0.5 + 0.5 * 2) / 2)
    assert metrics["pg_clipfrac"] == 0.5


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"reduction": "token_mean"}, (-1 * 2 + 1 * 4) / 6),
        ({"reduction": "seq_mean"}, 0.0),
        ({"reduction": "constant", "length": 8}, (-1 * 2 + 1 * 4) / (2 * 8)),
        ({"reduction": "constant"}, (-1 * 2 + 1 * 4) / (2 * 4)),  # no length: the longest answer's
    ],
)
def test_reductions_weigh_lengths_differently(settings: dict[str, Any], expected: float) -> None:
    recipe = GRPORecipe(advantage="rloo", kl=0.0, **settings)
    assert run(recipe, [-1.0] * 6, [-1.0] * 6, (2, 4))[0] == pytest.approx(expected, abs=1e-6)


def test_a_group_that_micro_batches_split_is_still_one() -> None:
    objective = made(GRPORecipe(advantage="dr_grpo", kl=0.0))
    one = rows([-1.0], (1,), (1.0,), ("g",))
    other = rows([-1.0, -1.0], (1, 1), (0.0, 0.5), ("g", "h"))
    objective.prepare(None, [one, other])  # type: ignore[arg-type]
    assert one.extra["advantages"].tolist() == [0.5]
    assert other.extra["advantages"].tolist() == [-0.5, 0.0]


def test_a_sample_without_a_reward_is_refused() -> None:
    with pytest.raises(TrainError, match="score"):
        made(GRPORecipe()).prepare(None, [rows([-1.0], (1,), (None,), ("g",))])  # type: ignore[arg-type]


def test_the_pull_towards_the_base_is_k3() -> None:
    objective = made(GRPORecipe(kl=0.5))
    batch = rows([HALF, HALF], (1, 1), (1.0, 1.0), ("g", "g"))

    class Base:
        def base(self, asked: Rows) -> Given:
            return Given(torch.tensor([math.log(0.25)] * 2))

    objective.prepare(Base(), [batch])  # type: ignore[arg-type]
    loss, metrics = objective.loss(Given(torch.tensor([HALF, HALF])), batch)  # type: ignore[arg-type]
    assert metrics["kl"] == pytest.approx(0.193147, abs=1e-6)
    assert float(loss) == pytest.approx(0.5 * 0.193147, abs=1e-6)  # equal rewards: nothing but the pull


# --- groups and batches -----------------------------------------------------------------------------------------------


def test_a_group_is_named_or_of_one_prompt_or_of_one_request() -> None:
    assert group_of(unit(1, group="a")) == group_of(unit(2, prompt="other", group="a"))
    assert group_of(unit(1)) == group_of(unit(2, prompt=" What  is 2+3? "))
    assert group_of(unit(1)) != group_of(unit(2, prompt="What is 3+3?"))
    assert group_of(unit(1)) != group_of(unit(2, release="r1"))
    assert group_of(unit(1, group="a", release="r1")) != group_of(unit(2, group="a"))
    unreadable = [unit(n, receipt=7, choice=n, request=b'{"input": "x"}') for n in (0, 1)]
    assert group_of(unreadable[0]) == group_of(unreadable[1]) == (f"request {7:032x}", "r0")
    for odd in (3, "", ["a"]):
        assert group_of(unit(1, group=odd)) == group_of(unit(2)), "a group that is no text is none"


def test_an_answer_of_two_releases_is_in_no_group() -> None:
    one = unit(1)
    spans = (Span("r0", 0, 1), Span("r1", 1, 2))
    mixed = replace(one, record=replace(one.record, choices=(Choice(0, "5", spans=spans),)))
    assert group_of(mixed) is None
    assert GRPORecipe(group_size=2, groups=1).batch([mixed, mixed]) is None


def test_only_complete_groups_train_in_the_order_they_became_so() -> None:
    recipe = GRPORecipe(group_size=2, groups=2)
    units = [
        unit(1, prompt="a"),
        unit(2, prompt="b", score=0.0),
        unit(3, prompt="c"),
        unit(4, prompt="b"),
        unit(5, prompt="a", release="r1"),
        unit(6, prompt="a", score=None),
        unit(7, prompt="a", trainable=False),
        unit(8, prompt="c"),
        unit(9, prompt="a", score=0.0),
    ]
    batch = recipe.batch(units)
    assert batch is not None
    assert [one.seq for one in batch.units] == [2, 4, 3, 8]
    assert [one.sample.group for one in batch.units if one.sample] == ["0", "0", "1", "1"]
    assert batch.metrics["zero_signal_groups"] == 1
    assert batch.metrics["groups"] == 2
    assert recipe.batch(units[:-2]) is None
    assert recipe.batch([]) is None
    assert recipe.batch_size == 4


def test_more_answers_than_a_group_holds_begin_the_next_one() -> None:
    recipe = GRPORecipe(group_size=2, groups=2)
    batch = recipe.batch([unit(number) for number in range(5)])
    assert batch is not None
    assert [(one.seq, one.sample.group) for one in batch.units if one.sample] == [
        (0, "0"),
        (1, "0"),
        (2, "1"),
        (3, "1"),
    ]


def test_groups_without_signal_are_left_out_and_given_up() -> None:
    flat = [unit(number, prompt="flat", score=0.5) for number in range(4)]
    told = [unit(10 + number, prompt="told", score=float(number)) for number in range(2)]
    rest = [unit(20, prompt="rest")]
    recipe = GRPORecipe(preset="dapo", group_size=2, groups=1)
    batch = recipe.batch([*flat, *told, *rest])
    assert batch is not None
    assert [one.seq for one in batch.units] == [10, 11]
    assert batch.metrics["zero_signal_groups"] == 0
    assert [(one.seq, why) for one, why in recipe.discard([*flat, *told, *rest])] == [
        (number, "zero signal") for number in range(4)
    ]
    assert recipe.batch([*flat, *rest]) is None
    keeps = replace(recipe, dynamic=False)
    assert keeps.discard(flat) == ()
    kept = keeps.batch(flat)
    assert kept is not None
    assert kept.metrics["zero_signal_groups"] == 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.sampled_from(["r0", "r1"])), max_size=40))
def test_what_trains_and_what_is_given_up_never_overlap(drawn: list[tuple[int, int, str]]) -> None:
    units = [
        unit(number, prompt=str(prompt), score=float(score), release=release)
        for number, (prompt, score, release) in enumerate(drawn)
    ]
    recipe = GRPORecipe(preset="dapo", group_size=3, groups=2)
    batch = recipe.batch(units)
    given_up = {one.id for one, _ in recipe.discard(units)}
    assert len(given_up) % 3 == 0
    if batch is None:
        return
    assert given_up.isdisjoint(one.id for one in batch.units)
    assert len(batch.units) == recipe.batch_size
    for first in range(0, 6, 3):
        group = batch.units[first : first + 3]
        assert len({group_of(one) for one in group}) == 1
        assert len({one.score for one in group}) == 2


def test_overlong_answers_cost_up_to_one() -> None:
    assert [overlong(tokens, 20, 4) for tokens in (1, 16, 17, 18, 20, 30)] == [0, 0, -0.25, -0.5, -1, -1]
    recipe = GRPORecipe(preset="dapo", group_size=2, groups=1, length=8, overlong=4)
    units = [unit(1, tokens=4), unit(2, tokens=6)]
    batch = recipe.batch(units)
    assert batch is not None, "equal scores, but one is too long"
    assert [one.sample.reward for one in batch.units if one.sample] == [1.0, 0.5]
    assert batch.metrics["score"] == 1.0
    assert not recipe.discard(units)


# --- settings ---------------------------------------------------------------------------------------------------------


def test_presets_are_their_papers() -> None:
    found = {name: GRPORecipe(preset=name).chosen() for name in PRESETS}
    assert found["grpo"]["advantage"] == found["dapo"]["advantage"] == "grpo"
    assert (found["dapo"]["epsilon_low"], found["dapo"]["epsilon_high"]) == (0.2, 0.28)
    assert (found["dapo"]["reduction"], found["dapo"]["dynamic"], found["dapo"]["kl"]) == ("token_mean", True, 0.0)
    assert (found["gspo"]["loss"], found["gspo"]["epsilon_low"], found["gspo"]["epsilon_high"]) == ("gspo", 3e-4, 4e-4)
    assert (found["dr_grpo"]["advantage"], found["dr_grpo"]["reduction"]) == ("dr_grpo", "constant")
    assert (found["rloo"]["advantage"], found["grpo"]["kl"]) == ("rloo", 0.04)
    for name in PRESETS:
        assert made(GRPORecipe(preset=name)).plan.learning_rate == 5e-4


def test_what_is_set_wins_over_the_preset() -> None:
    assert GRPORecipe(preset="dapo", epsilon_high=0.5, dynamic=False).chosen() == {
        **GRPORecipe(preset="dapo").chosen(),
        "epsilon_high": 0.5,
        "dynamic": False,
    }
    other = GRPORecipe(preset="dapo", loss="dis").chosen()
    assert (other["epsilon_low"], other["epsilon_high"]) == (0.3, 5.0), "another loss brings its own bounds"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("preset", "ppo"),
        ("group_size", 1),
        ("group_size", 2.0),
        ("groups", 0),
        ("groups", True),
        ("advantage", "mean"),
        ("loss", "pg"),
        ("reduction", "sum"),
        ("epsilon_low", -0.1),
        ("epsilon_low", 1.5),
        ("epsilon_high", -1),
        ("dual_clip", 1.0),
        ("tis_cap", 0),
        ("kl", -1),
        ("dynamic", "yes"),
        ("length", 0),
        ("overlong", -1),
        ("merge", None),
        ("max_staleness", -1),
        ("train", "all"),
        ("learning_rate", 0),
        ("rank", 0),
        ("alpha", 0),
        ("seed", -1),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        GRPORecipe(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"loss": "cispo", "dual_clip": 2.0}, "dual_clip"),
        ({"preset": "gspo", "tis_cap": 2.0}, "tis_cap"),
        ({"preset": "gspo", "reduction": "token_mean"}, "reduction"),
        ({"loss": "dis", "epsilon_low": 0}, "epsilon_low"),
        ({"overlong": 4}, "overlong"),
        ({"overlong": 9, "length": 8}, "overlong"),
        ({"length": 8}, "length"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GRPORecipe(**settings)
    assert caught.value.param == param


def test_the_recipe_loads_without_torch() -> None:
    code = "import sys, recipes.grpo.recipe; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_examples_are_valid() -> None:
    files = sorted(Path("recipes/grpo/examples").glob("*/*.yaml"))
    assert files
    for file in files:
        keys = yaml.safe_load(file.read_text())["reef"]
        assert keys.pop("recipe") == "recipes.grpo.recipe:GRPORecipe"
        GRPORecipe(**keys)


def test_the_readme_lists_every_key_and_preset() -> None:
    text = Path("recipes/grpo/README.md").read_text()
    assert [one.name for one in fields(GRPORecipe) if f"`{one.name}`" not in text] == []
    assert [name for name in room.PRESETS if f"`{name}`" not in text] == []
