"""The loss toolbox: what methods of policy optimisation and distillation are made of, as plain functions.

Knows: ratios, estimators, divergences, advantages and reductions, each on tensors it is handed.
Does not know: models, rows, or which method uses what.

Unless said otherwise a tensor is [T] float32: the response tokens of a micro-batch, sample after sample. `mask` is 1 at
a trained token and 0 at an observation. `ratio` is pi / q, q being the recorded log-prob. `p` and `q` of divergences
are [T, V] logits or log-probs of the whole vocabulary, or [T, K] log-probs on the same K ids (see `tail`).
A per-token loss is a number to minimise; a weight is a detached factor of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from reef.trainers.local.objective import Total

# --- ratios and what bounds them --------------------------------------------------------------------------------------


def ratio_of(logprobs: Tensor, recorded: Tensor, bound: float = 20.0) -> Tensor:
    """pi / q from log-probs of the same tokens; the log-ratio is clamped to +-`bound`. Gradients go through."""
    return (logprobs - recorded).clamp(-bound, bound).exp()


def ppo_clip(ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    """max(-r A, -clip(r, 1 - low, 1 + high) A) (PPO, arXiv 1707.06347; two bounds: DAPO, arXiv 2503.14476).

    `dual` c > 1 also bounds a loss with A < 0 by -c A (arXiv 1912.09729). Differentiable through `ratio`.
    """
    loss = torch.maximum(-ratio * advantage, -ratio.clamp(1 - low, 1 + high) * advantage)
    if dual is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -dual * advantage), loss)


def dis(ratio: Tensor, low: float, high: float) -> Tensor:
    """SAO's weight f(r): the ratio strictly inside (1 - low, 1 + high), else 0 (arXiv 2607.07508). Detached; the loss
    is -f(r) A log pi."""
    ratio = ratio.detach()
    return torch.where((ratio > 1 - low) & (ratio < 1 + high), ratio, torch.zeros_like(ratio))


def cispo(ratio: Tensor, low: float, high: float) -> Tensor:
    """CISPO's weight clip(r, 1 - low, 1 + high) (arXiv 2506.13585); `low` 1 leaves the lower side open. Detached; the
    loss is -weight A log pi."""
    return ratio.detach().clamp(1 - low, 1 + high)


def tis(ratio: Tensor, cap: float) -> Tensor:
    """Truncated importance weight clamp(r, 0, cap), also the IS cap of self-distillation. Detached."""
    return ratio.detach().clamp(0, cap)


def icepop(ratio: Tensor, low: float, high: float) -> Tensor:
    """The ratio where low <= r <= high (absolute bounds, not 1 +- epsilon), else 0. Detached."""
    ratio = ratio.detach()
    return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))


def gspo_ratio(log_ratio: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """GSPO's ratio exp(mean over the trained tokens of log r) of each sequence, at each of its tokens
    (arXiv 2507.18071). Differentiable; use it in `ppo_clip` and reduce with `seq_mean`."""
    return spread(sample_means(log_ratio, mask, lengths).exp(), lengths)


def opsm(kl: Tensor, advantage: Tensor, mask: Tensor, lengths: Sequence[int], limit: float) -> Tensor:
    """Off-policy sequence mask: 0 for every token of a sequence whose advantage is negative and whose mean `kl` (such
    as k1 of the recorded against the new log-probs) exceeds `limit`, else 1."""
    far = sample_means(kl, mask, lengths) > limit
    bad = sample_means(advantage, mask, lengths) < 0
    return spread(1 - (far & bad).float(), lengths).detach()


# --- estimators of KL(pi || ref) from the sampled tokens (x = log pi - log ref) ---------------------------------------


def k1(logprobs: Tensor, ref: Tensor) -> Tensor:
    """x: unbiased, any sign. As a loss its gradient says nothing about the reference; use it as a reward or metric."""
    return logprobs - ref


def k2(logprobs: Tensor, ref: Tensor) -> Tensor:
    """x^2 / 2: biased, at least 0; its gradient is that of the reverse KL."""
    return (logprobs - ref).square() / 2


def k3(logprobs: Tensor, ref: Tensor, bound: float = 10.0) -> Tensor:
    """e^-x - 1 + x, x clamped to +-`bound`: unbiased, at least 0."""
    apart = (logprobs - ref).clamp(-bound, bound)
    return (-apart).exp() - 1 + apart


def pull(logprobs: Tensor, ref: Tensor, sampled: Tensor, most: float = 10.0) -> Tensor:
    """k3 of tokens that may have been drawn from an older policy q (`sampled`: its log-probs), weighted by pi / q, at
    most `most`, with the gradient through both: in expectation over q it is KL(pi || ref), and so is its gradient,
    pi / q x grad log pi (the unbiased estimate of DeepSeek-V3.2, arXiv 2512.02556). Plain k3 on old samples pulls
    without bound at tokens that pi has left and ref has not, and undoes what was learnt."""
    return ratio_of(logprobs, sampled).clamp(max=most) * k3(logprobs, ref)


# --- divergences of whole distributions -------------------------------------------------------------------------------


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) [T] of two distributions [T, V]; each is normalised first. What p never does adds 0.

    Forward distillation is kl(teacher, student), reverse kl(student, teacher). Top-K log-probs without `tail` are
    renormalised among themselves, with it they are complete.
    """
    log_p, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1)
    prob = log_p.exp()
    return (prob * (log_p - log_q).masked_fill(prob == 0, 0.0)).sum(-1)


