"""The loss toolbox against worked numbers, its reductions against every split, its divergences against gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reef.trainers.local import losses
from reef.trainers.local.objective import Total

PI, Q = torch.tensor([0.5, 0.2, 0.9, 0.05]), torch.tensor([0.4, 0.4, 0.1, 0.05])
ADVANTAGES = torch.tensor([1.0, 1.0, 1.0, -2.0])
S, T = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.7, 0.2, 0.1]]).log()


def near(values: list[float], rel: float = 1e-5) -> object:
    return pytest.approx(values, rel=rel, abs=2e-6)


# --- ratios -----------------------------------------------------------------------------------------------------------


def test_ppo_clips_from_the_side_that_pays() -> None:
    ratio = losses.ratio_of(PI.log(), Q.log())
    assert ratio.tolist() == near([1.25, 0.5, 9, 1])
    found = losses.ppo_clip(ratio, ADVANTAGES, 0.2, 0.28)
    assert found.tolist() == near([-1.25, -0.5, -1.28, 2])
    assert float(found.mean()) == pytest.approx(-0.2575)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "dual"),
    [(3, -1, 3, 2), (0.5, -1, 0.8, 0.8), (1.5, 1, -1.28, -1.28), (0.5, 1, -0.5, -0.5)],
)
def test_single_tokens_of_ppo(ratio: float, advantage: float, loss: float, dual: float) -> None:
    r, a = torch.tensor([float(ratio)]), torch.tensor([float(advantage)])
    assert losses.ppo_clip(r, a, 0.2, 0.28).item() == pytest.approx(loss)
    assert losses.ppo_clip(r, a, 0.2, 0.28, dual=2.0).item() == pytest.approx(dual)


def test_ppo_has_no_gradient_where_it_clips() -> None:
    logprobs = PI.log().requires_grad_()
    losses.ppo_clip(losses.ratio_of(logprobs, Q.log()), ADVANTAGES, 0.2, 0.28).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == near([-1.25, -0.5, 0, 2])


def test_weights() -> None:
    ratio = torch.tensor([0.5, 1, 3, 10], requires_grad=True)
    assert losses.tis(ratio, 2).tolist() == [0.5, 1, 2, 2]
    assert losses.icepop(ratio, 0.5, 2).tolist() == [0.5, 1, 0, 0]
    assert losses.cispo(ratio, 1, 0.28).tolist() == near([0.5, 1, 1.28, 1.28])
    assert losses.dis(ratio, 0.3, 5.0).tolist() == [0, 1, 3, 0]
    assert losses.tis(torch.tensor([0.5, 1.7, 9]), 2).tolist() == near([0.5, 1.7, 2])  # the cap of self-distillation
    for weight in (
        losses.tis(ratio, 2),
        losses.icepop(ratio, 0.5, 2),
        losses.cispo(ratio, 1, 0.28),
        losses.dis(ratio, 0.3, 5),
    ):
        assert not weight.requires_grad


def test_a_wild_log_ratio_does_not_overflow() -> None:
    assert losses.ratio_of(torch.tensor([0.0]), torch.tensor([-1e4])).item() == pytest.approx(math.exp(20))


def test_gspo_is_one_ratio_a_sequence() -> None:
    log_ratio = torch.tensor([0.1, -0.05, 0.2, 9.0], requires_grad=True)
    found = losses.gspo_ratio(log_ratio, torch.tensor([1.0, 1, 1, 0]), (4,))
    assert found.tolist() == near([1.086904] * 4)
    clipped = losses.ppo_clip(found, torch.ones(4), 3e-4, 4e-4)
    assert clipped.tolist() == near([-1.0004] * 4)
    found[0].backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad.tolist() == near([1.086904 / 3] * 3 + [0.0])


def test_opsm_masks_whole_sequences_that_are_bad_and_far() -> None:
    kl, advantage = torch.tensor([1.0, 3.0, 1.0, 3.0, 0.1]), torch.tensor([-1.0, -1, 1, 1, -1])
    found = losses.opsm(kl, advantage, torch.ones(5), (2, 2, 1), 1.5)
    assert found.tolist() == [0, 0, 1, 1, 1]


# --- estimators and divergences ---------------------------------------------------------------------------------------


def test_estimators_of_the_divergence() -> None:
    logprobs, ref = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    found = [estimator(logprobs, ref).item() for estimator in (losses.k1, losses.k2, losses.k3)]
    assert found == near([0.693147, 0.240227, 0.193147])
    assert losses.k3(torch.tensor([-100.0]), torch.tensor([0.0])).item() == pytest.approx(math.exp(10) - 11, rel=1e-5)


@pytest.mark.parametrize("old", [[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]])
def test_the_pull_of_old_samples_is_the_kl_of_what_is_now(old: list[float]) -> None:
    """Worked out over all three tokens: value and gradient are those of KL(pi || ref), whoever drew the samples. Plain
    k3's gradient is not."""
    logits = torch.tensor([0.3, -0.2, -2.0], requires_grad=True)
    ref, drawn = torch.tensor([0.1, 0.1, 0.8]).log(), torch.tensor(old).log()
    now = logits.log_softmax(-1)
    exact = losses.kl(logits[None], ref[None])[0]
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    mean = (torch.tensor(old) * losses.pull(now, ref, drawn)).sum()
    (found,) = torch.autograd.grad(mean, logits, retain_graph=True)
    assert mean.item() == pytest.approx(exact.item(), rel=1e-5)
    torch.testing.assert_close(found, wanted)
    (plain,) = torch.autograd.grad((torch.tensor(old) * losses.k3(now, ref)).sum(), logits)
    assert (plain - wanted).abs().max() > 0.2


