"""SAO's objective: direct importance sampling with a two-sided hard mask, and a critic instead of a group baseline.

Source: Single-rollout Asynchronous Optimisation, arXiv 2607.07508. Loaded only by the trainer process (it needs torch).
Knows: the equations, and the two critics. Does not know: files, micro-batches, the policy's optimizer.

    L = -mean_t sg(f(r_t)) A_t log pi(a_t),  r_t = pi / q,  f(r) = r inside (1 - low, 1 + high), else 0

q is the recorded log-prob, so there is no recomputed old policy. A masked token adds 0 and stays in the denominator; an
observation token is in neither.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from reef.core.errors import TrainError
from reef.trainers.local.llama import Llama
from reef.trainers.local.losses import adaptive_lambda, dis, explained_variance, gae, pull, token_mean
from reef.trainers.local.objective import Context, Outputs, Plan, Rows


class Linear(nn.Module):
    """A zero-initialised linear head on the frozen base's last hidden states, scaled to length 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, d] -> [T]"""
        values: Tensor = self.head(nn.functional.normalize(hidden, dim=-1)).squeeze(-1)
        return values


class Full(nn.Module):
    """A copy of the model with a zero-initialised scalar head. Attention stays frozen, the rest learns (float32)."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.names = sorted(name for name in model.weights if "self_attn" not in name and name != "lm_head.weight")
        self.copies = nn.ParameterList(
            nn.Parameter(model.weights[name].detach().float().clone()) for name in self.names
        )
        self.head = nn.Linear(model.layout.hidden, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, model: Llama, rows: Rows) -> Tensor:
        """The values [T] of the states before each response token."""
        mine = copy.copy(model)
        mine.weights = model.weights | dict(zip(self.names, self.copies, strict=True))
        values: Tensor = self.head(mine.hidden(rows.packed, None, rows.predicts)).squeeze(-1)
        return values


class SAO:
    """The four parts. Options are the fields of `recipes.sao.recipe.SAORecipe` that concern training."""

    def __init__(
        self,
        *,
        learning_rate: float,
        critic_learning_rate: float,
        critic: str,
        epsilon_low: float,
        epsilon_high: float,
        critic_steps: int,
        critic_warmup: int,
        length_alpha: float,
        kl: float,
        rank: int,
        alpha: float,
        seed: int,
    ) -> None:
        self.plan = Plan(learning_rate=learning_rate, rank=rank, alpha=alpha, seed=seed)
        self.critic_learning_rate = critic_learning_rate
        self.critic = critic
        self.low, self.high = epsilon_low, epsilon_high
        self.critic_steps, self.critic_warmup = critic_steps, critic_warmup
        self.length_alpha = length_alpha
        self.kl = kl
        self._warming = False
        self._tokens: dict[int, float] = {}  # trained tokens of the whole batch by lag

    def modules(self, model: Llama) -> Mapping[str, tuple[nn.Module, float]]:
        critic = Linear(model.layout.hidden) if self.critic == "linear" else Full(model)
        return {"critic": (critic, self.critic_learning_rate)}

    @torch.no_grad()
    def prepare(self, context: Context, batch: Sequence[Rows]) -> dict[str, float]:
        """Values from the critic as it is before this batch, advantages from them; Monte-Carlo targets for it."""
        self._warming = context.updates < self.critic_warmup
        rewards: list[float] = []
        first_values: list[float] = []
        lags: list[int] = []
        self._tokens = {}
        for rows in batch:
            if self.critic == "linear" or self.kl:
                base = context.base(rows)
                rows.extra["base_hidden"] = base.hidden
                if self.kl:
                    rows.extra["base_logprobs"] = base.logprobs()
            values = torch.split(self._values(context, rows), list(rows.lengths))
            masks = torch.split(rows.mask, list(rows.lengths))
            found = []
            samples = zip(values, masks, rows.rewards, rows.lengths, rows.lags, strict=True)
            for value, mask, reward, length, lag in samples:
                if reward is None:
                    raise TrainError("SAO needs a score for every sample; the batch holds one without")
                lam = adaptive_lambda(length, self.length_alpha)
                found += gae(value.tolist(), mask.tolist(), reward, lam)
                self._tokens[lag] = self._tokens.get(lag, 0.0) + float(mask.sum())
                rewards.append(reward)
                first_values.append(float(value[mask.argmax()]))
            lags += rows.lags
            rows.extra["advantages"] = torch.tensor(found)
            rows.extra["returns"] = torch.tensor(
                [
                    reward or 0.0
                    for reward, length in zip(rows.rewards, rows.lengths, strict=True)
                    for _ in range(length)
                ]
            )
        metrics = {
            "reward": math.fsum(rewards) / len(rewards),
            "lag_mean": sum(lags) / len(lags),
            "lag_max": float(max(lags)),
            "tokens": float(batch[0].total.tokens),
            "samples": float(len(rewards)),
            "warming": float(self._warming),
        }
        metrics |= {f"lag_{lag}": float(lags.count(lag)) for lag in sorted(set(lags))}
        if (explained := explained_variance(rewards, first_values)) is not None:
            metrics["critic_explained_variance"] = explained
        return metrics

    def loss(self, outputs: Outputs, rows: Rows) -> tuple[Tensor, dict[str, float]]:
        """New log-probs (with gradients), recorded `rows.logprobs`, `rows.mask` and advantages are all [T]."""
        logprobs = outputs.logprobs()
        ratio = (logprobs.detach() - rows.logprobs).exp()
        weight = dis(ratio, self.low, self.high)
        tokens = rows.total.tokens
        policy = token_mean(-weight * rows.extra["advantages"] * logprobs, rows.mask, rows.total)
        if self._warming:
            policy = policy * 0.0
        gone = (weight == 0) * rows.mask
        moving = ((weight * rows.extra["advantages"]) != 0) * rows.mask
        metrics = {
            "policy_loss": float(policy.detach()),
            "pg_clipfrac": float(gone.sum()) / tokens,
            "effective_tokens": float((rows.mask - gone).sum()),
            "effective_token_rate": float(moving.sum()) / tokens,
            "mismatch": float(((logprobs.detach() - rows.logprobs).abs() * rows.mask).sum()) / tokens,
        }
        for lag, each in zip(rows.lags, gone.split(list(rows.lengths)), strict=True):
            if self._tokens[lag]:
                name = f"masked_lag_{lag}"
                metrics[name] = metrics.get(name, 0.0) + float(each.sum()) / self._tokens[lag]
        if not self.kl:
            return policy, metrics
        drift = token_mean(pull(logprobs, rows.extra["base_logprobs"], rows.logprobs), rows.mask, rows.total)
        return policy + self.kl * drift * (not self._warming), metrics | {"kl": float(drift.detach())}

    def aux_steps(self, context: Context, batch: Sequence[Rows]) -> dict[str, float]:
        """K regressions of the critic onto the Monte-Carlo return (lambda 1): the mean squared error over actions."""

        def losses() -> Iterator[Tensor]:
            for rows in batch:
                error = self._values(context, rows) - rows.extra["returns"]
                yield (error.square() * rows.mask).sum() / rows.total.tokens

        found = [context.update("critic", losses()) for _ in range(self.critic_steps)]
        return {"critic_loss": found[0]} if found else {}

    def _values(self, context: Context, rows: Rows) -> Tensor:
        critic = context.modules["critic"]
        values: Tensor = critic(rows.extra["base_hidden"]) if self.critic == "linear" else critic(context.model, rows)
        return values
