"""TTT-Discover's objective: entropic advantages by group, shaped towards the base, unclipped ratios, summed.

Source: arXiv 2601.16175. Loaded only by the trainer process (it needs torch).
Knows: how the numbers of `entropic` become a loss. Does not know: grids, problems, files, the policy's optimizer.

    L = - (1 / rollouts) sum over tokens of exp(log pi - log q) (A_n + kl (mean d - d_t)),  d_t = log q - log base

A token's share does not shrink with its answer's length. The authors divide by nothing; the constant 1 / rollouts only
decides how often the gradient's norm is clipped, since Adam's steps do not depend on a loss's scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from reef.core.errors import TrainError
from reef.trainers.local.llama import Llama
from reef.trainers.local.objective import Common, Context, Outputs, Plan, Rows

from . import entropic


class Entropic:
    """Options are the fields of `DiscoverRecipe` that concern training."""

    def __init__(
        self,
        *,
        learning_rate: float,
        gamma: float,
        advantage_max: float,
        kl: float,
        clip: float,
        rank: int,
        alpha: float,
        seed: int,
    ) -> None:
        self.plan = Plan(learning_rate=learning_rate, rank=rank, alpha=alpha, seed=seed, clip=clip, betas=(0.9, 0.95))
        self.gamma, self.advantage_max, self.kl = gamma, advantage_max, kl

    def modules(self, model: Llama) -> Mapping[str, tuple[nn.Module, float]]:
        return {}

    @torch.no_grad()
    def prepare(self, context: Context, batch: Sequence[Rows]) -> dict[str, float]:
        """Leaves the shaped advantage of each response token, [T], in `rows.extra["advantages"]`."""
        worth, metrics = self._worth(batch)
        drift, kl = 0.0, self.kl
        if not any(one for row in worth for one in row):
            kl = 0.0  # constant groups tell nothing, so the step changes nothing: its gradient is 0
        if kl:
            apart = [(rows.logprobs - context.base(rows).logprobs()) * rows.mask for rows in batch]
            drift = sum(float(one.sum()) for one in apart) / batch[0].total.tokens
            metrics["drift"] = drift  # mean over tokens of log q - log base: an estimate of KL(policy || base)
        for number, rows in enumerate(batch):
            lengths = torch.tensor(rows.lengths)
            found = torch.tensor(worth[number], dtype=torch.float32).repeat_interleave(lengths)
            if kl:
                found = found + kl * (drift - apart[number])
            rows.extra["advantages"] = found * rows.mask
        return metrics

    def loss(self, outputs: Outputs, rows: Rows) -> tuple[Tensor, dict[str, float]]:
        """New log-probs (with gradients), recorded `rows.logprobs` and the advantages are all [T]."""
        apart = (outputs.logprobs() - rows.logprobs) * rows.mask
        loss = surrogate(apart, rows.extra["advantages"]) / rows.total.samples
        mismatch = float(apart.detach().abs().sum()) / rows.total.tokens
        return loss, {"policy_loss": float(loss.detach()), "mismatch": mismatch}

    def common(self, rows: Rows) -> Common:
        return Common("importance_sampling", rows.extra["advantages"] / rows.total.samples)

    def aux_steps(self, context: Context, batch: Sequence[Rows]) -> dict[str, float]:
        return {}

    def _worth(self, batch: Sequence[Rows]) -> tuple[list[list[float]], dict[str, float]]:
        """The advantage of every sample, by micro-batch: groups are compared over the whole batch."""
        groups: dict[str, list[tuple[int, int, float]]] = {}
        for number, rows in enumerate(batch):
            for place, (group, reward) in enumerate(zip(rows.groups, rows.rewards, strict=True)):
                if reward is None or group is None:
                    raise TrainError("TTT-Discover needs a group and a reward for every sample; use its driver")
                groups.setdefault(group, []).append((number, place, reward))
        worth = [[0.0] * len(rows.lengths) for rows in batch]
        betas: list[float] = []
        for members in groups.values():
            rewards = [reward for _, _, reward in members]
            for (number, place, _), one in zip(
                members, entropic.advantages(rewards, self.gamma, cap=self.advantage_max), strict=True
            ):
                worth[number][place] = one
            if (beta := entropic.temperature(rewards, self.gamma)) is not None:
                betas.append(beta)
        flat = [one for row in worth for one in row]
        metrics = {"reward": sum(reward for one in groups.values() for _, _, reward in one) / len(flat)}
        metrics |= {"advantage_max": max(flat), "groups": float(len(groups))}
        return worth, metrics | ({"beta": sum(betas) / len(betas)} if betas else {})


def surrogate(apart: Tensor, advantages: Tensor) -> Tensor:
    """-sum exp(log pi - log q) A, a scalar; both [T]. `apart` is log pi - log q, 0 where a token does not train."""
    return -(apart.exp() * advantages).sum()
