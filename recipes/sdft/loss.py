"""SDFT's objective: the policy's distribution at each of its own tokens is pulled to that of a teacher who knows more.

Source: self-distillation fine-tuning, arXiv 2601.19897. Loaded only by the trainer process (it needs torch).
Knows: the equations and whose distributions they are. Does not know: what the teacher reads.

    L = sum_t m_t min(pi / q, cap) D(T_t, S_t) / sum_t m_t

T: the frozen base (or a moving average of the policy) that reads the demonstration; S: the policy on the plain prompt.
m_t is 0 for the first `skip` tokens of an answer, which are then not in the denominator either. D is the forward
KL(T || S), the reverse KL(S || T), or the Jensen-Shannon divergence. A batch without a token left has loss exactly 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from reef.trainers.local.llama import Llama
from reef.trainers.local.losses import jsd, ratio_of, tail, tis
from reef.trainers.local.objective import Context, Outputs, Plan, Rows
from reef.trainers.local.shadow import Shadow

ALPHA = {"forward": 0.0, "jsd": 0.5, "reverse": 1.0}


def after(mask: Tensor, lengths: Sequence[int], skip: int) -> Tensor:
    """The mask [T] without each sample's first `skip` trained tokens."""
    kept = [one * (one.cumsum(0) > skip) for one in torch.split(mask, list(lengths))]
    return torch.cat(kept)


class SDFT:
    """Options are the fields of `recipes.sdft.recipe.SDFTRecipe` that concern training."""

    def __init__(
        self,
        *,
        learning_rate: float,
        divergence: str,
        top_k: int,
        cap: float,
        skip: int,
        average: float,
        rank: int,
        alpha: float,
        seed: int,
    ) -> None:
        self.plan = Plan(learning_rate, rank, alpha, seed)
        self.divergence, self.top_k = ALPHA[divergence], top_k
        self.cap, self.skip, self.average = cap, skip, average
        self._tokens = 1.0

    def modules(self, model: Llama) -> Mapping[str, tuple[nn.Module, float]]:
        return {"teacher": (Shadow(model, self.plan, self.average), 0.0)} if self.average else {}

    @torch.no_grad()
    def prepare(self, context: Context, batch: Sequence[Rows]) -> dict[str, float]:
        """The teacher's pass, and how many tokens of the batch count."""
        tokens = 0.0
        for rows in batch:
            rows.extra["weights"] = after(rows.mask, rows.lengths, self.skip)
            if rows.contexts:
                rows.extra["weights"] *= rows.taught[0]
                rows.passes["teacher"] = self._teacher(context, rows.contexts[0])
            else:
                rows.extra["weights"] *= 0.0
            tokens += float(rows.extra["weights"].sum())
        self._tokens = max(1.0, tokens)
        return {"samples": float(batch[0].total.samples), "tokens": tokens}

    def _teacher(self, context: Context, rows: Rows) -> Outputs:
        if not self.average:
            return context.base(rows)
        shadow = context.modules["teacher"]
        assert isinstance(shadow, Shadow)
        return context.with_parameters(rows, shadow.tensors(context.parameters()))

    def loss(self, outputs: Outputs, rows: Rows) -> tuple[Tensor, dict[str, float]]:
        """The policy's log-probs (with gradients) and the teacher's, [T, V], or [T, K + 1] with `top_k`."""
        weights = rows.extra["weights"]
        if not bool(weights.any()):
            return outputs.hidden.sum() * 0.0, {"divergence": 0.0}
        teacher = rows.passes["teacher"]
        if self.top_k:
            top = outputs.top(self.top_k)
            sampled, pupil, told = top.sampled, tail(top.logprobs), tail(teacher.chosen(top.ids))
        else:
            heat = rows.temperatures[:, None]
            pupil, told = (outputs.logits() / heat).log_softmax(-1), (teacher.logits() / heat).log_softmax(-1)
            sampled = pupil.gather(1, rows.targets[:, None])[:, 0]
        apart = jsd(pupil, told, self.divergence)
        if self.cap:
            weights = weights * tis(ratio_of(sampled, rows.logprobs), self.cap)
        loss = (apart * weights).sum() / self._tokens
        plain = float((apart.detach() * rows.extra["weights"]).sum()) / self._tokens
        return loss, {"divergence": plain}

    @torch.no_grad()
    def aux_steps(self, context: Context, batch: Sequence[Rows]) -> dict[str, float]:
        if self.average:
            shadow = context.modules["teacher"]
            assert isinstance(shadow, Shadow)
            shadow.update(context.parameters())
        return {}
