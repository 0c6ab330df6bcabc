"""OpenClaw-RL's objective: a verdict on the whole turn, and distillation from the base that was told the hint.

Source: arXiv 2603.10165 (v1: the teacher's log-ratio of the sampled token; v2: advantages of the top K tokens). Loaded
only by the trainer process (it needs torch). Knows: the equations. Does not know: who judged, or what a hint says.

    L = (w_rl sum_t PPO(rho_t, r) + w_opd sum_t D_t) / tokens + kl rho k3(pi, base)

The teacher is the frozen base, reading the prompt with a hint in it. A scored turn without a hint has no teacher; there
the same D_t, times `anchor`, is taken with the base on the turn's own prompt: a pull back to where the policy began.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from reef.core.errors import TrainError
from reef.trainers.local.llama import Llama
from reef.trainers.local.losses import ppo_clip, pull, ratio_of, spread, token_mean
from reef.trainers.local.objective import Context, Outputs, Plan, Rows


def overlap(student: Tensor, teacher: Tensor) -> Tensor:
    """[T] float32: how many of the student's top ids [T, K] are among the teacher's [T, K]."""
    return (student[:, :, None] == teacher[:, None, :]).any(-1).float().sum(-1)


def choose(counts: Tensor, exists: Tensor, lengths: Sequence[int], how: str) -> Tensor:
    """Which teacher each token listens to, [T] int64. `counts` (overlaps) and `exists` (1 or 0) are [k, T].

    `sequence_optimal`: one for each sample, with the largest sum; `token_optimal`: the largest at each token;
    `shortest`: the first, as hints come shortest first. The first of equals wins, also where none exists at all (there
    the first is the sample's own prompt); one that does not exist never wins over one that does.
    """
    counts = torch.where(exists > 0, counts, -1.0)
    if how == "token_optimal":
        return counts.argmax(0)
    chosen = torch.zeros(counts.shape[1], dtype=torch.long)
    if how == "shortest":
        return chosen
    for start, end in pairwise(accumulate(lengths, initial=0)):
        chosen[start:end] = counts[:, start:end].sum(1).argmax()
    return chosen


def select_advantages(teacher: Tensor, old: Tensor, kept: Tensor, clip: float) -> Tensor:
    """A_v = clip(l_T - l_old, -C, C) w_v, w = softmax(l_old) over the subset. All [T, K]: log-probs of the same tokens
    under teacher and policy, and (bool) whether they are in the subset. Outside it, and in an empty subset, 0."""
    weights = old.masked_fill(~kept, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (teacher - old).clamp(-clip, clip).masked_fill(~kept, 0.0) * weights


def select_loss(current: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """[T]: D_t = sum_v PPO-clip with rho_v = exp(clamp(l_v - l_old, +-20)); arguments are [T, K]. Differentiable
    through `current`."""
    losses: Tensor = ppo_clip(ratio_of(current, old), advantages, low, high)
    return losses.sum(-1)


def sampled_advantages(rewards: Tensor, teacher: Tensor, old: Tensor, w_rl: float, w_opd: float | Tensor) -> Tensor:
    """Version 1: A_t = w_rl r + w_opd (log pi_T - log pi_old) of the sampled tokens, all [T]."""
    return w_rl * rewards + w_opd * (teacher - old)


class OpenClaw:
    """Options are the fields of `recipes.openclawrl.recipe.OpenClawRecipe` that concern training."""

    def __init__(
        self,
        *,
        learning_rate: float,
        w_rl: float,
        w_opd: float,
        anchor: float,
        distil: str,
        top_k: int,
        choose: str,
        subset: str,
        clip: float,
        epsilon_low: float,
        epsilon_high: float,
        kl: float,
        rank: int,
        alpha: float,
        seed: int,
    ) -> None:
        # The paper's optimizer. Its decay of 0.1 takes 1e-4 of a LoRA away in a step at the rate used here.
        self.plan = Plan(learning_rate, rank, alpha, seed, betas=(0.9, 0.98), weight_decay=0.1)
        self.w_rl, self.w_opd, self.anchor, self.kl = w_rl, w_opd, anchor, kl
        self.distil, self.top_k, self.choose, self.subset, self.clip = distil, top_k, choose, subset, clip
        self.low, self.high = epsilon_low, epsilon_high

    def modules(self, model: Llama) -> Mapping[str, tuple[nn.Module, float]]:
        return {}

    @torch.no_grad()
    def prepare(self, context: Context, batch: Sequence[Rows]) -> dict[str, float]:
        """Leaves the passes of the teachers: the base behind each context. Where a sample has no such context, its own
        prompt stands there, so that the first teacher is the anchor of a sample without a hint."""
        hinted = 0
        for rows in batch:
            if None in rows.rewards:
                raise TrainError("OpenClaw-RL needs a verdict for every sample; the batch holds one without")
            rows.extra["rewards"] = spread(torch.tensor([reward or 0.0 for reward in rows.rewards]), rows.lengths)
            taught = torch.stack(rows.taught).amax(0) if rows.taught else torch.zeros_like(rows.mask)
            hinted += sum(bool(one.any()) for one in torch.split(taught, list(rows.lengths)))
            weights = torch.where(taught > 0, self.w_opd, self.w_opd * self.anchor) * rows.mask
            if bool(weights.any()):
                rows.extra["weights"] = weights
                for number, other in enumerate(rows.contexts or (rows,)):
                    rows.passes[f"teacher {number}"] = context.base(other)
            if self.kl:
                rows.extra["base_logprobs"] = context.base(rows).logprobs()
        verdicts = [reward or 0.0 for rows in batch for reward in rows.rewards]
        lags = [lag for rows in batch for lag in rows.lags]
        return {
            "reward": math.fsum(verdicts) / len(verdicts),
            "hinted": hinted / len(verdicts),
            "lag_mean": sum(lags) / len(lags),
            "lag_max": float(max(lags)),
            "tokens": float(batch[0].total.tokens),
            "samples": float(len(verdicts)),
        }

    def loss(self, outputs: Outputs, rows: Rows) -> tuple[Tensor, dict[str, float]]:
        """The policy's log-probs (with gradients), the recorded `rows.logprobs`, mask and rewards are all [T]."""

        def mean(losses: Tensor) -> Tensor:
            return token_mean(losses, rows.mask, rows.total)

        advantages, metrics, distilled = self.w_rl * rows.extra["rewards"], dict[str, float](), None
        teachers = list(rows.passes.values())
        if teachers and self.distil == "select":
            each, logprobs = self._select(outputs, teachers, rows)
            distilled = mean(each * rows.extra["weights"])
            metrics["distil_loss"] = float(distilled.detach())
        else:
            logprobs = outputs.logprobs()
            if teachers:  # the first hint, the shortest, is the teacher's
                old, teacher = logprobs.detach(), teachers[0].logprobs()
                advantages = sampled_advantages(rows.extra["rewards"], teacher, old, self.w_rl, rows.extra["weights"])
        whole = mean(ppo_clip(ratio_of(logprobs, rows.logprobs), advantages, self.low, self.high))
        metrics["policy_loss"] = float(whole.detach())
        metrics["mismatch"] = float(mean((logprobs.detach() - rows.logprobs).abs()))
        if distilled is not None:
            whole = whole + distilled
        if self.kl:
            drift = mean(pull(logprobs, rows.extra["base_logprobs"], rows.logprobs))
            whole, metrics["kl"] = whole + self.kl * drift, float(drift.detach())
        return whole, metrics

    def _select(self, outputs: Outputs, teachers: Sequence[Outputs], rows: Rows) -> tuple[Tensor, Tensor]:
        """D_t and the policy's log-probs of the recorded tokens, both [T]. l_old is what the policy thinks now, without
        gradients: a batch makes one step, so rho is 1 here and only its gradient counts."""
        student = outputs.top(self.top_k)
        with torch.no_grad():
            tops = [teacher.top(self.top_k) for teacher in teachers]
            counts = torch.stack([overlap(student.ids, top.ids) for top in tops])
            exists = torch.stack(rows.taught) if rows.taught else torch.ones(1, len(rows.mask))
            which, each = choose(counts, exists, rows.lengths, self.choose), torch.arange(len(rows.mask))
            top_ids = torch.stack([top.ids for top in tops])[which, each]
            ids = top_ids if self.subset == "teacher" else student.ids
            logs = torch.stack([teacher.chosen(ids) for teacher in teachers])[which, each]
        current = outputs.chosen(ids) if self.subset == "teacher" else student.logprobs
        kept = current.detach().isfinite() & logs.isfinite()  # a grammar may leave fewer than K tokens
        if self.subset == "overlap":
            kept &= (ids[:, :, None] == top_ids[:, None, :]).any(-1)
        current, logs = current.masked_fill(~kept, 0.0), logs.masked_fill(~kept, 0.0)
        old = current.detach()
        advantages = select_advantages(logs, old, kept, self.clip)
        return select_loss(current, old, advantages, self.low, self.high), student.sampled

    def aux_steps(self, context: Context, batch: Sequence[Rows]) -> dict[str, float]:
        return {}
