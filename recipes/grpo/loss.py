"""The objective of GRPO and its kin: one advantage for a whole answer, from the other answers of its group.

Loaded only by the trainer process (it needs torch). Knows: advantages by group, four losses, three reductions, and the
pull towards the base. Does not know: files, micro-batches, optimizers, how a group came together.

    A = (R - mean) / (std + 1e-6) | R - mean | R - mean of the others,  the same for every token of an answer
    ppo: max(-r A, -clip(r) A)   cispo: -sg(clip(r)) A log pi   dis: -sg(f(r)) A log pi   gspo: ppo, r an answer's mean

r = pi / q, q the recorded log-prob: nothing is recomputed. With `tis_cap` r is against the weights before this step
(so it is 1 where it is differentiated) and the loss is weighed by min(pi_old / q, tis_cap), which is detached.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from reef.core.errors import TrainError
from reef.trainers.local import losses
from reef.trainers.local.llama import Llama
from reef.trainers.local.objective import Common, Context, Outputs, Plan, Rows

ALIKE = 1e-9
"""Rewards of a group this near to each other give no advantage: rounding must not be scaled up into a signal."""


def advantages(rewards: Sequence[float], kind: str) -> list[float]:
    """The advantage of each answer of one group; `kind` is grpo, dr_grpo or rloo. All alike, or alone: zeros."""
    if max(rewards) - min(rewards) <= ALIKE:
        return [0.0] * len(rewards)
    if kind == "rloo":
        return losses.rloo(rewards)
    return losses.group_advantages(rewards, scale=kind == "grpo")


def grouped(groups: Sequence[str | None], rewards: Sequence[float], kind: str) -> list[float]:
    """The advantages of a whole batch, in its order. A sample without a group is a group of one: 0."""
    members: dict[object, list[int]] = {}
    for place, name in enumerate(groups):
        members.setdefault(("alone", place) if name is None else name, []).append(place)
    found = [0.0] * len(rewards)
    for places in members.values():
        for place, value in zip(places, advantages([rewards[place] for place in places], kind), strict=True):
            found[place] = value
    return found


class GRPO:
    """The four parts. Options are what `recipes.grpo.recipe.GRPORecipe.chosen` and its other fields say."""

    def __init__(
        self,
        *,
        advantage: str,
        loss: str,
        reduction: str,
        epsilon_low: float,
        epsilon_high: float,
        dual_clip: float | None,
        tis_cap: float | None,
        kl: float,
        length: int | None,
        learning_rate: float,
        rank: int,
        alpha: float,
        seed: int,
    ) -> None:
        self.plan = Plan(learning_rate=learning_rate, rank=rank, alpha=alpha, seed=seed)
        self.kind, self.form, self.reduction = advantage, loss, reduction
        self.low, self.high = epsilon_low, epsilon_high
        self.dual, self.cap, self.kl, self.length = dual_clip, tis_cap, kl, length
        self._longest = 1

    def modules(self, model: Llama) -> Mapping[str, tuple[nn.Module, float]]:
        return {}

    @torch.no_grad()
    def prepare(self, context: Context, batch: Sequence[Rows]) -> dict[str, float]:
        """Advantages, from groups that micro-batches may have split; log-probs of the base where it pulls."""
        rewards: list[float] = []
        for rows in batch:
            for reward in rows.rewards:
                if reward is None:
                    raise TrainError("GRPO needs a score for every sample; the batch holds one without")
                rewards.append(reward)
        groups = [group for rows in batch for group in rows.groups]
        found = grouped(groups, rewards, self.kind)
        self._longest = max(length for rows in batch for length in rows.lengths)
        start = 0
        for rows in batch:
            own = torch.tensor(found[start : start + len(rows.lengths)])
            rows.extra["advantages"] = losses.spread(own, rows.lengths)
            start += len(rows.lengths)
            if self.kl:
                rows.extra["base_logprobs"] = context.base(rows).logprobs()
        lags = [lag for rows in batch for lag in rows.lags]
        return {
            "reward": math.fsum(rewards) / len(rewards),
            "advantage_max": max(map(abs, found)),
            "zero_signal_samples": float(sum(value == 0 for value in found)),
            "lag_mean": sum(lags) / len(lags),
            "lag_max": float(max(lags)),
            "tokens": float(batch[0].total.tokens),
            "samples": float(len(rewards)),
        }

    def loss(self, outputs: Outputs, rows: Rows) -> tuple[Tensor, dict[str, float]]:
        """New log-probs (with gradients), recorded `rows.logprobs`, `rows.mask` and advantages are all [T]."""
        logprobs = outputs.logprobs()
        tokens = rows.total.tokens
        each, clipped = self._policy(logprobs, rows)
        policy = self._reduce(each, rows)
        apart = (logprobs.detach() - rows.logprobs).abs() * rows.mask
        metrics = {
            "policy_loss": float(policy.detach()),
            "pg_clipfrac": float((clipped * rows.mask).sum()) / tokens,
            "mismatch": float(apart.sum()) / tokens,
        }
        if not self.kl:
            return policy, metrics
        drift = self._reduce(losses.pull(logprobs, rows.extra["base_logprobs"], rows.logprobs), rows)
        return policy + self.kl * drift, metrics | {"kl": float(drift.detach())}

    def aux_steps(self, context: Context, batch: Sequence[Rows]) -> dict[str, float]:
        return {}

    def common(self, rows: Rows) -> Common | None:
        """Where nothing but recorded log-probs bounds the ratio; each token's share of the mean is in its weight."""
        if self.form not in ("ppo", "cispo") or self.kl or self.cap is not None:
            return None
        advantage = rows.extra["advantages"].detach()
        if self.reduction == "token_mean":
            share = advantage / rows.total.tokens
        elif self.reduction == "seq_mean":
            each = losses.sample_sums(rows.mask, rows.lengths).clamp_min(1)
            share = advantage / losses.spread(each, rows.lengths) / rows.total.samples
        else:
            share = advantage / (rows.total.samples * (self.length or self._longest))
        return Common(self.form, share * rows.mask, self.low, self.high, self.dual if self.form == "ppo" else None)

    def _policy(self, logprobs: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Each token's loss [T], and 1 where the bounds took its gradient or changed its weight [T]."""
        advantage, low, high = rows.extra["advantages"], self.low, self.high
        recorded = logprobs.detach() if self.cap is not None else rows.logprobs
        ratio = losses.ratio_of(logprobs, recorded)
        if self.form == "gspo":
            ratio = losses.gspo_ratio(logprobs - recorded, rows.mask, rows.lengths)
        if self.form in ("ppo", "gspo"):
            each = losses.ppo_clip(ratio, advantage, low, high, self.dual)
            clipped = (each != -ratio * advantage).float()
            if self.cap is not None:
                old = losses.ratio_of(logprobs.detach(), rows.logprobs)
                each, clipped = each * losses.tis(old, self.cap), (old > self.cap).float()
            return each, clipped
        weight = losses.dis(ratio, low, high) if self.form == "dis" else losses.cispo(ratio, low, high)
        return -weight * advantage * logprobs, (weight != ratio.detach()).float()

    def _reduce(self, each: Tensor, rows: Rows) -> Tensor:
        if self.reduction == "token_mean":
            return losses.token_mean(each, rows.mask, rows.total)
        if self.reduction == "seq_mean":
            return losses.seq_mean(each, rows.mask, rows.lengths, rows.total)
        return losses.constant_mean(each, rows.mask, rows.total, self.length or self._longest)
