"""The optimizer against torch's own, and its state."""

from __future__ import annotations

import pytest
import torch

from reef.core.errors import TrainError
from reef.trainers.local.adam import Adam


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"a": torch.randn((3, 2), generator=generator), "b": torch.randn(4, generator=generator) * 5}


def fresh(**changes: object) -> Adam:
    parameters = {"a": torch.ones((3, 2)).requires_grad_(), "b": torch.zeros(4).requires_grad_()}
    return Adam(parameters, 0.1, **changes)  # type: ignore[arg-type]


def step(adam: Adam, number: int) -> float:
    for name, gradient in gradients(number).items():
        adam.parameters[name].grad = gradient.clone()
    return adam.step("policy")


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [0.5, 1e9])
def test_equals_torch(decay: float, clip: float) -> None:
    mine = fresh(clip=clip, weight_decay=decay)
    theirs = [torch.ones((3, 2)).requires_grad_(), torch.zeros(4).requires_grad_()]
    optimizer = torch.optim.AdamW(theirs, lr=0.1, weight_decay=decay)
    for number in range(5):
        for tensor, gradient in zip(theirs, gradients(number).values(), strict=True):
            tensor.grad = gradient.clone()
        norm = float(torch.nn.utils.clip_grad_norm_(theirs, clip))
        optimizer.step()
        assert step(mine, number) == pytest.approx(norm, rel=1e-6)
    for tensor, other in zip(mine.parameters.values(), theirs, strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-5, atol=1e-6)


def test_the_rate_rises_over_the_warmup() -> None:
    sizes = []
    adam = fresh(warmup=3)
    for _ in range(5):
        before = adam.parameters["b"].detach().clone()
        adam.parameters["a"].grad, adam.parameters["b"].grad = torch.zeros((3, 2)), torch.ones(4)
        adam.step("policy")
        sizes.append(float((adam.parameters["b"] - before).abs().max()))
    assert sizes == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1], rel=1e-3)


def test_state_goes_on_exactly() -> None:
    whole, half = fresh(warmup=2), fresh(warmup=2)
    for number in range(2):
        step(whole, number)
        step(half, number)
    resumed = Adam({name: tensor.detach().clone().requires_grad_() for name, tensor in half.parameters.items()}, 0.1)
    resumed.restore(half.state())
    step(whole, 2)
    step(resumed, 2)
    assert all(torch.equal(whole.parameters[name], resumed.parameters[name]) for name in "ab")


def test_a_state_of_something_else_is_refused() -> None:
    state = fresh().state()
    del state["second.b"]
    with pytest.raises(TrainError, match=r"second\.b"):
        fresh().restore(state)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    adam = fresh()
    adam.parameters["a"].grad, adam.parameters["b"].grad = torch.full((3, 2), bad), torch.ones(4)
    with pytest.raises(TrainError, match="not finite"):
        adam.step("policy")
    assert torch.equal(adam.parameters["a"], torch.ones((3, 2)))
    assert adam.count == 0
    assert adam.parameters["b"].grad is None


def test_zero_gradients_change_nothing() -> None:
    adam = fresh()
    adam.parameters["a"].grad, adam.parameters["b"].grad = torch.zeros((3, 2)), torch.zeros(4)
    assert adam.step("policy") == 0
    assert torch.equal(adam.parameters["a"], torch.ones((3, 2)))


def test_gradients_of_any_strides_are_read_as_they_are() -> None:
    straight, turned = fresh(), fresh()
    gradient = torch.arange(6.0).view(3, 2)
    straight.parameters["a"].grad = gradient.clone()
    turned.parameters["a"].grad = gradient.t().contiguous().t()
    assert straight.step("policy") == turned.step("policy")
    assert torch.equal(straight.parameters["a"], turned.parameters["a"])


def test_a_parameter_with_other_strides_is_refused() -> None:
    with pytest.raises(TrainError, match="make a one with"):
        Adam({"a": torch.ones(2, 3).t().requires_grad_()}, 0.1)
