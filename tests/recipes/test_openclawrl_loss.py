"""OpenClaw-RL's objective: the worked numbers of its equations, and what it does to a tiny model."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import torch

from recipes.openclawrl.loss import OpenClaw, choose, overlap, sampled_advantages, select_advantages, select_loss
from recipes.openclawrl.recipe import OpenClawRecipe
from reef.core.errors import TrainError
from reef.core.wire import Datum
from reef.engines.local.layout import Layout, Rope
from reef.trainers.local.adam import Adam
from reef.trainers.local.llama import Llama, Lora
from reef.trainers.local.objective import Outputs, Rows
from reef.trainers.local.rows import Known, build

LAYOUT = Layout(1, 24, 32, 2, 1, 12, 50, 64, 1e-5, True, Rope(1e4), (2,))


def test_version_one_combines_reward_and_teacher() -> None:
    found = sampled_advantages(torch.tensor([-1.0, -1.0]), torch.tensor([-0.2, -3.0]), torch.tensor([-0.7, -1.0]), 1, 1)
    assert found.tolist() == pytest.approx([-0.5, -3.0])


def test_selected_tokens() -> None:
    old, teacher, kept = (
        torch.tensor([[0.6, 0.3]]).log(),
        torch.tensor([[0.2, 0.7]]).log(),
        torch.tensor([[True, True]]),
    )
    weights = old.softmax(-1)
    assert weights[0].tolist() == pytest.approx([0.666667, 0.333333], abs=1e-6)
    assert (teacher - old)[0].tolist() == pytest.approx([-1.098612, 0.847298], abs=1e-6)
    advantages = select_advantages(teacher, old, kept, 1.0)
    assert advantages[0].tolist() == pytest.approx([-0.666667, 0.282433], abs=1e-6)
    current = old.clone().requires_grad_()
    loss = select_loss(current, old, advantages, 0.2, 0.28)
    assert float(loss.detach()) == pytest.approx(0.384234, abs=1e-6)
    loss.sum().backward()
    assert current.grad is not None
    assert current.grad[0].tolist() == pytest.approx([0.666667, -0.282433], abs=1e-6)
    moved = old + torch.tensor([[1.5, 0.7]]).log()
    parts = [
        float(select_loss(moved[:, v : v + 1], old[:, v : v + 1], advantages[:, v : v + 1], 0.2, 0.28)) for v in (0, 1)
    ]
    assert parts == pytest.approx([1.0, -0.197703], abs=1e-6)
    assert float(select_loss(moved, old, advantages, 0.2, 0.28)) == pytest.approx(0.802297, abs=1e-6)


def test_a_subset_of_none_teaches_nothing() -> None:
    old, teacher = torch.tensor([[0.6, 0.3], [0.5, 0.4]]).log(), torch.tensor([[0.2, 0.7], [0.1, 0.1]]).log()
    found = select_advantages(teacher, old, torch.tensor([[False, False], [True, False]]), 1.0)
    assert found.tolist() == [[0.0, 0.0], [pytest.approx(-1.0), 0.0]]


def test_which_hint_teaches() -> None:
    student = torch.tensor([[1, 2], [3, 4]])
    a, b = torch.tensor([[1, 2], [5, 6]]), torch.tensor([[1, 9], [3, 4]])
    counts = torch.stack([overlap(student, a), overlap(student, b)])
    assert counts.tolist() == [[2, 0], [1, 2]]
    exists = torch.ones(2, 2)
    assert choose(counts, exists, (2,), "sequence_optimal").tolist() == [1, 1]
    assert choose(counts, exists, (2,), "token_optimal").tolist() == [0, 1]
    assert choose(counts, exists, (2,), "shortest").tolist() == [0, 0]
    assert choose(counts, exists, (1, 1), "sequence_optimal").tolist() == [0, 1]  # one choice for each sample
    assert choose(counts, torch.tensor([[1.0, 1.0], [0.0, 0.0]]), (2,), "sequence_optimal").tolist() == [0, 0]


# --- the whole objective, on a tiny model -----------------------------------------------------------------------------


class Letters:
    """A tokenizer and template of one token a letter, and a mark where the answer begins."""

    def render(self, messages: Any, tools: Any = None) -> str:
        return "".join(str(message["content"]) for message in messages) + "\x7f"

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 47 + 3 for letter in text]


class Steps:
    """An `objective.Context` with a LoRA, and the steps a trainer makes."""

    def __init__(self, **settings: Any) -> None:
        layout = LAYOUT
        generator = torch.Generator().manual_seed(1)
        shapes = {name: tuple(shape) for name, shape in layout.shapes().items()}
        weights = {
            name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            for name, shape in shapes.items()
        }
        self.model = Llama(layout, weights, torch.float32)
        recipe = OpenClawRecipe(**{"learning_rate": 1e-2, "top_k": 5, "rank": 2} | settings)
        self.objective = OpenClaw(**recipe.objective().options)
        self.lora = Lora.fresh(self.model, 2, 4.0, 0)
        self.modules: dict[str, Any] = {}
        self.updates = 0
        self.asked: list[Rows] = []

    def base(self, rows: Rows) -> Outputs:
        self.asked.append(rows)
        return Outputs(self.model, self.model.hidden(rows.packed)[rows.predicts], rows)

    def policy(self, rows: Rows) -> Outputs:
        return Outputs(self.model, self.model.hidden(rows.packed, self.lora)[rows.predicts], rows)

    def rows(self, data: list[Datum], tokens: int = 2048) -> list[Rows]:
        return build(data, Known(self.model.layout, Letters), tokens=tokens)  # type: ignore[arg-type]

    def gradient(self, data: list[Datum], tokens: int = 2048) -> tuple[float, dict[str, torch.Tensor]]:
        batch, whole = self.rows(data, tokens), 0.0
        self.objective.prepare(self, batch)  # type: ignore[arg-type]
        for rows in batch:
            loss, _ = self.objective.loss(self.policy(rows), rows)
            loss.backward()
            whole += float(loss.detach())
        found = {name: one.grad.clone() for name, one in self.lora.parameters().items() if one.grad is not None}
        for one in self.lora.parameters().values():
            one.grad = None
        return whole, found

    def train(self, data: list[Datum], steps: int) -> None:
        adam = Adam(self.lora.parameters(), self.objective.plan.learning_rate)
        for _ in range(steps):
            for name, gradient in self.gradient(data)[1].items():
                self.lora.parameters()[name].grad = gradient
            adam.step("policy")


def datum(number: int, reward: float, *hints: str, answer: str = "abcdef") -> Datum:
    letters, question = Letters(), f"question {number}"
    prompt, response = letters.encode(question + "\x7f"), letters.encode(answer)
    return Datum(
        tokens=prompt + response,
        prompt_length=len(prompt),
        mask=[1] * len(response),
        logprobs=[-3.0] * len(response),
        reward=reward,
        record_id=f"{number:032x}",
        choice=0,
        temperature=1.0,
        lag=0,
        contexts=[json.dumps({"messages": [{"role": "user", "content": f"{question} {hint}"}]}) for hint in hints],
    )


@pytest.mark.parametrize("subset", ["student", "teacher", "overlap"])
def test_the_policy_comes_to_answer_as_the_hinted_base(subset: str) -> None:
    steps = Steps(w_rl=0.0, anchor=0.0, subset=subset)
    data = [datum(1, -1.0, "be brief"), datum(2, 0.0, "be brief"), datum(3, 1.0)]

    def apart() -> float:
        (rows,) = steps.rows(data)
        teacher = steps.base(rows.contexts[0]).logits().log_softmax(-1)
        student = steps.policy(rows).logits().log_softmax(-1)
        return float(((teacher.exp() * (teacher - student)).sum(-1) * rows.taught[0]).sum().detach())

    before = apart()
    steps.train(data, 12)
    assert apart() < 0.8 * before


def test_version_one_moves_the_sampled_tokens_to_the_teacher_s() -> None:
    steps = Steps(w_rl=0.0, anchor=0.0, distil="sampled")
    data = [datum(1, -1.0, "be brief"), datum(2, -1.0, "be brief")]
    (rows,) = steps.rows(data)
    teacher, before = steps.base(rows.contexts[0]).logprobs(), steps.policy(rows).logprobs().detach()
    data = [msgspec.structs.replace(one, logprobs=old.tolist()) for one, old in zip(data, before.split(6), strict=True)]
    steps.train(data, 3)
    moved = steps.policy(rows).logprobs().detach() - before
    assert float((moved * (teacher - before)).sum()) > 0


def test_a_verdict_moves_the_whole_turn() -> None:
    steps = Steps(w_opd=0.0)
    data = [datum(1, 1.0, answer="abc"), datum(2, -1.0, answer="xyz")]
    (rows,) = steps.rows(data)
    before = steps.policy(rows).logprobs().detach()
    data = [msgspec.structs.replace(one, logprobs=old.tolist()) for one, old in zip(data, before.split(3), strict=True)]
    steps.train(data, 3)
    moved = (steps.policy(rows).logprobs().detach() - before).split(3)
    assert float(moved[0].sum()) > 0 > float(moved[1].sum())
    assert steps.asked == []  # without a weight for it, the base is not asked


def test_the_anchor_pulls_a_turn_without_a_hint_back_to_the_base() -> None:
    steps = Steps(w_rl=0.0, anchor=1.0)
    here, elsewhere = [datum(1, 1.0)], [datum(2, -1.0, "be brief")]
    loss, gradient = steps.gradient(here)
    assert loss == pytest.approx(0.0, abs=1e-6)  # the policy still is the base
    assert all(float(one.abs().max()) < 1e-6 for one in gradient.values())
    steps.train([*elsewhere], 6)

    def apart() -> float:
        (rows,) = steps.rows(here)
        base, now = (one(rows).logits().log_softmax(-1) for one in (steps.base, steps.policy))
        return float((base.exp() * (base - now)).sum().detach())

    before = apart()
    steps.train(here, 6)
    assert apart() < before
    steps.objective.anchor = 0.0
    assert all(float(one.abs().max()) == 0 for one in steps.gradient(here)[1].values())


@pytest.mark.parametrize("settings", [{}, {"distil": "sampled"}, {"kl": 0.1}, {"subset": "overlap", "top_k": 2}])
def test_the_result_does_not_depend_on_the_split(settings: dict[str, Any]) -> None:
    data = [datum(1, -1.0, "be brief", "be very brief"), datum(2, 0.0, "in French"), datum(3, 1.0), datum(4, -1.0)]
    steps = Steps(**settings)
    steps.train([datum(9, 1.0, "other")], 2)  # away from the base, where everything has a gradient
    whole, one = steps.gradient(data)
    split, many = steps.gradient(data, tokens=1)
    assert split == pytest.approx(whole, abs=1e-5)
    for name, gradient in one.items():
        assert torch.allclose(gradient, many[name], atol=1e-5)


def test_a_sample_without_a_verdict_is_an_error() -> None:
    with pytest.raises(TrainError, match="verdict"):
        Steps().gradient([msgspec.structs.replace(datum(1, 0.0), reward=None)])
