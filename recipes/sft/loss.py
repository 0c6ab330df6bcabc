"""SFT's objective: cross-entropy on the demonstration, its end included.

Loaded only by the trainer process (it needs torch). Knows: the equation. Does not know: how a demonstration was
rendered (the trainer does that; without the token that ends it nobody would learn to stop).

    L = -mean_t log pi(y_t | x, y_<t)  [+ kl KL(base || pi)]

The mean is over all demonstration tokens of the batch; prompt tokens are in neither sum nor denominator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from reef.trainers.local.llama import Llama
from reef.trainers.local.losses import kl, token_mean
from reef.trainers.local.objective import Common, Context, Outputs, Plan, Rows


def cross_entropy(logprobs: Tensor) -> Tensor:
    """-log pi of the shown tokens: [T] -> [T]."""
    return -logprobs


class SFT:
    """Options are the fields of `recipes.sft.recipe.SFTRecipe` that concern training."""

    def __init__(self, *, learning_rate: float, epochs: int, kl: float, rank: int, alpha: float, seed: int) -> None:
        self.plan = Plan(learning_rate, rank, alpha, seed, epochs=epochs)
        self.kl = kl

    def modules(self, model: Llama) -> Mapping[str, tuple[nn.Module, float]]:
        return {}

    @torch.no_grad()
    def prepare(self, context: Context, batch: Sequence[Rows]) -> dict[str, float]:
        for rows in batch if self.kl else ():
            rows.passes["base"] = context.base(rows)
        total = batch[0].total
        return {"samples": float(total.samples), "tokens": float(total.tokens)}

    def loss(self, outputs: Outputs, rows: Rows) -> tuple[Tensor, dict[str, float]]:
        """Log-probs (with gradients) and mask are [T]."""
        shown = token_mean(cross_entropy(outputs.logprobs()), rows.mask, rows.total)
        if not self.kl:
            return shown, {"cross_entropy": float(shown.detach())}
        apart = token_mean(kl(rows.passes["base"].logits(), outputs.logits()), rows.mask, rows.total)
        return shown + self.kl * apart, {"cross_entropy": float(shown.detach()), "kl": float(apart.detach())}

    def common(self, rows: Rows) -> Common | None:
        return None if self.kl else Common("cross_entropy", rows.mask / rows.total.tokens)

    def aux_steps(self, context: Context, batch: Sequence[Rows]) -> dict[str, float]:
        return {}