def jsd(student: Tensor, teacher: Tensor, alpha: float = 0.5) -> Tensor:
    """Generalised Jensen-Shannon divergence [T]: (1 - alpha) KL(S || M) + alpha KL(T || M), M = (1 - alpha) S + alpha T
    (GKD, arXiv 2306.13649). alpha 0 is KL(T || S), the forward one; alpha 1 is KL(S || T), the reverse one."""
    if alpha <= 0:
        return kl(teacher, student)
    if alpha >= 1:
        return kl(student, teacher)
    one, other = student.float().log_softmax(-1), teacher.float().log_softmax(-1)
    middle = ((1 - alpha) * one.exp() + alpha * other.exp()).clamp_min(1e-30).log()

    def part(logs: Tensor) -> Tensor:
        prob = logs.exp()
        return (prob * (logs - middle).masked_fill(prob == 0, 0.0)).sum(-1)

    return (1 - alpha) * part(one) + alpha * part(other)


def tail(logprobs: Tensor) -> Tensor:
    """Log-probs [T, K] of some ids, made complete: [T, K + 1], the last column log(1 - sum), at least log 1e-7."""
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp_min(1e-7)
    return torch.cat((logprobs, rest.log()), -1)


# --- advantages -------------------------------------------------------------------------------------------------------


def group_advantages(rewards: Sequence[float], *, scale: bool = True, ddof: int = 1) -> list[float]:
    """GRPO (arXiv 2402.03300): (R - mean) / (std + 1e-6) within one group; without `scale` R - mean (Dr. GRPO, arXiv
    2503.20783). `ddof` 1 is the sample's deviation, 0 the population's. All alike, or alone: zeros."""
    mean = math.fsum(rewards) / len(rewards)
    apart = [reward - mean for reward in rewards]
    if not scale:
        return apart
    if len(rewards) <= ddof or not any(apart):
        return [0.0] * len(rewards)
    deviation = math.sqrt(math.fsum(one * one for one in apart) / (len(rewards) - ddof))
    return [one / (deviation + 1e-6) for one in apart]


def rloo(rewards: Sequence[float]) -> list[float]:
    """R minus the mean of the others of its group (arXiv 2402.14740). Alone: 0."""
    others = len(rewards) - 1
    whole = math.fsum(rewards)
    return [reward - (whole - reward) / others for reward in rewards] if others else [0.0] * len(rewards)