def test_the_pull_of_a_token_that_was_left_is_bounded() -> None:
    """Drawn when it was likely, given up since, and dear to the base: plain k3 pulls a hundred times as hard."""
    now = torch.tensor([math.log(0.001)], requires_grad=True)
    ref, drawn = torch.tensor([math.log(0.9)]), torch.tensor([math.log(0.5)])
    (pull,) = torch.autograd.grad(losses.pull(now, ref, drawn).sum(), now)
    (plain,) = torch.autograd.grad(losses.k3(now, ref).sum(), now)
    assert pull.item() == pytest.approx(0.002 * math.log(0.001 / 0.9), rel=1e-5)
    assert plain.item() == pytest.approx(1 - 900, rel=1e-4)


def test_divergences_of_whole_distributions() -> None:
    assert losses.kl(T, S).item() == pytest.approx(0.085123, abs=1e-6)  # forward
    assert losses.kl(S, T).item() == pytest.approx(0.092033, abs=1e-6)  # reverse
    for alpha, value in ((0.5, 0.021901), (0.25, 0.016156), (0.75, 0.016784), (0.0, 0.085123), (1.0, 0.092033)):
        assert losses.jsd(S, T, alpha).item() == pytest.approx(value, abs=1e-6)


def test_the_likeliest_and_the_rest() -> None:
    """Top 1 with the tail as a bucket; top 2 without it, renormalised."""
    one, other = losses.tail(S[:, :1]), losses.tail(T[:, :1])
    assert one.exp().tolist()[0] == near([0.5, 0.5])
    found = [losses.kl(other, one).item(), losses.kl(one, other).item(), losses.jsd(one, other).item()]
    assert found == pytest.approx([0.082283, 0.087177, 0.021006], abs=1e-6)
    assert losses.kl(T[:, :2], S[:, :2]).item() == pytest.approx(0.053814, abs=1e-6)


def test_a_tail_that_holds_nothing() -> None:
    logs = torch.tensor([[0.75, 0.25]]).log().requires_grad_()
    whole = losses.tail(logs)
    assert whole.exp().tolist()[0] == pytest.approx([0.75, 0.25, 1e-7], rel=1e-3)
    losses.kl(losses.tail(T[:, :2]), whole).sum().backward()
    assert logs.grad is not None
    assert bool(torch.isfinite(logs.grad).all())


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_what_is_illegal_for_both_adds_nothing(alpha: float) -> None:
    """A grammar puts -inf into both: value and gradient are those of the distributions without that id."""
    free = torch.tensor([[0.3, -1.0, 0.7]], requires_grad=True)
    held = torch.tensor([[0.3, -1.0, 0.7, -math.inf]], requires_grad=True)
    other = torch.tensor([[1.0, 0.2, -0.4]])
    wide = torch.cat((other, torch.tensor([[-math.inf]])), 1)
    plain, masked = losses.jsd(free, other, alpha), losses.jsd(held, wide, alpha)
    assert masked.item() == pytest.approx(plain.item(), rel=1e-5)
    plain.sum().backward()
    masked.sum().backward()
    assert free.grad is not None
    assert held.grad is not None
    assert held.grad[0, :3].tolist() == near(free.grad[0].tolist())
    assert held.grad[0, 3].item() == 0


@given(st.lists(st.floats(-5, 5), min_size=4, max_size=4), st.lists(st.floats(-5, 5), min_size=4, max_size=4))
def test_a_divergence_is_never_negative_and_zero_for_the_same(one: list[float], other: list[float]) -> None:
    p, q = torch.tensor([one]), torch.tensor([other])
    for value in (losses.kl(p, q), losses.kl(q, p), losses.jsd(p, q), losses.jsd(p, q, 0.2)):
        assert value.item() >= -1e-6
    assert losses.kl(p, p + 3).item() == pytest.approx(0, abs=1e-5)  # logits are normalised first
    assert losses.jsd(p, q, 0.3).item() == pytest.approx(losses.jsd(q, p, 0.7).item(), abs=1e-5)


