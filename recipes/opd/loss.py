"""OPD's objective: reverse KL to a frozen teacher on the policy's own answers.

Source: on-policy distillation (Agarwal et al. 2023, arXiv 2306.13649; Thinking Machines, 2025). Loaded only by the
trainer process (it needs torch). Knows: the equations. Does not know: which weights the teacher is.

    top_k 0:  A_t = -c (log S(a_t) - log T(a_t)), detached;  L = -mean_t w_t A_t log S(a_t)
    top_k K:  L = c mean_t w_t sum_v sg(S_v (log S_v - log T_v)) log S_v, v the policy's K likeliest tokens and the rest

w_t = min(S / q, cap), 1 with cap 0. The gradient of the second is that of KL(S || T) (as sum_v S_v grad log S_v = 0):
the first one's expectation, up to the rest, and none of its noise. Where teacher and policy are alike up to rounding
every gradient is exactly 0, in both: an optimizer that divides by the gradient's size would make a step of mere noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from reef.trainers.local.llama import Llama
from reef.trainers.local.losses import distil_advantage, ratio_of, tail, tis, token_mean
from reef.trainers.local.objective import Context, Outputs, Plan, Rows

SAME = 1e-4  # nats: what two passes of the same weights may differ by


def reverse(pupil: Tensor, teacher: Tensor) -> Tensor:
    """[T], with the gradient of KL(S || T): sum_v sg(S_v (log S_v - log T_v)) log S_v.
    Both are [T, V] log-probs of whole distributions; gradients go through the first."""
    apart = (pupil - teacher).detach()
    apart = torch.where(apart.abs() < SAME, torch.zeros_like(apart), apart)
    return (pupil.detach().exp() * apart * pupil).sum(-1)


class OPD:
    """Options are the fields of `recipes.opd.recipe.OPDRecipe` that concern training."""

    def __init__(
        self,
        *,
        teacher: str,
        learning_rate: float,
        scale: float,
        cap: float,
        top_k: int,
        rank: int,
        alpha: float,
        seed: int,
    ) -> None:
        self.plan = Plan(learning_rate, rank, alpha, seed, teacher=teacher)
        self.scale, self.cap, self.top_k = scale, cap, top_k

    def modules(self, model: Llama) -> Mapping[str, tuple[nn.Module, float]]:
        return {}

    @torch.no_grad()
    def prepare(self, context: Context, batch: Sequence[Rows]) -> dict[str, float]:
        for rows in batch:
            rows.passes["teacher"] = context.teacher(rows)
        total = batch[0].total
        return {"samples": float(total.samples), "tokens": float(total.tokens)}

    def loss(self, outputs: Outputs, rows: Rows) -> tuple[Tensor, dict[str, float]]:
        """The policy's log-probs (with gradients) and the teacher's: [T], or [T, K + 1] with `top_k`."""
        teacher, mean = rows.passes["teacher"], lambda each: token_mean(each, rows.mask, rows.total)
        if self.top_k:
            top = outputs.top(self.top_k)
            sampled, told = top.sampled, teacher.chosen(top.ids)
            pupil, told = tail(top.logprobs), tail(told)
            each = self.scale * reverse(pupil, told)
            apart = (pupil.detach().exp() * (pupil.detach() - told)).sum(-1)
        else:
            sampled, told = outputs.logprobs(), teacher.logprobs()
            apart = (sampled - told).detach()
            each = -distil_advantage(sampled, told, self.scale).masked_fill(apart.abs() < SAME, 0.0) * sampled
        if self.cap:
            each = each * tis(ratio_of(sampled, rows.logprobs), self.cap)
        return mean(each), {"reverse_kl": float(mean(apart))}

    def aux_steps(self, context: Context, batch: Sequence[Rows]) -> dict[str, float]:
        return {}