def adaptive_lambda(length: int, alpha: float) -> float:
    """Length-adaptive lambda = 1 - 1 / (alpha l), clipped to [0, 1]; l counts observations too. VAPO (arXiv 2504.05118)
    has alpha 0.05, SAO 1.5."""
    return min(1.0, max(0.0, 1 - 1 / (alpha * length)))


def gae(values: Sequence[float], mask: Sequence[float], reward: float, lam: float) -> list[float]:
    """Skip-observation GAE, gamma 1: the recursion walks action tokens only, backwards; observations get 0.

    delta_t = rho_t + V(next action) - V(t), A_t = delta_t + lam A(next action); rho is the reward on the last action.
    """
    found = [0.0] * len(values)
    following, ahead, rho = 0.0, 0.0, reward
    for t in reversed(range(len(values))):
        if mask[t]:
            ahead = rho + following - values[t] + lam * ahead
            found[t], following, rho = ahead, values[t], 0.0
    return found


def distil_advantage(student: Tensor, teacher: Tensor, scale: float = 1.0) -> Tensor:
    """On-policy distillation as a policy gradient: A = -scale (log S - log T) of the sampled tokens. Detached."""
    return -scale * (student - teacher).detach()


def explained_variance(returns: Sequence[float], values: Sequence[float]) -> float | None:
    """1 - Var(R - V) / Var(R). None where it is not defined: fewer than two returns, or all the same."""
    spread_of = _variance(returns)
    if spread_of <= 1e-12:
        return None
    return 1 - _variance([one - other for one, other in zip(returns, values, strict=True)]) / spread_of


def _variance(numbers: Sequence[float]) -> float:
    """Of the numbers cut off at 1e100 either way (NaN counts as 0), so that no square or sum can overflow."""
    if not numbers:
        return 0.0
    bounded = [0.0 if math.isnan(number) else max(-1e100, min(1e100, number)) for number in numbers]
    mean = math.fsum(bounded) / len(bounded)
    return math.fsum((number - mean) ** 2 for number in bounded) / len(bounded)


# --- reductions: a micro-batch's share of the batch's loss ------------------------------------------------------------


def token_mean(losses: Tensor, mask: Tensor, total: Total) -> Tensor:
    """Sum over trained tokens / all trained tokens of the batch. In the denominator: every token with mask 1, also one
    whose weight a method set to 0 (DIS, IcePop, OPSM). Not in it: observations (mask 0)."""
    return (losses * mask).sum() / total.tokens


def seq_mean(losses: Tensor, mask: Tensor, lengths: Sequence[int], total: Total) -> Tensor:
    """Mean over samples of each one's mean over its trained tokens. In the denominators: tokens with mask 1, also those
    of weight 0; and every sample of the batch, also one without a trained token, which adds 0."""
    return sample_means(losses, mask, lengths).sum() / total.samples


def constant_mean(losses: Tensor, mask: Tensor, total: Total, length: int) -> Tensor:
    """Sum over trained tokens / (samples * `length`), whatever the samples' own lengths are (Dr. GRPO). In the
    denominator: every sample of the batch; no count of tokens."""
    return (losses * mask).sum() / (total.samples * length)


def token_sum(losses: Tensor, mask: Tensor) -> Tensor:
    """Sum over trained tokens, divided by nothing (TTT-Discover)."""
    return (losses * mask).sum()


def sample_means(values: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """[T] -> [B]: each sample's mean over its tokens with mask 1; 0 for a sample that has none. Differentiable."""
    return sample_sums(values * mask, lengths) / sample_sums(mask, lengths).clamp_min(1)


def sample_sums(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """[T] -> [B]: the sum over each sample's tokens. Differentiable."""
    return values.new_zeros(len(lengths)).index_add(0, _sample(lengths), values)


def spread(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """[B] -> [T]: each sample's value at each of its tokens. Differentiable."""
    return values[_sample(lengths)]


def _sample(lengths: Sequence[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