def test_the_teachers_own_distribution_gives_no_gradient() -> None:
    """RECIPE: an empty context, a frozen average and no step yet: loss 0 and gradient 0."""
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for alpha in (0.0, 0.5, 1.0):
        logits.grad = None
        value = losses.jsd(logits, logits.detach(), alpha)
        value.sum().backward()
        assert value.abs().max().item() < 1e-6
        assert logits.grad is not None
        assert logits.grad.abs().max().item() < 1e-6


def test_on_policy_distillation() -> None:
    student, teacher = torch.tensor([0.5, 0.2]).log().requires_grad_(), torch.tensor([0.25, 0.4]).log()
    found = losses.distil_advantage(student, teacher)
    assert found.tolist() == near([-0.693147, 0.693147])
    assert float(losses.k1(student.detach(), teacher).mean()) == pytest.approx(0, abs=1e-6)
    assert losses.distil_advantage(student, student).tolist() == [0, 0]
    assert not found.requires_grad


def test_cross_entropy_of_a_demonstration() -> None:
    """Trained tokens only; the observation in front adds nothing."""
    logprobs = torch.tensor([0.01, 0.5, 0.25, 0.8]).log()
    mask = torch.tensor([0.0, 1, 1, 1])
    assert losses.token_mean(-logprobs, mask, Total(1, 3)).item() == pytest.approx(0.767528, abs=1e-6)


# --- advantages -------------------------------------------------------------------------------------------------------


def test_group_advantages() -> None:
    rewards = [1.0, 0, 0, 1]
    sign = [1, -1, -1, 1]
    assert losses.group_advantages(rewards) == near([0.866024 * one for one in sign])
    assert losses.group_advantages(rewards, ddof=0) == pytest.approx([0.999998 * one for one in sign], abs=1e-6)
    assert losses.group_advantages(rewards, scale=False) == [0.5 * one for one in sign]
    assert losses.rloo(rewards) == near([0.666667 * one for one in sign])


def test_a_group_without_a_difference_says_nothing() -> None:
    for rewards in ([1.0, 1.0, 1.0], [0.5]):
        assert losses.group_advantages(rewards) == [0.0] * len(rewards)
        assert losses.rloo(rewards) == [0.0] * len(rewards)


def test_vapos_lambda() -> None:
    assert losses.adaptive_lambda(100, 0.05) == pytest.approx(0.8)
    assert losses.adaptive_lambda(10, 0.05) == 0.0


# --- reductions -------------------------------------------------------------------------------------------------------


def test_reductions() -> None:
    found, mask, lengths = torch.tensor([1.0, 2, 3, 3, 3, 3]), torch.ones(6), (2, 4)
    total = Total(2, 6)
    assert losses.seq_mean(found, mask, lengths, total).item() == pytest.approx(2.25)
    assert losses.token_mean(found, mask, total).item() == pytest.approx(2.5)
    assert losses.constant_mean(found, mask, total, 4).item() == pytest.approx(1.875)
    assert losses.token_sum(found, mask).item() == pytest.approx(15)


def test_what_is_in_the_denominator() -> None:
    """Observations are not; a trained token whose loss was set to 0 is; so is a sample without a trained token."""
    lengths, total = (3, 2, 1), Total(3, 4)
    mask = torch.tensor([1.0, 0, 1, 1, 1, 0])
    found = torch.tensor([2.0, 99, 4, 0, 6, 99])  # the fourth is masked by its method
    assert losses.token_mean(found, mask, total).item() == pytest.approx(12 / 4)
    assert losses.seq_mean(found, mask, lengths, total).item() == pytest.approx((3 + 3 + 0) / 3)
    assert losses.constant_mean(found, mask, total, 2).item() == pytest.approx(12 / 6)


@given(st.data())
def test_shares_add_up_however_a_batch_is_split(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    size = sum(lengths)
    values = torch.tensor(data.draw(st.lists(st.floats(-3, 3, width=32), min_size=size, max_size=size)))
    mask = torch.tensor([float(one) for one in data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))])
    total = Total(len(lengths), max(1, int(mask.sum())))
    cut = data.draw(st.integers(0, len(lengths)))
    parts = [part for part in (lengths[:cut], lengths[cut:]) if part]

    def whole(reduce: object) -> tuple[float, float]:
        at, shares = 0, 0.0
        for part in parts:
            end = at + sum(part)
            shares += float(reduce(values[at:end], mask[at:end], part))  # type: ignore[operator]
            at = end
        return shares, float(reduce(values, mask, lengths))  # type: ignore[operator]

    def token(v: Tensor, m: Tensor, part: list[int]) -> Tensor:
        return losses.token_mean(v, m, total)

    def seq(v: Tensor, m: Tensor, part: list[int]) -> Tensor:
        return losses.seq_mean(v, m, part, total)

    for reduce in (token, seq):
        shares, once = whole(reduce)
        assert shares == pytest.approx(once, abs=1e-5)
