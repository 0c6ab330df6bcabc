"""OPD's objective: reverse KL to a frozen teacher on the policy's own answers.

Source: on-policy distillation (Agarwal et al. 2023, arXiv 2306.13649; Thinking Machines, 2025). Loaded only by the
trainer process (it needs torch). Knows: the equations. Does not know: which weights the teacher is.

    top_k 0:  A_t = -c (log S(a_t) - log T(a_t)), detached;  L = -mean_t w_t A_t log S(a_t)
    top_k K:  L = c mean_t w_t KL(S || T) over the policy's K likeliest tokens and the rest as one

w_t = min(S / q, cap), 1 with cap 0. The second has the first one's expectation (up to the rest) and none of its noise.
Teacher and policy alike: every A and every gradient is exactly 0 for the first; for the second up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from reef.trainers.local.llama import Llama
from reef.trainers.local.losses import distil_advantage, kl, ratio_of, tail, tis, token_mean
from reef.trainers.local.objective import Context, Outputs, Plan, Rows


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
        teacher = rows.passes["teacher"]
        if self.top_k:
            top = outputs.top(self.top_k)
            sampled, told = top.sampled, teacher.chosen(torch.cat((rows.targets[:, None], top.ids), 1))
            each = self.scale * kl(tail(top.logprobs), tail(told[:, 1:]))
            told = told[:, 0]
        else:
            sampled, told = outputs.logprobs(), teacher.logprobs()
            each = -distil_advantage(sampled, told, self.scale) * sampled
        apart = (sampled.detach() - told) * rows.mask
        if self.cap:
            each = each * tis(ratio_of(sampled, rows.logprobs), self.cap)
        loss = token_mean(each, rows.mask, rows.total)
        return loss, {"reverse_kl": float(apart.sum()) / rows.total.tokens}

    def aux_steps(self, context: Context, batch: Sequence[Rows]) -> dict[str, float]:
        return {}
